"""Checks of an attack's arguments and of the examples it is given, each made before any work."""

import math
import numbers

import numpy as np

from he_keras.threat import ThreatModel, parse_epsilon

_BOUND_TOLERANCE = 1e-6
_PROBABILITY_TOLERANCE = 1e-5


def check_threat(threat) -> None:
    """Raises a TypeError unless `threat` is a `ThreatModel`."""
    if not isinstance(threat, ThreatModel):
        raise TypeError(f"Invalid threat; expected a ThreatModel; received threat={threat!r}")


def check_positive_integer(name: str, value) -> None:
    """Raises a ValueError unless `value` is an integer of at least 1."""
    if not _is_integer(value) or value < 1:
        raise ValueError(f"Invalid {name}; expected an integer >= 1; received {name}={value!r}")


def check_seed(seed) -> None:
    """Raises a ValueError unless `seed` is an integer from 0 to 2**31 - 1."""
    if not _is_integer(seed) or not 0 <= seed < 2**31:
        raise ValueError(f"Invalid seed; expected an integer in 0..2**31-1; received seed={seed!r}")


def check_number(name: str, value, minimum: float = -math.inf) -> None:
    """Raises a ValueError unless `value` is a finite number of at least `minimum`."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not (math.isfinite(value) and value >= minimum):
        limit = "" if minimum == -math.inf else f" >= {minimum}"
        raise ValueError(
            f"Invalid {name}; expected a finite number{limit}; received {name}={value!r}"
        )


def positive_number(name: str, value) -> float:
    """Returns a number or a fraction such as "2/255" as a float; it must be above 0."""
    number = parse_epsilon(value)
    if isinstance(value, bool) or number <= 0:
        raise ValueError(f"Invalid {name}; expected a number > 0; received {name}={value!r}")
    return number


def check_flag(name: str, value) -> None:
    """Raises a TypeError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"Invalid {name}; expected True or False; received {name}={value!r}")


def check_choice(name: str, value, choices: tuple[str, ...]) -> None:
    """Raises a ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"Unknown {name}; expected one of {choices}; received {name}={value!r}")


def _is_integer(value) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def check_examples(threat: ThreatModel, images, labels) -> tuple[np.ndarray, np.ndarray]:
    """Returns images as float arrays and labels as int32, or says what is wrong with them."""
    images = np.asarray(images)
    labels = np.asarray(labels)
    if not np.issubdtype(images.dtype, np.floating) or images.ndim < 2:
        raise ValueError(
            "Invalid images; expected floating-point values of shape (n, ...); received "
            f"dtype={images.dtype}, shape={images.shape}"
        )
    if labels.shape == (len(images), 1):
        labels = labels[:, 0]
    if labels.shape != (len(images),) or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(
            f"Invalid labels; expected integers of shape ({len(images)},); received "
            f"dtype={labels.dtype}, shape={labels.shape}"
        )
    if len(images) == 0:
        raise ValueError("No examples; expected at least one image; received 0")
    if labels.min() < 0:
        raise ValueError(f"Negative label; expected labels >= 0; received {labels.min()}")
    _check_range(images, *threat.bounds)
    images = images if images.dtype == np.float64 else images.astype(np.float32)
    labels = np.minimum(labels.astype(np.int64), np.iinfo(np.int32).max).astype(np.int32)
    return np.clip(images, *threat.bounds), labels


def _check_range(images: np.ndarray, low: float, high: float) -> None:
    smallest, largest = float(images.min()), float(images.max())
    if not low - _BOUND_TOLERANCE <= smallest <= largest <= high + _BOUND_TOLERANCE:
        raise ValueError(
            f"Images outside the threat model's bounds (or NaN); expected values in [{low}, {high}]"
            ", with any normalisation inside the model; "
            f"received values in [{smallest}, {largest}]"
        )


def check_class_numbers(labels: np.ndarray, num_classes: int) -> None:
    """Raises a ValueError unless every label is one of the model's classes."""
    if labels.max(initial=0) >= num_classes:
        raise ValueError(
            f"Label outside the classes; expected 0..{num_classes - 1}; received {labels.max()}"
        )


def check_not_probabilities(logits: np.ndarray) -> None:
    """Refuses outputs that look like a softmax: attacks on probabilities are misleadingly weak."""
    close = _PROBABILITY_TOLERANCE
    with np.errstate(invalid="ignore"):
        rows_sum_to_one = np.all(np.abs(logits.sum(axis=1) - 1.0) < close)
    if rows_sum_to_one and logits.min() > -close and logits.max() < 1.0 + close:
        raise ValueError(
            "The model returns probabilities; expected logits: remove the softmax of the last "
            "layer, or pass `lambda images: tf.math.log(model(images, training=False))`; "
            "received rows that sum to 1"
        )
