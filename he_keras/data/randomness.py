"""Stateless seeds: random numbers depend only on (seed, epoch, purpose).

`tf.data.Dataset.shuffle` combines its seed with TensorFlow's global seed and keeps a state, so a
resumed run cannot repeat it. The functions here keep no state. The algorithm is named because
"auto" may choose another one on another device.
"""

from __future__ import annotations

import tensorflow as tf

ALGORITHM = "philox"

# Purposes: the order of the examples and their augmentation draw from separate streams.
ORDER = 0
AUGMENTATION = 1


def fold_in(seed: tf.Tensor, number: int | tf.Tensor) -> tf.Tensor:
    """Returns the seed (shape (2,), int64) derived from a seed and an integer."""
    return tf.random.experimental.stateless_fold_in(seed, tf.cast(number, tf.int64), alg=ALGORITHM)


def epoch_seed(seed: int, epoch: int | tf.Tensor, purpose: int) -> tf.Tensor:
    """Returns the stateless seed (shape (2,), int64) of one purpose in one epoch."""
    key = tf.stack([tf.cast(seed, tf.int64), tf.cast(epoch, tf.int64)])
    return fold_in(key, purpose)


def epoch_order(num_items: int, seed: int, epoch: int | tf.Tensor) -> tf.Tensor:
    """Returns the permutation (int64) of `range(num_items)` that belongs to one epoch."""
    items = tf.range(tf.cast(num_items, tf.int64))
    return tf.random.experimental.stateless_shuffle(
        items, seed=epoch_seed(seed, epoch, ORDER), alg=ALGORITHM
    )
