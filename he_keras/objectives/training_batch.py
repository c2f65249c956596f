"""What a batch for `fit` and `evaluate` must look like: images within bounds, and class numbers."""

import keras
import tensorflow as tf

from he_keras import refusals
from he_keras.configurable import is_own
from he_keras.objectives.objective import TrainingPass
from he_keras.threat import ThreatModel

#: Room for the rounding of a division by 255 in float32.
_BOUND_TOLERANCE = 1e-6
#: Under bounds as wide as this, an image of values in [0, 1] is as good as black.
_WIDE = 100.0
#: Arrays are checked in parts of so many examples.
_CHUNK = 4096


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
    labels = tf.reshape(labels, [-1])
    images = _of_whole_labels(images, labels)
    if sample_weight is not None:
        images = _of_positive_weights(images, tf.convert_to_tensor(sample_weight))
    return images, tf.cast(labels, tf.int32), sample_weight


def of_classes(images, labels, sample_weight, num_classes: int):
    """Returns a batch; labels that are none of a model's classes raise an error in the step."""
    inside = (labels >= 0) & (labels < num_classes)
    message = f"Label outside the classes; expected 0..{num_classes - 1}; received labels in"
    return refusals.only_if(tf.reduce_all(inside), images, message, labels), labels, sample_weight


def check_arrays(images, labels, threat: ThreatModel | None, num_classes: int | None) -> None:
    """Raises a ValueError for arrays that some step would refuse, before anything is traced.

    Args:
        images: what `fit` was given; data sets and generators pass, their steps will tell.
        labels: their labels.
        threat: of the objective.
        num_classes: of the model; None where it is not built yet.
    """
    if isinstance(images, (list, tuple, dict)):
        check_floating(images)
    if labels is None or not hasattr(images, "shape"):
        return
    for first in range(0, len(images), _CHUNK):
        chosen = slice(first, first + _CHUNK)
        try:
            part, numbers, _ = unpack((images[chosen], labels[chosen]), threat)
            if num_classes is not None:
                of_classes(part, numbers, None, num_classes)
        except tf.errors.InvalidArgumentError as error:
            raise ValueError(error.message) from None


def crafted_images(x_adv, images, objective):
    """Returns what an objective has crafted; raises a ValueError unless that is images.

    Of an objective of one's own, numbers and values are checked too, whenever the step runs.
    """
    name = f"{type(objective).__name__}.craft"
    if not tf.is_tensor(x_adv) or not x_adv.shape.is_compatible_with(images.shape):
        received = f"shape {x_adv.shape}" if tf.is_tensor(x_adv) else type(x_adv).__name__
        raise ValueError(
            f"{name} returned no images; expected a tensor of shape {images.shape}; "
            f"received {received}"
        )
    if not is_own(objective) or not x_adv.dtype.is_floating:
        return x_adv
    x_adv = refusals.only_finite(x_adv, f"{name} returned NaN or infinity")
    message = f"{name} returned too few or too many images"
    return refusals.one_for_each(x_adv, images, x_adv, message)


def checked_pass(training_pass, images, objective) -> TrainingPass:
    """Returns a pass; raises a ValueError unless it has a loss for each example, and logits."""
    name = f"{type(objective).__name__}.forward"
    if not isinstance(training_pass, TrainingPass):
        raise ValueError(
            f"{name} returned no result; expected objectives.TrainingPass(losses, logits); "
            f"received {type(training_pass).__name__}"
        )
    for field, rank in (("losses", 1), ("logits", 2)):
        value = getattr(training_pass, field)
        if not tf.is_tensor(value) or value.shape.rank not in (rank, None):
            shape = "(n,), a number for each image" if rank == 1 else "(n, classes)"
            received = f"shape {value.shape}" if tf.is_tensor(value) else repr(value)
            raise ValueError(
                f"{name} forgets a field of its result; expected {field} of shape {shape}; "
                f"received {received:.60}"
            )
        if not value.dtype.is_floating:
            raise ValueError(
                f"{name} returned {field} without a gradient; expected floating-point numbers; "
                f"received dtype {value.dtype.name}"
            )
    if not is_own(objective):
        return training_pass
    losses = training_pass.losses
    for field in ("losses", "logits"):
        message = f"{name} returned too few or too many {field}"
        losses = refusals.one_for_each(getattr(training_pass, field), images, losses, message)
    return training_pass._replace(losses=losses)


def check_gradients(gradients, objective) -> None:
    """Raises a ValueError if the losses of an objective depend on nothing that is trained."""
    if all(gradient is None for gradient in gradients):
        raise ValueError(
            f"The losses of {type(objective).__name__}.forward train nothing; expected losses of "
            "model(x_adv, training=True) by operations with gradients; received no gradient"
        )


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


def _of_whole_labels(images, labels):
    """Returns `images`; fractions, such as probabilities, raise an error when the step runs."""
    if not labels.dtype.is_floating:
        return images
    message = "Labels must be class numbers; expected whole numbers; received labels in"
    return refusals.only_if(tf.reduce_all(labels == tf.floor(labels)), images, message, labels)


def _of_positive_weights(images, weights):
    """Returns `images`; a negative weight, which would ascend the loss, and NaN raise an error."""
    message = "Invalid sample weights; expected finite numbers of 0 or more; received weights in"
    is_valid = (weights >= 0) & (weights < weights.dtype.max)
    return refusals.only_if(tf.reduce_all(is_valid), images, message, weights)


def _within_bounds(images, low: float, high: float):
    """Returns `images`; values that no attack may produce raise an error when the step runs."""
    inside = (images >= low - _BOUND_TOLERANCE) & (images <= high + _BOUND_TOLERANCE)
    message = (
        "Images outside the bounds of the threat model, or NaN; expected values in "
        f"[{low}, {high}], with any normalisation inside the network; received values in"
    )
    return refusals.only_if(tf.reduce_all(inside), images, message, images)


def _in_units(images, low: float, high: float):
    """Returns `images`; under wide bounds, a batch within [0, 1] raises an error."""
    if not (low <= 0.0 and high >= _WIDE):
        return images
    message = (
        f"Images in [0, 1], as data sets have them, under bounds of [{low}, {high}]; expected "
        "values in the units of the bounds, as threat.from_unit(images) gives; received values in"
    )
    # A replica's share of the last batch may be empty.
    is_unit = tf.reduce_all((images >= 0.0) & (images <= 1.0)) & (tf.size(images) > 0)
    return refusals.only_if(~is_unit, images, message, images)
