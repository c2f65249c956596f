"""What a batch for `fit` and `evaluate` must look like: images within bounds, and class numbers."""

import keras
import tensorflow as tf

from he_keras.threat import ThreatModel

_BOUND_TOLERANCE = 1e-6


def unpack(data, threat: ThreatModel | None):
    """Returns float32 images, int32 labels of shape `(n,)` and the sample weights or None."""
    images, labels, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    images = tf.convert_to_tensor(images)
    check_floating(images)
    if labels is None:
        raise ValueError("Labels are missing; expected (images, labels); received images only")
    labels = tf.convert_to_tensor(labels)
    if labels.shape.rank == 2 and labels.shape[1] != 1:
        raise ValueError(
            "Labels must be class numbers; expected shape (batch,): use labels.argmax(axis=-1) for "
            f"one-hot labels; received shape {tuple(labels.shape)}"
        )
    images = tf.cast(images, tf.float32)
    if threat is not None:
        images = _within_bounds(images, *threat.bounds)
    return images, tf.cast(tf.reshape(labels, [-1]), tf.int32), sample_weight


def check_floating(images) -> None:
    """Raises a ValueError for integer images: 0..255 is not the scale that a network expects."""
    dtype = keras.backend.standardize_dtype(images.dtype)
    if "float" not in dtype:
        raise ValueError(
            "Images must be floating-point values within the threat model's bounds; expected e.g. "
            f"images / 255.0 as float32; received dtype {dtype}"
        )


def _within_bounds(images, low: float, high: float):
    """Returns `images`; fails, when the batch is computed, on values that no attack may produce."""
    inside = (images >= low - _BOUND_TOLERANCE) & (images <= high + _BOUND_TOLERANCE)
    message = (
        "Images outside the bounds of the threat model, or NaN; expected values in "
        f"[{low}, {high}], with any normalisation inside the network; received values in"
    )
    values = [message, tf.reduce_min(images), tf.reduce_max(images)]
    with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(inside), values)]):
        return tf.identity(images)
