"""Lazy sources of encoded images for datasets that do not fit in memory.

A source has `num_examples` and `read(indices, shuffle_seed, epoch, first_example)`, which returns a
`tf.data.Dataset` of (encoded image, label). The images are encoded, so skipping to the middle of an
epoch decodes nothing. `read` may be traced inside another dataset's function, with a symbolic
epoch. So large arrays are created outside of it and captured by reference.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from he_keras.data import randomness

# How many shards are read side by side, and how many examples are shuffled together, if a TFDS
# split is shuffled. With ImageNet's images of 110 kB a window takes about 225 MB.
PARALLEL_SHARDS = 16
SHUFFLE_WINDOW = 2048


def decode(encoded: tf.Tensor, channels: int) -> tf.Tensor:
    """Decodes one PNG or JPEG into a uint8 image of any height and width.

    Args:
        encoded: Scalar string tensor.
        channels: 1, 3, or 0 for the number that the file holds.

    Returns:
        A uint8 tensor of shape (height, width, channels).
    """
    image = tf.io.decode_image(encoded, channels=channels, expand_animations=False)
    image.set_shape((None, None, channels or None))
    return image


def _outside(array: npt.ArrayLike, dtype: tf.DType) -> tf.Tensor:
    """Turns an array into an eager CPU tensor, also while a graph is being traced."""
    with tf.init_scope(), tf.device("/CPU:0"):
        return tf.constant(array, dtype)


class ImageFileRecords:
    """PNG and JPEG files. All of them are shuffled together.

    Args:
        paths: One path per example.
        labels: One integer per example.
    """

    def __init__(self, paths: Sequence[pathlib.Path], labels: Sequence[int]) -> None:
        self.num_examples = len(paths)
        self.labels = np.asarray(labels, np.int64)
        self._paths = _outside([str(path) for path in paths], tf.string)
        self._labels = _outside(labels, tf.int64)

    def read(
        self,
        indices: np.ndarray,
        shuffle_seed: int | None = None,
        epoch: int | tf.Tensor = 0,
        first_example: int | tf.Tensor = 0,
    ) -> tf.data.Dataset:
        """Returns a dataset of (encoded image, label); see the module's docstring."""
        positions = _outside(indices, tf.int64)
        if shuffle_seed is not None:
            order = randomness.epoch_order(len(indices), shuffle_seed, epoch)
            positions = tf.gather(positions, order)

        def read_one(number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            position = positions[number]
            return tf.io.read_file(self._paths[position]), self._labels[position]

        numbers = tf.data.Dataset.range(first_example, len(indices))
        return numbers.map(read_one, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)


class TfdsRecords:
    """One split of a prepared TFDS folder, read from its TFRecord files.

    TFRecord files cannot be read at random. So a shuffled epoch permutes the shards, reads
    `PARALLEL_SHARDS` of them at the same time, and permutes windows of `SHUFFLE_WINDOW` examples.

    Args:
        info: The builder's `tfds.core.DatasetInfo`.
        split: Name of a split of the prepared dataset.
        image_key: Name of the image feature.
        label_key: Name of the label feature.
    """

    def __init__(self, info: Any, split: str, image_key: str, label_key: str) -> None:
        import tensorflow_datasets as tfds

        split_info = info.splits[split]
        lengths = np.asarray(split_info.shard_lengths, np.int64)
        self.num_examples = int(lengths.sum())
        self.files = [str(path) for path in split_info.filepaths]
        self._offsets = np.cumsum(lengths) - lengths
        self._features = info.features
        self._keys = (image_key, label_key)
        self._decoders = {image_key: tfds.decode.SkipDecoding()}

    def read(
        self,
        indices: np.ndarray,
        shuffle_seed: int | None = None,
        epoch: int | tf.Tensor = 0,
        first_example: int | tf.Tensor = 0,
    ) -> tf.data.Dataset:
        """Returns a dataset of (encoded image, label); see the module's docstring."""
        # The shard of each example: the last one that begins at or before it.
        shards = np.unique(np.searchsorted(self._offsets, indices, side="right") - 1)
        records = self._numbered_records(shards, shuffle_seed, epoch)
        if len(indices) < self.num_examples:
            mask = np.zeros(self.num_examples, bool)
            mask[indices] = True
            wanted = _outside(mask, tf.bool)
            records = records.filter(lambda number, record: wanted[number]).take(len(indices))
        examples = records.map(self._parse, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        if shuffle_seed is not None:
            examples = _shuffle_windows(examples, shuffle_seed, epoch)
        return examples.skip(first_example)

    def _numbered_records(
        self, shards: np.ndarray, shuffle_seed: int | None, epoch: int | tf.Tensor
    ) -> tf.data.Dataset:
        """Returns a dataset of (position in the split, serialized example)."""
        files = _outside([self.files[shard] for shard in shards], tf.string)
        offsets = _outside(self._offsets[shards], tf.int64)
        if shuffle_seed is not None:
            order = randomness.epoch_order(len(shards), shuffle_seed, epoch)
            files, offsets = tf.gather(files, order), tf.gather(offsets, order)

        def read_shard(file: tf.Tensor, offset: tf.Tensor) -> tf.data.Dataset:
            numbers = tf.data.Dataset.range(offset, tf.int64.max)
            return tf.data.Dataset.zip((numbers, tf.data.TFRecordDataset(file)))

        return tf.data.Dataset.from_tensor_slices((files, offsets)).interleave(
            read_shard,
            cycle_length=1 if shuffle_seed is None else PARALLEL_SHARDS,
            num_parallel_calls=tf.data.AUTOTUNE,
            deterministic=True,
        )

    def _parse(self, number: tf.Tensor, record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        del number
        example = self._features.deserialize_example(record, decoders=self._decoders)
        image_key, label_key = self._keys
        return example[image_key], tf.cast(example[label_key], tf.int64)


def _shuffle_windows(
    examples: tf.data.Dataset, shuffle_seed: int, epoch: int | tf.Tensor
) -> tf.data.Dataset:
    """Permutes each run of `SHUFFLE_WINDOW` examples by (seed, epoch, number of the window)."""
    seed = randomness.epoch_seed(shuffle_seed, epoch, randomness.ORDER)

    def permute(window: tf.Tensor, batch: tuple[tf.Tensor, ...]) -> tuple[tf.Tensor, ...]:
        order = tf.random.experimental.stateless_shuffle(
            tf.range(tf.shape(batch[0])[0]),
            seed=randomness.fold_in(seed, window),
            alg=randomness.ALGORITHM,
        )
        return tuple(tf.gather(column, order) for column in batch)

    return examples.batch(SHUFFLE_WINDOW).enumerate().map(permute).unbatch()
