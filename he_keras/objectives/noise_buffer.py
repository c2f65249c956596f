"""Perturbations that persist from batch to batch (FreeAT, and FastAT with previous initialisation)."""

import numpy as np
import tensorflow as tf


class NoiseBuffer:
    """One perturbation per position in the batch; grows with zeros, a short batch uses the first rows.

    Under a distribution strategy each replica has a buffer of its own.
    """

    def __init__(self, image_shape: tuple[int, ...]) -> None:
        self._variable = tf.Variable(
            tf.zeros([0, *image_shape]),
            shape=[None, *image_shape],
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
            name="noise",
        )

    def first_rows(self, count):
        """Returns `count` rows; rows never written are zero."""
        stored = self._variable.read_value()
        missing = tf.maximum(count - tf.shape(stored)[0], 0)
        padding = tf.zeros(tf.concat([[missing], tf.shape(stored)[1:]], axis=0))
        rows = tf.concat([stored, padding], axis=0)[:count]
        return tf.ensure_shape(rows, self._variable.shape)

    def put_first_rows(self, rows) -> None:
        """Overwrites the first rows and keeps the others."""
        rest = self._variable.read_value()[tf.shape(rows)[0] :]
        self._variable.assign(tf.concat([rows, rest], axis=0))

    def to_array(self) -> np.ndarray:
        """Returns the content (of the first replica)."""
        return self._variable.numpy()

    def from_array(self, array: np.ndarray) -> None:
        """Restores the content."""
        self._variable.assign(tf.constant(array, tf.float32))
