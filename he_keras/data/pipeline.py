"""Pipelines from a dataset to float32 batches, for training (shuffled, augmented) and evaluation.

The training stream is a pure function of (dataset, seed, epoch, position). No state passes from one
batch or epoch to the next. So a run that resumes in the middle gets exactly the tensors of an
uninterrupted run. Images in memory are gathered, cropped and flipped as whole uint8 batches, and
converted to float32 last.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from he_keras.arguments import check_choice, check_positive_integer, is_integer
from he_keras.data import augmentation as augment
from he_keras.data import randomness
from he_keras.data.datasets import AnyDataset, ImageDataset, StreamingDataset

Example = tuple[tf.Tensor, tf.Tensor]
MakeEpoch = Callable[[tf.Tensor], tf.data.Dataset]


def steps_per_epoch(dataset: AnyDataset, batch_size: int, drop_remainder: bool = False) -> int:
    """Returns the number of batches in one pass over a dataset.

    Args:
        dataset: An `ImageDataset` or `StreamingDataset`.
        batch_size: Examples in a batch.
        drop_remainder: Whether a smaller last batch is left out.

    Returns:
        The number of batches, at least 1.

    Example:
        >>> import he_keras as he
        >>> he.data.steps_per_epoch(he.data.load("digits", "test"), 100)
        4
    """
    check_positive_integer("batch_size", batch_size)
    if not drop_remainder:
        return -(-len(dataset) // batch_size)
    if batch_size > len(dataset):
        raise ValueError(
            f"no whole batch; expected batch_size of at most {len(dataset)} with "
            f"drop_remainder=True; received batch_size={batch_size}"
        )
    return len(dataset) // batch_size


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The checked arguments of `train_pipeline`."""

    batch_size: int
    seed: int
    augmentation: str
    initial_epoch: int
    first_batch: int
    steps: int
    drop_remainder: bool

    def first_batch_of(self, epoch: tf.Tensor) -> tf.Tensor:
        """Returns the first batch of an epoch (scalar int64 tensor)."""
        first = tf.constant(self.first_batch, tf.int64)
        return tf.where(tf.equal(epoch, self.initial_epoch), first, tf.zeros_like(first))


def train_pipeline(
    dataset: AnyDataset,
    batch_size: int,
    *,
    seed: int = 0,
    augmentation: str = "none",
    epochs: int = 1,
    initial_epoch: int = 0,
    first_batch: int = 0,
    drop_remainder: bool = False,
) -> tf.data.Dataset:
    """Returns the training stream: the epochs `initial_epoch` to `epochs - 1`, one after another.

    The order and the augmentation of an epoch depend only on `seed` and the epoch's number. So a
    stream that starts at (initial_epoch, first_batch) continues as an uninterrupted one does. For
    the same reason, iterating twice repeats the stream: for `model.fit(..., epochs=E)`, make one
    stream of E epochs and also pass `steps_per_epoch`.

    Args:
        dataset: An `ImageDataset` or `StreamingDataset`.
        batch_size: Examples in a batch. The augmentation of an example does not depend on it.
        seed: Integer seed.
        augmentation: "none", "flip", "crop-flip" (in memory only) or "resized-crop-flip". Streamed
            images that are not cropped at random are resized and centre-cropped.
        epochs: Number of the last epoch plus one.
        initial_epoch: Number of the first epoch.
        first_batch: First batch of the first epoch.
        drop_remainder: Whether a smaller last batch of an epoch is left out.

    Returns:
        A `tf.data.Dataset` of (float32 images in [0, 1], int64 labels) of known cardinality.

    Example:
        >>> import he_keras as he
        >>> digits = he.data.load("digits", "train")
        >>> stream = he.data.train_pipeline(digits, 128, seed=1, epochs=3)
        >>> len(stream) == 3 * he.data.steps_per_epoch(digits, 128)
        True
    """
    steps = steps_per_epoch(dataset, batch_size, drop_remainder)
    _check_augmentation(dataset, augmentation)
    _check_place(seed, epochs, initial_epoch, first_batch, steps)
    plan = _Plan(batch_size, seed, augmentation, initial_epoch, first_batch, steps, drop_remainder)
    if isinstance(dataset, StreamingDataset) or augmentation == "resized-crop-flip":
        make_epoch = _epoch_by_example(dataset, plan)
    else:
        make_epoch = _epoch_by_batch(dataset, plan)
    stream = tf.data.Dataset.range(initial_epoch, epochs).flat_map(make_epoch)
    total = (epochs - initial_epoch) * steps - first_batch
    return _finish(stream.apply(tf.data.experimental.assert_cardinality(total)))


