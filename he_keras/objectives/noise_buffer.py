"""Perturbations that persist from batch to batch: FreeAT, FastAT with previous start."""

import numpy as np
import tensorflow as tf

from he_keras.objectives.objective import Objective
from he_keras.threat import ThreatModel


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


class BufferedObjective(Objective):
    """An objective whose perturbation persists from batch to batch, where `has_buffer` is set.

    The buffer is part of the training state: checkpoints and `.keras` files hold it.
    """

    threat: ThreatModel
    has_buffer = False

    def __init__(self, threat: ThreatModel, **kwargs) -> None:
        super().__init__(threat, **kwargs)
        self._buffer: NoiseBuffer | None = None

    @property
    def noise(self) -> NoiseBuffer:
        """The perturbation buffer, which `build` creates."""
        if self._buffer is None:
            raise ValueError(
                "The objective has no perturbation buffer yet; expected a model that was built; "
                "received an objective before build(image_shape)"
            )
        return self._buffer

    def build(self, image_shape: tuple[int, ...]) -> None:
        """Creates the buffer where one is needed."""
        if self.has_buffer and self._buffer is None:
            self._buffer = NoiseBuffer(image_shape)

    def state_arrays(self) -> dict[str, np.ndarray]:
        """The perturbation buffer, where there is one."""
        return {} if self._buffer is None else self._buffer.to_arrays()

    def load_state_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """Restores the perturbation buffer."""
        if self._buffer is not None:
            self._buffer.from_arrays(arrays)
