"""What a batch for `fit` and `evaluate` must look like: images within bounds, and class numbers."""

import keras
import tensorflow as tf

from he_keras.threat import ThreatModel

_BOUND_TOLERANCE = 1e-6
#: Under bounds as wide as this, an image of values in [0, 1] is as good as black.
_WIDE = 100.0


def unpack(data, threat: ThreatModel | None):
    """Returns float32 images, int32 labels of shape `(n,)` and the sample weights or None."""
    images, labels, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    check_floating(images)
    images = tf.convert_to_tensor(images)
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
        images = _in_units(images, *threat.bounds)
    return images, tf.cast(tf.reshape(labels, [-1]), tf.int32), sample_weight


def check_floating(images) -> None:
    """Raises a ValueError for several inputs, and for integer images: networks expect no 0..255."""
    if isinstance(images, (list, tuple, dict)):
        raise ValueError(
            "The data hold several inputs; expected one tensor of images: join them in the data "
            f"(images, labels), and let the network take them apart; received {len(images)} inputs"
        )
    dtype = keras.backend.standardize_dtype(images.dtype)
    if "float" not in dtype:
        raise ValueError(
            "Images must be floating-point values within the threat model's bounds; expected e.g. "
            f"images / 255.0 as float32; received dtype {dtype}"
        )


def _within_bounds(images, low: float, high: float):
    """Returns `images`; values that no attack may produce raise an error when the step runs."""
    inside = (images >= low - _BOUND_TOLERANCE) & (images <= high + _BOUND_TOLERANCE)
    message = (
        "Images outside the bounds of the threat model, or NaN; expected values in "
        f"[{low}, {high}], with any normalisation inside the network; received values in"
    )
    values = [message, tf.reduce_min(images), tf.reduce_max(images)]
    return _only_if(tf.reduce_all(inside), images, values)


def _in_units(images, low: float, high: float):
    """Returns `images`; under wide bounds, a batch within [0, 1] raises an error."""
    if not (low <= 0.0 and high >= _WIDE):
        return images
    message = (
        f"Images in [0, 1], as data sets have them, under bounds of [{low}, {high}]; expected "
        "values in the units of the bounds, as threat.from_unit(images) gives; received values in"
    )
    values = [message, tf.reduce_min(images), tf.reduce_max(images)]
    # A replica's share of the last batch may be empty.
    is_unit = tf.reduce_all((images >= 0.0) & (images <= 1.0)) & (tf.size(images) > 0)
    return _only_if(~is_unit, images, values)


def _only_if(holds, images, values: list):
    """Returns `images`; unless the condition holds, the step raises an error with the values."""
    with tf.control_dependencies([tf.debugging.Assert(holds, values)]):
        # XLA drops assertions. Where it compiles everything, as on a TPU, the loss becomes NaN.
        return tf.where(holds, images, tf.constant(float("nan"), images.dtype))
