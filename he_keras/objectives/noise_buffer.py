"""Perturbations that persist from batch to batch: FreeAT, FastAT with previous start."""

import numpy as np
import tensorflow as tf


class NoiseBuffer:
    """One perturbation per position in the batch; a short batch uses the first rows.

    The buffer grows with zeros to the largest batch seen.

    Under a distribution strategy each replica has a buffer of its own.
    """

    def __init__(self, image_shape: tuple[int, ...]) -> None:
        # Outside any graph, where a model that builds itself in its first step would put it.
        with tf.init_scope():
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

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Returns the content for each replica."""
        return {f"noise_{number}": each.numpy() for number, each in enumerate(self._copies())}

    def from_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """Restores what `to_arrays` returned; replicas that are not in it keep their content."""
        for number, each in enumerate(self._copies()):
            if f"noise_{number}" in arrays:
                each.assign(tf.constant(arrays[f"noise_{number}"], tf.float32))

    def _copies(self) -> tuple:
        return tf.distribute.get_strategy().experimental_local_results(self._variable)
