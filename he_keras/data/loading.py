"""`load` reads every kind of data set, and `synthetic` makes images for runs without one.

`load` reads

* `digits` (embedded in scikit-learn);
* through TFDS, `mnist`, `fashion_mnist`, `cifar10`, `cifar100`, `imagenet2012` and any other data
  set that is prepared as `<data_dir>/<name>/<version>/`;
* an .npz file with the arrays `images` and `labels`, or `x` and `y`, or the same with `_train`,
  `_test` or `_validation` appended;
* an image folder, `<root>/<split>/<class>/*.png|jpg|jpeg` or `<root>/<class>/*.png|jpg|jpeg`;
* NumPy arrays (images, labels).

Arrays, and files and folders without splits, are one set, which `test_fraction` divides.

Nothing here uses the network or downloads. If a data set is missing, the error says where it was
looked for and how to get it.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from he_keras.arguments import check_positive_integer, reason_of, suggestion, unknown_name
from he_keras.data import datasets, sources, splits
from he_keras.data.facts import FACTS
from he_keras.registry import Registry

#: Readers of data sets of one's own, by name.
_OWN: Registry[Callable[[str], Any]] = Registry("data set")

DatasetSource = str | os.PathLike[str] | tuple[npt.ArrayLike, npt.ArrayLike]


def register(name: str):
    """Makes a function from a split to arrays (images, labels) known under a name.

    It may also return an `ImageDataset` or a `StreamingDataset`. It is called with "train" or
    "test" ("validation" is held out of "train").

    Example:
        >>> import numpy as np, he_keras as he
        >>> @he.data.register("stripes")
        ... def stripes(split):
        ...     return np.zeros((4, 8, 8, 1), "uint8"), np.arange(4) % 2
        >>> he.data.load("stripes", "train").num_classes
        2
    """
    if name in FACTS:
        raise ValueError(f"Data set registered twice; expected a new name; received {name!r}")
    return _OWN.register(name)


class DatasetNotFoundError(FileNotFoundError, ValueError):
    """A data set is not where it was looked for."""


def load(
    name_or_path: DatasetSource,
    split: str,
    data_dir: str | os.PathLike[str] | None = None,
    *,
    validation_examples: int = 0,
    test_fraction: float = 0.0,
    num_classes: int | None = None,
) -> datasets.AnyDataset:
    """Loads one split of a data set. It never downloads.

    Args:
        name_or_path: The name of a known data set (`he_keras.data.FACTS`), or of any other image
            classification data set that TFDS has prepared under `data_dir`. It may also be the path
            of a prepared TFDS folder, an .npz file (never unpickled) or an image folder, or a tuple
            of arrays (images, labels). A known name wins over a folder so named: write "./cifar10"
            for that.
        split: "train", "test", "validation", or "all" (digits, and sources that are one set). The
            test split of imagenet2012 is its 50,000 public validation images.
        data_dir: Folder of prepared TFDS data sets. Defaults to $TFDS_DATA_DIR, otherwise
            ~/tensorflow_datasets.
        validation_examples: With k > 0, the last k of a fixed permutation of the training examples
            are the split "validation", and "train" leaves them out. "test" is unaffected.
        test_fraction: For a source that is one set, the share of examples that is "test", always
            the same ones. The rest is "train". With 0 there is no "test".
        num_classes: Number of classes, for sources that do not state it. Defaults to the largest
            label plus one (arrays, .npz), or to the number of class folders.

    Returns:
        An `ImageDataset` (in memory), or a `StreamingDataset` for images larger than 64 pixels or
        of several sizes.

    Raises:
        DatasetNotFoundError: Nothing was found (a `FileNotFoundError` and a `ValueError`).
        ValueError: An argument is illegal, or what was found is damaged or no data set.

    Example:
        >>> import he_keras as he
        >>> len(he.data.load("digits", "train")), len(he.data.load("digits", "test"))
        (1437, 360)
    """
    splits.check(split, validation_examples, test_fraction)
    is_held_out = validation_examples > 0 and split in ("train", "validation")
    stored_split = "train" if is_held_out else split
    dataset = _read(name_or_path, stored_split, data_dir, num_classes)
    dataset = splits.chosen(dataset, stored_split, test_fraction)
    return splits.hold_out(dataset, split, validation_examples) if is_held_out else dataset


def _read(
    name_or_path: DatasetSource,
    split: str,
    data_dir: str | os.PathLike[str] | None,
    num_classes: int | None,
) -> datasets.AnyDataset:
    """Reads a name, a path or arrays. The split of a source that is one set is "all"."""
    if isinstance(name_or_path, tuple):
        if len(name_or_path) != 2:
            raise ValueError(
                "arrays do not form a data set; expected a tuple (images, labels); received "
                f"len(name_or_path)={len(name_or_path)}"
            )
        return sources.from_arrays("arrays", "all", *name_or_path, num_classes=num_classes)
    if isinstance(name_or_path, str) and name_or_path in _OWN:
        return _read_own(name_or_path, split, num_classes)
    if not isinstance(name_or_path, (str, os.PathLike)):
        raise TypeError(
            "unknown kind of data set; expected a name, a path or a tuple (images, labels); "
            f"received type(name_or_path)={type(name_or_path).__name__}"
        )
    path = pathlib.Path(name_or_path).expanduser()
    if isinstance(name_or_path, str) and (name_or_path in FACTS or not path.exists()):
        return _read_named(name_or_path, split, _data_dir(data_dir), num_classes)
    if not path.exists():
        raise DatasetNotFoundError(
            "there is no such file or folder; expected an .npz file, an image folder or a prepared "
            f"TFDS folder; received name_or_path={str(path)!r}"
        )
    return _read_path(path, split, num_classes)


def _read_own(name: str, split: str, num_classes: int | None) -> datasets.AnyDataset:
    try:
        found = _OWN[name](split)
    # A reader is a program: anything can go wrong in it.
    except Exception as error:
        raise ValueError(
            f"Cannot read the data set {name!r}; expected {_OWN[name].__name__}({split!r}) to "
            f"return (images, labels); received {type(error).__name__}: {reason_of(error)}"
        ) from error
    if isinstance(found, datasets.AnyDataset):
        return found
    if not isinstance(found, tuple) or len(found) != 2:
        raise ValueError(
            f"The reader of {name!r} returned no data set; expected (images, labels) or an "
            f"ImageDataset; received {type(found).__name__}"
        )
    return sources.from_arrays(name, split, *found, num_classes=num_classes)


def _data_dir(data_dir: str | os.PathLike[str] | None) -> pathlib.Path:
    folder = data_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    return pathlib.Path(folder).expanduser()


def _read_path(path: pathlib.Path, split: str, num_classes: int | None) -> datasets.AnyDataset:
    if path.is_dir():
        prepared = sources.prepared_folder(path)
        if prepared is not None:
            return sources.read_tfds(prepared, split, num_classes)
        return sources.read_image_folder(path, split, num_classes)
    if path.suffix == ".npz":
        return sources.read_npz(path, split, num_classes)
    raise ValueError(
        "unknown kind of file; expected an .npz file or a folder; received "
        f"name_or_path={str(path)!r}"
    )


def _read_named(
    name: str, split: str, data_dir: pathlib.Path, num_classes: int | None
) -> datasets.AnyDataset:
    facts = FACTS.get(name)
    if facts is not None and num_classes not in (None, facts.num_classes):
        raise ValueError(
            f"{name} has another number of classes; expected num_classes={facts.num_classes}; "
            f"received num_classes={num_classes!r}"
        )
    if name == "digits":
        return sources.read_digits(split)
    prepared = sources.prepared_folder(data_dir / name)
    if prepared is None:
        raise DatasetNotFoundError(_how_to_get(name, data_dir))
    dataset = sources.read_tfds(prepared, split, num_classes)
    if facts is not None and facts.class_names is not None:
        # Not every version stores the names, and a class must have one name in all of them.
        dataset = dataclasses.replace(dataset, class_names=facts.class_names)
    return dataset


def _how_to_get(name: str, data_dir: pathlib.Path) -> str:
    """Returns the message for a data set that is not there."""
    known = (*FACTS, *_OWN)
    if name not in FACTS:
        return (
            f"{name!r} is neither a file or folder, a known data set, nor prepared; expected an "
            f".npz file, an image folder, one of {', '.join(known)}, or a data set that TFDS has "
            f"prepared in {data_dir / name}; received {name!r}{suggestion(name, known)}"
        )
    manual = ""
    if name == "imagenet2012":
        manual = (
            "; first put ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar, from image-net.org, "
            f"into {data_dir / 'downloads' / 'manual'}"
        )
    return (
        f"Data set {name!r} is not prepared, and he_keras never downloads; expected "
        f"{data_dir / name / '<version>'}; received data_dir={str(data_dir)!r}. On a machine with "
        f"network access: tfds build {name} --data_dir={data_dir}{manual}. If it is elsewhere: "
        "data_dir (--data_dir), TFDS_DATA_DIR, or the path of an .npz file or image folder"
    )


def synthetic(
    name_or_shape: str | tuple[int, int, int],
    num_classes: int | None = None,
    num_examples: int = 256,
    seed: int = 0,
    split: str = "train",
) -> datasets.ImageDataset:
    """Makes random images that depend on their class, for runs that need no data set.

    Every class has a coarse pattern (4x4 cells). It is the same for every seed, so that sets of
    different seeds can serve as train and test. An image is its class's pattern plus noise.

    Args:
        name_or_shape: A known data set's name, for its shape and number of classes, or
            (height, width, channels).
        num_classes: Number of classes. Needed with a shape.
        num_examples: Number of images; the classes take turns.
        seed: Seed of noise and order.
        split: What to call the split.

    Returns:
        An `ImageDataset` of uint8 images, named "synthetic" or as the data set.

    Example:
        >>> import he_keras as he
        >>> he.data.synthetic("cifar10", num_examples=64).images.shape
        (64, 32, 32, 3)
    """
    name, shape, known_classes, names = _facts_or_shape(name_or_shape)
    classes: Any = known_classes if num_classes is None else num_classes
    check_positive_integer("num_classes", classes)
    check_positive_integer("num_examples", num_examples)
    for size in shape:
        check_positive_integer("name_or_shape", size)
    height, width, channels = shape
    if classes != known_classes:
        names = ()

    patterns = np.random.RandomState(0).randint(64, 192, (classes, 4, 4, channels))
    random = np.random.RandomState(seed)
    labels = random.permutation(np.arange(num_examples) % classes)
    rows, columns = np.arange(height) * 4 // height, np.arange(width) * 4 // width
    images = patterns[labels][:, rows][:, :, columns]
    images = images + random.randint(-48, 49, images.shape)
    return datasets.ImageDataset(name, split, images.astype(np.uint8), labels, classes, names)


def _facts_or_shape(
    name_or_shape: str | tuple[int, int, int],
) -> tuple[str, tuple[int, int, int], int | None, tuple[str, ...]]:
    """Returns (name, image shape, number of classes if known, class names if known)."""
    if not isinstance(name_or_shape, str):
        return "synthetic", name_or_shape, None, ()
    if name_or_shape not in FACTS:
        raise unknown_name("data set", name_or_shape, (*FACTS, "(height, width, channels)"))
    facts = FACTS[name_or_shape]
    return name_or_shape, facts.image_shape, facts.num_classes, facts.class_names or ()