def eval_pipeline(
    dataset: AnyDataset, batch_size: int, *, limit: int | None = None
) -> tf.data.Dataset:
    """Returns the evaluation stream: every example once, in order. The last batch may be smaller.

    Args:
        dataset: An `ImageDataset` or `StreamingDataset`. Streamed images are resized (shorter side
            256) and centre-cropped (224).
        batch_size: Examples in a batch.
        limit: Only the first `limit` examples. Defaults to all.

    Returns:
        A `tf.data.Dataset` of (float32 images in [0, 1], int64 labels) of known cardinality.

    Example:
        >>> import he_keras as he
        >>> stream = he.data.eval_pipeline(he.data.load("digits", "test"), 100)
        >>> [len(labels) for _, labels in stream]
        [100, 100, 100, 60]
    """
    steps_per_epoch(dataset, batch_size)
    if limit is not None:
        dataset = dataset.take(limit)
    if isinstance(dataset, ImageDataset):
        return _finish(_in_order(dataset, batch_size))
    size = dataset.image_shape[:2]
    examples = dataset.examples().map(
        lambda image, label: (augment.resize_and_centre_crop(image, size), label),
        num_parallel_calls=tf.data.AUTOTUNE,
        deterministic=True,
    )
    stream = _as_floats(examples.batch(batch_size))
    steps = steps_per_epoch(dataset, batch_size)
    return _finish(stream.apply(tf.data.experimental.assert_cardinality(steps)))


def measure_throughput(
    pipeline: tf.data.Dataset, *, max_seconds: float = 2.0, warm_up_batches: int = 5
) -> float:
    """Measures how many images per second a pipeline delivers if nothing else runs.

    Args:
        pipeline: A `tf.data.Dataset` of (images, labels).
        max_seconds: When to stop measuring.
        warm_up_batches: Batches that are fetched before the clock starts.

    Returns:
        Images per second.
    """
    batches = iter(pipeline)
    for _ in range(warm_up_batches):
        next(batches)
    num_images, seconds = 0, 0.0
    start = time.perf_counter()
    for images, _ in batches:
        num_images += int(images.shape[0])
        seconds = time.perf_counter() - start
        if seconds >= max_seconds:
            break
    if num_images == 0:
        raise ValueError(
            "the pipeline is too short to measure; expected more batches than the warm-up takes; "
            f"received warm_up_batches={warm_up_batches}"
        )
    return num_images / seconds


def _check_augmentation(dataset: AnyDataset, augmentation: str) -> None:
    check_choice("augmentation", augmentation, augment.AUGMENTATIONS)
    if augmentation == "crop-flip" and isinstance(dataset, StreamingDataset):
        raise ValueError(
            "crop-flip needs images of one size in memory; expected 'resized-crop-flip', 'flip' or "
            f"'none' for a streaming dataset; received augmentation={augmentation!r}"
        )


def _check_place(seed: int, epochs: int, initial_epoch: int, first_batch: int, steps: int) -> None:
    if not is_integer(seed):
        raise ValueError(f"Invalid seed; expected an integer; received seed={seed!r}")
    check_positive_integer("epochs", epochs)
    if not 0 <= initial_epoch < epochs or not 0 <= first_batch < steps:
        raise ValueError(
            f"the stream would start outside itself; expected initial_epoch in 0..{epochs - 1} and "
            f"first_batch in 0..{steps - 1}; received initial_epoch={initial_epoch}, "
            f"first_batch={first_batch}"
        )


