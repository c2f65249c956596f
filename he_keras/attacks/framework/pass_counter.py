"""How many images have passed through the attacked network, readable while an attack still runs.

The count is a variable that the compiled loops of attacks add to. Another thread reads it without
stopping them. A callback into Python would stop a loop at every step.
"""

import threading
from typing import NamedTuple

import tensorflow as tf

from he_keras.attacks.framework.rows import under_xla


class Passes(NamedTuple):
    """What was counted so far.

    Attributes:
        batches: how often a batch passed the network, forward or back.
        images: the images of all these batches together.
    """

    batches: int
    images: int


class PassCounter:
    """Counts passes, forward and back.

    Example:
        >>> import tensorflow as tf
        >>> from he_keras.attacks.framework.pass_counter import PassCounter
        >>> counter = PassCounter()
        >>> images = tf.zeros((5, 2))
        >>> with tf.GradientTape() as tape:
        ...     tape.watch(images)
        ...     logits = counter.watched(3.0 * images)
        >>> gradient = tape.gradient(logits, images)
        >>> counter.passes()
        Passes(batches=2, images=10)
    """

    def __init__(self) -> None:
        self._count: tf.Variable | None = None
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Makes the variable; a compiled function that had to make it would be traced twice."""
        self._variable()

    def watched(self, outputs):
        """Returns what a network answers, and counts whenever it is computed or differentiated.

        XLA has no such variables within a loop, and replicas would each have their own: there
        nothing is counted.
        """
        if under_xla() or tf.distribute.has_strategy():
            return outputs
        count = self._variable()

        def add(values):
            rows = tf.shape(values, out_type=tf.int64)[0]
            return count.assign_add(tf.stack([tf.ones_like(rows), rows]), read_value=False)

        @tf.custom_gradient
        def counted(values):
            add(values)

            def gradient(upstream):
                add(upstream)
                return upstream

            return tf.identity(values), gradient

        return counted(outputs)

    def passes(self) -> Passes:
        """Returns what was counted so far, also while a loop runs in another thread."""
        if self._count is None:
            return Passes(0, 0)
        return Passes(*(int(each) for each in self._count.numpy()))

    def _variable(self) -> tf.Variable:
        with self._lock, tf.init_scope(), tf.device("CPU:0"):
            if self._count is None:
                self._count = tf.Variable([0, 0], trainable=False, dtype=tf.int64)
        return self._count


#: What the attacks of this process count.
COUNTER = PassCounter()
