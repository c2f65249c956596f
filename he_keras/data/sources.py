"""Readers: scikit-learn's digits, NumPy arrays, .npz files, prepared TFDS folders, image folders.

Nothing here opens a network connection: TFDS folders are read through
`tfds.builder_from_directory`, which only reads files.
"""

from __future__ import annotations

import math
import pathlib
import re
import zipfile
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from he_keras.data import datasets, records
from he_keras.data.facts import FACTS

# A split with images larger than this on a side, or more bytes than this, is streamed.
LARGEST_SIDE_IN_MEMORY = 64
LARGEST_BYTES_IN_MEMORY = 2**30

_IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg")
_SPLIT_FOLDERS = {"train": ("train",), "test": ("test",), "validation": ("validation", "val")}
_NPZ_KEYS = (("images", "labels"), ("x", "y"))


def from_arrays(
    name: str,
    split: str,
    images: npt.ArrayLike,
    labels: npt.ArrayLike,
    num_classes: int | None = None,
    class_names: Sequence[str] = (),
) -> datasets.ImageDataset:
    """Returns an `ImageDataset` of arrays. Without `num_classes`, it counts the classes."""
    images = datasets.check_images(images)
    labels = datasets.check_labels(labels, len(images), num_classes)
    if num_classes is None:
        num_classes = len(class_names) or int(labels.max()) + 1
    return datasets.ImageDataset(name, split, images, labels, num_classes, tuple(class_names))


