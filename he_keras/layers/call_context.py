"""The mode and the precision of Keras layers that our code or a user's function calls.

A layer without a `training` argument takes the mode of the call that it is part of. Outside any
call, layers such as RandomFlip fall back on their own default, which is training mode. So each of
our passes runs as if it were part of a Keras call.

Keras has no public way to open such a call around a plain function. The names used here are the
same from Keras 3.12 on. `tests/layers/test_call_context.py` fails if they change.
"""

import contextlib
from collections.abc import Iterator

import keras
from keras.src.backend import AutocastScope


@contextlib.contextmanager
def call_context(training: bool = False) -> Iterator[None]:
    """Opens a Keras call: layers that are called inside without a `training` flag get this one.

    Args:
        training: the flag.

    Example:
        >>> import keras, numpy as np
        >>> from he_keras.layers.call_context import call_context
        >>> shift, ones = keras.layers.RandomTranslation(0.5, 0.5), np.ones((1, 4, 4, 1))
        >>> with call_context(training=False):
        ...     unchanged = shift(ones)
        >>> bool(np.all(unchanged == ones))
        True
    """
    entry = keras.layers.Layer(name="call_context", dtype="float32")
    context = entry._get_call_context()
    outer = context.get_value("training")
    context.set_value("training", training)
    try:
        yield
    finally:
        context.set_value("training", outer)
        entry._maybe_reset_call_context()


def full_precision() -> AutocastScope:
    """Returns a scope in which variables are read as they are stored, not cast to half precision.

    Example:
        >>> import keras, tensorflow as tf
        >>> from he_keras.layers.call_context import full_precision
        >>> class Half(keras.layers.Layer):
        ...     def build(self, shape):
        ...         self.factor = self.add_weight(shape=())
        ...     def call(self, inputs):
        ...         with full_precision():
        ...             stored = tf.convert_to_tensor(self.factor)
        ...         return [inputs, stored]
        >>> [tensor.dtype.name for tensor in Half(dtype="mixed_float16")(tf.ones([1]))]
        ['float16', 'float32']
    """
    return AutocastScope(None)
