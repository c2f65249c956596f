"""Feature normalisation (FN) projects each feature vector onto the unit hypersphere.

Paper: "Boosting Adversarial Training with Hypersphere Embedding", Eq. 4.
"""

import keras
import tensorflow as tf

#: A vector shorter than 1e-12 has no direction: it maps to zero and passes no gradient. The l2
#: pairing of `objectives/alp.py` has the same limit.
_SMALLEST_SQUARED_NORM = 1e-24


def normalize(vectors, axis: int = -1):
    """Divides vectors by their l2 length; a zero vector stays zero, with zero gradient.

    The sum of squares is replaced before the square root where it is zero. So a zero vector gives
    neither NaN nor infinity, also in second derivatives. Call it in float32 or float64, for squares
    underflow in half precision.
    """
    squared_norm = tf.reduce_sum(tf.square(vectors), axis=axis, keepdims=True)
    # NaN must show, not become zero. TensorFlow's graphs make `>` of `~(... <= ...)`, so it is
    # asked for by its name.
    has_direction = (squared_norm > _SMALLEST_SQUARED_NORM) | tf.math.is_nan(squared_norm)
    safe = tf.where(has_direction, squared_norm, tf.ones_like(squared_norm))
    return tf.where(has_direction, vectors * tf.math.rsqrt(safe), tf.zeros_like(vectors))


def computation_dtype(layer: keras.layers.Layer) -> str:
    """Returns "float32", also under half-precision policies, or "float64" under that policy."""
    return "float64" if layer.compute_dtype == "float64" else "float32"


@keras.saving.register_keras_serializable(package="he_keras")
class FeatureNorm(keras.layers.Layer):
    """Normalises feature vectors to unit l2 length along the last axis, in float32.

    Zero vectors give zero output and zero gradient. For them `keras.layers.UnitNormalization` gives
    gradients up to 1e12 (float32) or NaN (float16).

    Example:
        >>> import he_keras as he, numpy as np
        >>> unit = he.layers.FeatureNorm()(np.array([[3.0, 4.0], [0.0, 0.0]]))
        >>> [[round(float(value), 4) for value in row] for row in unit]
        [[0.6, 0.8], [0.0, 0.0]]
    """

    def __init__(self, **kwargs) -> None:
        super().__init__(**kwargs)
        self.autocast = False

    def call(self, inputs):
        """Returns unit vectors of dtype float32 (float64 under a float64 policy)."""
        return normalize(tf.cast(inputs, computation_dtype(self)))

    def compute_output_spec(self, inputs) -> keras.KerasTensor:
        """Keeps the shape; the dtype is the computation dtype whatever the policy."""
        return keras.KerasTensor(inputs.shape, dtype=computation_dtype(self))

    def compute_output_shape(self, input_shape) -> tuple:
        """Returns the shape of the features, which does not change."""
        return tuple(input_shape)