def read_digits(split: str) -> datasets.ImageDataset:
    """Reads the 1,797 handwritten digits (8x8, grey) that are embedded in scikit-learn.

    Their 17 grey levels 0..16 become uint8 values `(255 * level + 8) // 16`, which is level * 255 /
    16 rounded half up. So the levels stay distinct, 0 stays 0, and 16 becomes 255. The split is
    fixed and stratified: the examples are permuted by `RandomState(0)`, whose stream NumPy
    guarantees, and sorted stably by class. Every fifth example, beginning with the first, is a test
    example. That gives 1,437 training and 360 test examples.
    """
    import sklearn.datasets

    if split not in ("train", "test", "all"):
        raise ValueError(
            "digits have no such split; expected 'train', 'test', 'all', or 'validation' with "
            f"validation_examples > 0; received split={split!r}"
        )
    bunch = sklearn.datasets.load_digits()
    levels = bunch.images.astype(np.int64)
    images = ((255 * levels + 8) // 16).astype(np.uint8)[..., None]
    labels = bunch.target.astype(np.int64)
    order = np.random.RandomState(0).permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    is_test = np.arange(len(order)) % 5 == 0
    chosen = {"train": order[~is_test], "test": order[is_test], "all": order}[split]
    chosen = np.sort(chosen)
    facts = FACTS["digits"]
    return datasets.ImageDataset(
        "digits", split, images[chosen], labels[chosen], facts.num_classes, facts.class_names or ()
    )


def read_npz(
    path: pathlib.Path, split: str, num_classes: int | None = None
) -> datasets.ImageDataset:
    """Reads an .npz file.

    With the keys `images` and `labels`, or `x` and `y`, the file is one set, whose split is "all"
    whatever `split` is. With `_train`, `_test` or `_validation` appended (`x_train`, `y_train`,
    ...), the split chooses a pair. An optional `class_names` is an array of strings.
    """
    arrays = _load_npz(path)
    pairs = [
        (images + suffix, labels + suffix, found)
        for suffix, found in ((f"_{split}", split), ("", "all"))
        for images, labels in _NPZ_KEYS
    ]
    for images, labels, found in pairs:
        if images in arrays and labels in arrays:
            return from_arrays(
                path.stem,
                found,
                arrays[images],
                arrays[labels],
                num_classes,
                class_names=tuple(arrays.get("class_names", ())),
            )
    raise ValueError(
        f"{path} has no images and labels for split {split!r}; expected one of the key pairs "
        f"{[keys[:2] for keys in pairs]}; received keys={sorted(arrays)}"
    )


def _load_npz(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Reads all arrays of an .npz file without ever unpickling."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return {key: file[key] for key in file.files}
    except (
        ValueError,
        EOFError,
        zipfile.BadZipFile,
        zlib.error,
        AttributeError,
        TypeError,
    ) as error:
        # np.load returns a bare array, without `files`, for a renamed .npy.
        raise ValueError(
            f"{path} cannot be read; expected an undamaged .npz of plain arrays (no Python "
            f"objects), as np.savez writes it; received path={str(path)!r} ({error})"
        ) from error


def prepared_folder(folder: pathlib.Path) -> pathlib.Path | None:
    """Returns the newest version of a dataset that TFDS has prepared in a folder, if any.

    Args:
        folder: A version folder (`.../cifar10/3.0.2`) or the one above it.

    Returns:
        The version folder, or None.
    """
    if (folder / "dataset_info.json").is_file():
        return folder
    versions = [
        path.parent
        for path in folder.glob("*/dataset_info.json")
        if re.fullmatch(r"\d+\.\d+\.\d+", path.parent.name)
    ]
    return max(versions, key=lambda path: tuple(map(int, path.name.split("."))), default=None)


def read_tfds(
    folder: pathlib.Path, split: str, num_classes: int | None = None
) -> datasets.AnyDataset:
    """Reads a split of a prepared TFDS folder, into memory if it is small, otherwise as a stream.

    Args:
        folder: A version folder.
        split: "train", "test", "validation" or another split that the folder has.
        num_classes: Number of classes that the caller expects, or None.

    Returns:
        An `ImageDataset` or a `StreamingDataset`.
    """
    info = _tfds_info(folder)
    if info.name in FACTS and split == "test":
        stored_split = FACTS[info.name].test_split
    else:
        stored_split = split
    if stored_split not in info.splits:
        raise ValueError(
            f"{folder} has no split {stored_split!r}; expected one of {sorted(info.splits)}, or "
            f"'validation' with validation_examples > 0; received split={split!r}"
        )
    image_key, label_key = _tfds_keys(info, folder)
    label_feature = info.features[label_key]
    names = tuple(label_feature.names or ())
    classes = label_feature.num_classes
    if num_classes is not None and num_classes != classes:
        raise ValueError(
            f"{folder} has another number of classes; expected num_classes={classes}; received "
            f"num_classes={num_classes}"
        )
    source = records.TfdsRecords(info, stored_split, image_key, label_key)
    _check_files(folder, source.files)
    shape = info.features[image_key].shape
    if _fits_in_memory(shape, source.num_examples):
        images, labels = _read_into_memory(folder, source, shape)
        return datasets.ImageDataset(info.name, split, images, labels, classes, names)
    image_shape = (224, 224, shape[-1] or 3)
    return datasets.StreamingDataset(info.name, split, source, classes, names, image_shape)


def _tfds_info(folder: pathlib.Path) -> Any:
    """Returns the `DatasetInfo` of a prepared folder."""
    import tensorflow_datasets as tfds

    try:
        info = tfds.builder_from_directory(str(folder)).info
        file_format = info.file_format.value
    except Exception as error:  # The JSON and protobuf readers of TFDS raise many kinds.
        raise ValueError(
            f"{folder} cannot be read by TFDS; expected an undamaged dataset_info.json and "
            f"features.json; received folder={str(folder)!r} ({error})"
        ) from error
    if file_format != "tfrecord":
        raise ValueError(
            f"{folder} is stored in another format; expected tfrecord, the default of `tfds "
            f"build`; received file_format={file_format!r}"
        )
    return info


def _tfds_keys(info: Any, folder: pathlib.Path) -> tuple[str, str]:
    """Returns the names of the image and the label feature."""
    import tensorflow_datasets as tfds

    keys = info.supervised_keys or ("image", "label")
    features = info.features
    if (
        len(keys) == 2
        and all(key in features for key in keys)
        and isinstance(features[keys[0]], tfds.features.Image)
        and isinstance(features[keys[1]], tfds.features.ClassLabel)
    ):
        return keys
    raise ValueError(
        f"{folder} is not an image classification dataset; expected an Image and a ClassLabel as "
        f"supervised keys; received features={sorted(features)}"
    )


def _check_files(folder: pathlib.Path, files: list[str]) -> None:
    missing = [file for file in files if not pathlib.Path(file).is_file()]
    if missing:
        raise ValueError(
            f"{folder} is incomplete; expected {len(files)} TFRecord files; received "
            f"{len(files) - len(missing)} of them, missing {missing[0]}"
        )


def _fits_in_memory(shape: tuple[int | None, ...], num_examples: int) -> bool:
    sizes = [size for size in shape if size is not None]
    small = len(sizes) == len(shape) and max(sizes[:2]) <= LARGEST_SIDE_IN_MEMORY
    return small and num_examples * math.prod(sizes) <= LARGEST_BYTES_IN_MEMORY


def _read_into_memory(
    folder: pathlib.Path, source: records.TfdsRecords, shape: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Decodes a whole source into arrays."""
    stream = source.read(np.arange(source.num_examples))
    stream = stream.map(
        lambda encoded, label: (records.decode(encoded, shape[-1]), label),
        num_parallel_calls=tf.data.AUTOTUNE,
        deterministic=True,
    )
    images = np.empty((source.num_examples, *shape), np.uint8)
    labels = np.empty(source.num_examples, np.int64)
    done = 0
    try:
        for batch, batch_labels in stream.batch(1000).prefetch(1).as_numpy_iterator():
            images[done : done + len(batch)] = batch
            labels[done : done + len(batch)] = batch_labels
            done += len(batch)
    except (tf.errors.OpError, ValueError) as error:
        raise ValueError(
            f"{folder} is damaged; expected {source.num_examples} readable examples; received "
            f"{done} ({error})"
        ) from error
    if done != source.num_examples:
        raise ValueError(
            f"{folder} is incomplete; expected {source.num_examples} examples; received {done}"
        )
    return images, labels


def read_image_folder(
    root: pathlib.Path, split: str, num_classes: int | None = None
) -> datasets.AnyDataset:
    """Reads `<root>/<split>/<class>/*.png|jpg|jpeg`, or `<root>/<class>/...` as one set, "all".

    Classes are numbered in alphabetical order of their folders, over all splits of the root. So a
    split without some class keeps the numbering. Images are read into memory if all have the same
    size of at most 64 pixels, otherwise as a stream with three channels. Alpha is dropped.
    """
    split_folders = [
        root / name for names in _SPLIT_FOLDERS.values() for name in names if (root / name).is_dir()
    ]
    folder = root
    if split_folders:
        names = _SPLIT_FOLDERS.get(split, (split,))
        found = [root / name for name in names if root / name in split_folders]
        if not found:
            raise ValueError(
                f"{root} has no folder for the split; expected one of "
                f"{[path.name for path in split_folders]}; received split={split!r}"
            )
        folder = found[0]
    else:
        split = "all"
    class_names = sorted({path.name for top in split_folders or [root] for path in _folders(top)})
    paths, labels = _list_images(folder, class_names)
    classes = len(class_names) if num_classes is None else num_classes
    names = tuple(class_names) if classes == len(class_names) else ()
    source = records.ImageFileRecords(paths, labels)
    images = _small_images(paths, source)
    if images is not None:
        return datasets.ImageDataset(root.name, split, images, np.array(labels), classes, names)
    datasets.check_labels(labels, len(paths), classes)
    return datasets.StreamingDataset(root.name, split, source, classes, names)


def _folders(folder: pathlib.Path) -> list[pathlib.Path]:
    return [path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")]


def _list_images(
    folder: pathlib.Path, class_names: list[str]
) -> tuple[list[pathlib.Path], list[int]]:
    """Returns the paths of all images, class by class, and their labels."""
    paths: list[pathlib.Path] = []
    labels: list[int] = []
    for label, name in enumerate(class_names):
        if not (folder / name).is_dir():
            continue
        images = sorted(
            path
            for path in (folder / name).iterdir()
            if path.suffix.lower() in _IMAGE_SUFFIXES and not path.name.startswith(".")
        )
        if not images:
            raise ValueError(
                f"a class folder holds no images; expected .png, .jpg or .jpeg files in it; "
                f"received folder={str(folder / name)!r}"
            )
        paths += images
        labels += [label] * len(images)
    if not paths:
        raise ValueError(
            "the folder is no image folder; expected <folder>/<class>/*.png|jpg|jpeg or "
            f"<folder>/<split>/<class>/*.png|jpg|jpeg; received folder={str(folder)!r}"
        )
    return paths, labels


def _small_images(paths: list[pathlib.Path], source: records.ImageFileRecords) -> np.ndarray | None:
    """Decodes all images if they have one small size. Otherwise returns None."""
    stream = source.read(np.arange(len(paths))).map(
        lambda encoded, label: records.decode(encoded, 0),
        num_parallel_calls=tf.data.AUTOTUNE,
        deterministic=True,
    )
    images: list[np.ndarray] = []
    try:
        for image in stream.as_numpy_iterator():
            size = image.shape[:2]
            if max(size) > LARGEST_SIDE_IN_MEMORY or (images and size != images[0].shape[:2]):
                return None
            images.append(image)
    except tf.errors.InvalidArgumentError as error:
        raise ValueError(
            f"an image cannot be decoded; expected a PNG or JPEG file; received "
            f"path={str(paths[len(images)])!r}"
        ) from error
    grey = all(image.shape[-1] <= 2 for image in images)
    return np.stack([_with_channels(image, 1 if grey else 3) for image in images])


def _with_channels(image: np.ndarray, channels: int) -> np.ndarray:
    """Drops alpha, and repeats grey if three channels are wanted."""
    colours = image[..., :3] if image.shape[-1] >= 3 else image[..., :1]
    return np.broadcast_to(colours, (*colours.shape[:2], channels))