def _on_cpu(array: np.ndarray) -> tf.Tensor:
    """Copies an array into one CPU tensor, which dataset functions capture by reference."""
    with tf.device("/CPU:0"):
        return tf.constant(array)


def _epoch_by_batch(dataset: ImageDataset, plan: _Plan) -> MakeEpoch:
    """Returns the function from an epoch's number to its batches, for images in memory."""
    images, labels = _on_cpu(dataset.images), _on_cpu(dataset.labels)
    num_examples = len(dataset)
    padding = augment.CROP_PADDING if plan.augmentation == "crop-flip" else 0

    def make_epoch(epoch: tf.Tensor) -> tf.data.Dataset:
        order = randomness.epoch_order(num_examples, plan.seed, epoch)
        seed = randomness.epoch_seed(plan.seed, epoch, randomness.AUGMENTATION)
        offsets, flips = augment.draw_crop_flip(num_examples, seed, padding)

        def make_batch(batch: tf.Tensor) -> Example:
            start = batch * plan.batch_size
            stop = tf.minimum(start + plan.batch_size, num_examples)
            chosen = order[start:stop]
            if plan.drop_remainder:
                chosen.set_shape((plan.batch_size,))
            batch_images = tf.gather(images, chosen)
            if plan.augmentation != "none":
                batch_images = augment.crop_flip(
                    batch_images, offsets[start:stop], flips[start:stop], padding
                )
            return augment.to_unit_float(batch_images), tf.gather(labels, chosen)

        batches = tf.data.Dataset.range(plan.first_batch_of(epoch), plan.steps)
        return batches.map(make_batch, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)

    return make_epoch


def _epoch_by_example(dataset: AnyDataset, plan: _Plan) -> MakeEpoch:
    """Returns the function from an epoch's number to its batches, one image at a time."""
    size = dataset.image_shape[:2]

    def make_epoch(epoch: tf.Tensor) -> tf.data.Dataset:
        seed = randomness.epoch_seed(plan.seed, epoch, randomness.AUGMENTATION)

        def make_example(position: tf.Tensor, example: Example) -> Example:
            image, label = example
            own_seed = randomness.fold_in(seed, position)
            if plan.augmentation == "resized-crop-flip":
                return augment.random_resized_crop_flip(image, size, own_seed), label
            image = augment.resize_and_centre_crop(image, size)
            if plan.augmentation == "flip":
                image = augment.random_flip(image, own_seed)
            return image, label

        first_example = plan.first_batch_of(epoch) * plan.batch_size
        positions = tf.data.Dataset.range(first_example, len(dataset))
        examples = dataset.examples(plan.seed, epoch, first_example)
        ready = tf.data.Dataset.zip((positions, examples)).map(
            make_example, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True
        )
        return _as_floats(ready.batch(plan.batch_size, drop_remainder=plan.drop_remainder))

    return make_epoch


def _in_order(dataset: ImageDataset, batch_size: int) -> tf.data.Dataset:
    """Returns the batches of a dataset in memory, in order."""
    images, labels = _on_cpu(dataset.images), _on_cpu(dataset.labels)

    def make_batch(start: tf.Tensor) -> Example:
        stop = start + batch_size
        return augment.to_unit_float(images[start:stop]), labels[start:stop]

    starts = tf.data.Dataset.range(0, len(dataset), batch_size)
    return starts.map(make_batch, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)


def _as_floats(batches: tf.data.Dataset) -> tf.data.Dataset:
    return batches.map(lambda images, labels: (augment.to_unit_float(images), labels))


def _finish(stream: tf.data.Dataset) -> tf.data.Dataset:
    """Adds prefetching and the options of every pipeline."""
    options = tf.data.Options()
    options.deterministic = True
    # The thread that tunes sleeps up to a minute, and whoever deletes the iterator may wait for it:
    # `fit` ended up to a minute after its last batch. What it would choose is the default.
    options.autotune.enabled = False
    # Sharding by files would distribute files among workers, and most streams have no files.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return stream.prefetch(tf.data.AUTOTUNE).with_options(options)
