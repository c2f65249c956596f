"""The two kinds of dataset, in memory and streaming, and the checks of images and labels.

An `ImageDataset` refuses what training or evaluation would misread: images of a wrong rank, with
NaN, or of a range other than [0, 1] or uint8, and labels that are not class numbers.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from he_keras.arguments import check_positive_integer
from he_keras.data import randomness, records

#: Room for the rounding of a division by 255 in float32.
RANGE_TOLERANCE = 1e-6


def check_images(images: npt.ArrayLike) -> np.ndarray:
    """Checks a set of images and returns it as a uint8 or float32 array.

    Args:
        images: Array of shape (examples, height, width, channels), uint8, or floating with values
            in [0, 1].

    Returns:
        The images. uint8 stays as it is, and floating values become float32 in [0, 1].

    Raises:
        ValueError: The rank, the dtype or the values are wrong.
    """
    images = np.asarray(images)
    if images.ndim != 4 or 0 in images.shape:
        raise ValueError(
            "images have the wrong shape; expected (examples, height, width, channels), all "
            "positive; add a channel axis to grey images with images[..., None]; "
            f"received images.shape={images.shape}"
        )
    if images.dtype == np.uint8:
        return images
    if not np.issubdtype(images.dtype, np.floating):
        raise ValueError(
            "images have the wrong dtype; expected uint8 in 0..255 or floating in [0, 1]; convert "
            f'with images.astype("uint8"); received images.dtype={images.dtype}'
        )
    low, high = float(images.min()), float(images.max())
    if not (low >= -RANGE_TOLERANCE and high <= 1.0 + RANGE_TOLERANCE):
        # A NaN anywhere makes both extremes NaN.
        raise ValueError(
            "floating images lie outside [0, 1] or hold NaN; expected values in [0, 1], or uint8 "
            f"for 0..255; received images.min()={low}, images.max()={high}"
        )
    return np.clip(images.astype(np.float32, copy=False), 0.0, 1.0)


def class_numbers(labels: npt.ArrayLike) -> np.ndarray:
    """Returns the class numbers of one-hot rows, and says so once; other labels as they are.

    Example:
        >>> from he_keras.data.datasets import class_numbers
        >>> class_numbers([[0, 1, 0], [1, 0, 0]]).tolist()
        [1, 0]
    """
    labels = np.asarray(labels)
    if labels.ndim != 2 or labels.shape[1] < 2 or labels.dtype.kind not in "iufb":
        return labels
    is_one_hot = ((labels == 0) | (labels == 1)).all() and (labels.sum(axis=1) == 1).all()
    if not is_one_hot:
        return labels
    warnings.warn("One-hot labels: the class is the column that holds 1.", stacklevel=3)
    return labels.argmax(axis=1)


def check_labels(
    labels: npt.ArrayLike, num_examples: int, num_classes: int | None = None
) -> np.ndarray:
    """Checks class numbers and returns them as an int64 array.

    Args:
        labels: Integer array of shape (examples,) or (examples, 1).
        num_examples: Number of images they belong to.
        num_classes: Number of classes, or None if it is not known.

    Returns:
        The labels, int64, of shape (examples,).

    Raises:
        ValueError: They are no such class numbers.
    """
    labels = class_numbers(labels)
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1 or len(labels) != num_examples:
        raise ValueError(
            f"labels do not match the images; expected shape ({num_examples},), one class number "
            f"for each image; received labels.shape={labels.shape}"
        )
    if not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(
            "labels have the wrong dtype; expected integers, class numbers from 0; received "
            f"labels.dtype={labels.dtype}"
        )
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or (num_classes is not None and high >= num_classes):
        expected = "0 or more" if num_classes is None else f"0..{num_classes - 1}"
        raise ValueError(
            f"labels are out of range; expected {expected}; received labels.min()={low}, "
            f"labels.max()={high}"
        )
    return labels.astype(np.int64)


def check_class_names(class_names: Sequence[str], num_classes: int) -> tuple[str, ...]:
    """Returns one name per class: the given ones, or the class numbers if none are given."""
    names = tuple(str(name) for name in class_names) or tuple(map(str, range(num_classes)))
    if len(names) != num_classes:
        raise ValueError(
            f"class names do not match the classes; expected {num_classes} names; received "
            f"len(class_names)={len(names)}"
        )
    return names


def check_indices(indices: npt.ArrayLike, num_examples: int) -> np.ndarray:
    """Checks positions in a dataset and returns them as an int64 array."""
    indices = np.asarray(indices)
    valid = indices.ndim == 1 and indices.size > 0 and np.issubdtype(indices.dtype, np.integer)
    if not valid or indices.min() < 0 or indices.max() >= num_examples:
        raise ValueError(
            f"indices do not select examples; expected a non-empty row of integers in "
            f"0..{num_examples - 1}; received indices={indices!r}"
        )
    return indices.astype(np.int64)


@dataclasses.dataclass(frozen=True, eq=False)
class ImageDataset:
    """Images and labels in memory.

    Args:
        name: Name of the dataset.
        split: Name of the split.
        images: (examples, height, width, channels), uint8, or float32 in [0, 1].
        labels: (examples,), integers.
        num_classes: Number of classes.
        class_names: One name per class. Defaults to the class numbers.

    Example:
        >>> import he_keras as he
        >>> test = he.data.load("digits", "test")
        >>> len(test), test.image_shape, test.num_classes
        (360, (8, 8, 1), 10)
        >>> images, labels = test.take(100).as_float()
        >>> images.shape, images.dtype.name
        ((100, 8, 8, 1), 'float32')
    """

    name: str
    split: str
    images: np.ndarray = dataclasses.field(repr=False)
    labels: np.ndarray = dataclasses.field(repr=False)
    num_classes: int
    class_names: tuple[str, ...] = dataclasses.field(default=(), repr=False)

    def __post_init__(self) -> None:
        check_positive_integer("num_classes", self.num_classes)
        images = check_images(self.images)
        labels = check_labels(self.labels, len(images), self.num_classes)
        object.__setattr__(self, "images", images)
        object.__setattr__(self, "labels", labels)
        names = check_class_names(self.class_names, self.num_classes)
        object.__setattr__(self, "class_names", names)

    def __len__(self) -> int:
        return len(self.images)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(height, width, channels) of every image."""
        height, width, channels = self.images.shape[1:]
        return height, width, channels

    def subset(self, indices: npt.ArrayLike) -> ImageDataset:
        """Returns the examples at these positions, in this order."""
        indices = check_indices(indices, len(self))
        return dataclasses.replace(self, images=self.images[indices], labels=self.labels[indices])

    def take(self, num_examples: int) -> ImageDataset:
        """Returns the first `num_examples` examples, or all if there are fewer."""
        check_positive_integer("num_examples", num_examples)
        images, labels = self.images[:num_examples], self.labels[:num_examples]
        return dataclasses.replace(self, images=images, labels=labels)

    def as_float(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns (float32 images in [0, 1], labels), as plain `model.fit` takes them."""
        if self.images.dtype == np.uint8:
            return self.images.astype(np.float32) / np.float32(255.0), self.labels
        return self.images, self.labels

    def examples(
        self,
        shuffle_seed: int | None = None,
        epoch: int | tf.Tensor = 0,
        first_example: int | tf.Tensor = 0,
    ) -> tf.data.Dataset:
        """Returns a `tf.data.Dataset` of (image, label); see `StreamingDataset.examples`."""
        with tf.init_scope(), tf.device("/CPU:0"):
            images, labels = tf.constant(self.images), tf.constant(self.labels)
        numbers = tf.data.Dataset.range(first_example, len(self))
        if shuffle_seed is None:
            return numbers.map(lambda number: (images[number], labels[number]))
        order = randomness.epoch_order(len(self), shuffle_seed, epoch)
        return numbers.map(lambda number: (images[order[number]], labels[order[number]]))


@dataclasses.dataclass(frozen=True, eq=False)
class StreamingDataset:
    """Images that are read and decoded when they are used.

    Args:
        name: Name of the dataset.
        split: Name of the split.
        source: The source of the encoded images (`he_keras.data.records`).
        num_classes: Number of classes.
        class_names: One name per class. Defaults to the class numbers.
        image_shape: (height, width, channels) of the images that the pipelines deliver.
        indices: Positions in the source, ascending. Defaults to all.
    """

    name: str
    split: str
    source: Any = dataclasses.field(repr=False)
    num_classes: int
    class_names: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    image_shape: tuple[int, int, int] = (224, 224, 3)
    indices: np.ndarray | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_positive_integer("num_classes", self.num_classes)
        names = check_class_names(self.class_names, self.num_classes)
        object.__setattr__(self, "class_names", names)

    def __len__(self) -> int:
        return self.source.num_examples if self.indices is None else len(self.indices)

    def subset(self, indices: npt.ArrayLike) -> StreamingDataset:
        """Returns the examples at these positions, each once, in the order of storage."""
        chosen = self._positions()[np.unique(check_indices(indices, len(self)))]
        return dataclasses.replace(self, indices=chosen)

    def take(self, num_examples: int) -> StreamingDataset:
        """Returns the first `num_examples` examples, or all if there are fewer."""
        check_positive_integer("num_examples", num_examples)
        return dataclasses.replace(self, indices=self._positions()[:num_examples])

    def examples(
        self,
        shuffle_seed: int | None = None,
        epoch: int | tf.Tensor = 0,
        first_example: int | tf.Tensor = 0,
    ) -> tf.data.Dataset:
        """Returns a `tf.data.Dataset` of (uint8 image of any size, label).

        Args:
            shuffle_seed: None for the order of storage. Otherwise the order depends only on
                (shuffle_seed, epoch).
            epoch: Number of the epoch, an integer or a scalar tensor.
            first_example: Number of examples to leave out at the beginning. They are not decoded.

        Returns:
            A `tf.data.Dataset`.
        """
        channels = self.image_shape[-1]
        encoded = self.source.read(self._positions(), shuffle_seed, epoch, first_example)
        return encoded.map(
            lambda image, label: (records.decode(image, channels), label),
            num_parallel_calls=tf.data.AUTOTUNE,
            deterministic=True,
        )

    def _positions(self) -> np.ndarray:
        return np.arange(self.source.num_examples) if self.indices is None else self.indices


AnyDataset = ImageDataset | StreamingDataset
