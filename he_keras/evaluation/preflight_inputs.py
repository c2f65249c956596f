"""Checks before the attacks that concern the data: range, units, accuracy, order of the labels.

A wrong range or a wrong order of classes gives a low clean accuracy and a silly robust one. These
checks try the usual mistakes out, and name the one that explains the accuracy.
"""

from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from he_keras.evaluation.check import Check, chance_of_at_least, exceeds
from he_keras.evaluation.subject import Subject

_NUM_TRIED = 64
_FEWEST_EXAMPLES = 10
_SLIVER = 0.1
_HALF_USED = 0.55
_GAIN = 0.15
_LABEL_GAIN = 0.2
_CHANCE_LEVEL = 0.05
#: Smallest radius that makes sense, as a share of the distance to a grey image.
_TINY_RADIUS = {"linf": 0.002, "l2": 0.002, "l1": 0.0002}


def input_checks(subject: Subject) -> tuple[Check, ...]:
    """Returns the checks of the images, the threat model and the labels."""
    order = _label_order(subject)
    accuracy = _clean_accuracy(subject, order_is_wrong=order.fired)
    return _input_range(subject), _epsilon_units(subject), accuracy, order


def grey_distances(threat, images: np.ndarray) -> np.ndarray:
    """Returns the length of the perturbation that makes each image grey, and so tells nothing."""
    grey = np.full_like(images, sum(threat.bounds) / 2)
    return np.asarray(threat.distance(tf.constant(grey), tf.constant(images)))


def _input_range(subject: Subject) -> Check:
    low, high = subject.threat.bounds
    smallest, largest = float(subject.images.min()), float(subject.images.max())
    used = (largest - smallest) / (high - low)
    figure = f"values {smallest:.3g} to {largest:.3g} in bounds {low:.3g} to {high:.3g}"
    if used > _HALF_USED:
        message = "The images use the range that the threat model declares."
        return Check("input-range", "before", "pass", figure, message)
    return Check(
        "input-range",
        "before",
        "fail" if used <= _SLIVER else "warn",
        figure,
        f"The images use only {used:.1%} of the bounds: bounds and epsilon must be in the units of "
        "the images (for pixels 0 to 255: bounds=(0, 255) and epsilon=8).",
    )


def _epsilon_units(subject: Subject) -> Check:
    threat = subject.threat
    grey = float(np.median(grey_distances(threat, subject.images)))
    share = threat.epsilon / max(grey, 1e-12)
    figure = f"epsilon {threat.epsilon:.4g} ({threat.norm}) is {share:.2%} of the way to grey"
    if share >= 1.0:
        verdict, message = (
            "fail",
            (
                "Epsilon turns any image into a grey one, and no model can be robust: it is "
                'probably in other units or of another norm; write "8/255" for 8 grey levels.'
            ),
        )
    elif share < _TINY_RADIUS[threat.norm]:
        verdict, message = (
            "warn",
            (
                "Epsilon is far smaller than one grey level: it is probably in other units, "
                "or belongs to another norm."
            ),
        )
    else:
        verdict, message = "pass", "Epsilon is of a sensible size."
    return Check("epsilon-units", "before", verdict, figure, message)


def _clean_accuracy(subject: Subject, order_is_wrong: bool) -> Check:
    correct, total = int(subject.correct.sum()), len(subject.labels)
    chance = max(subject.chance, 1.0 / subject.logits.shape[1])
    figure = f"{correct / total:.1%} of {total} images, chance {chance:.0%}"
    better = None if order_is_wrong else _better_preprocessing(subject)
    if better is not None:
        name, share = better
        return Check(
            "clean-accuracy",
            "before",
            "fail",
            f"{figure}, {share:.1%} of {min(total, _NUM_TRIED)} with {name}",
            f"The model expects {name}: put that conversion into the model, so that images and "
            "attacks stay within the bounds.",
        )
    if total < _FEWEST_EXAMPLES:
        reason = f"Fewer than {_FEWEST_EXAMPLES} examples say nothing about accuracy."
        return Check("clean-accuracy", "before", "skipped", figure, reason)
    if chance_of_at_least(correct, total, chance) < _CHANCE_LEVEL:
        message = "The model classifies these images better than chance."
        return Check("clean-accuracy", "before", "pass", figure, message)
    return Check(
        "clean-accuracy",
        "before",
        "warn",
        figure,
        "The model does not beat chance on clean images, so robustness says nothing: check the "
        "weights, the order of the labels, and how the images are read and normalised.",
    )


def _better_preprocessing(subject: Subject) -> tuple[str, float] | None:
    """Returns the conversion of the images under which accuracy is much higher, if there is one."""
    images, labels = subject.images[:_NUM_TRIED], subject.labels[:_NUM_TRIED]
    correct = int(subject.correct[:_NUM_TRIED].sum())
    best = None
    for name, converted in _conversions(subject.threat.bounds, images):
        answers = subject.victim.logits(tf.constant(converted.astype(np.float32))).numpy()
        converted_correct = int((answers.argmax(axis=1) == labels).sum())
        if exceeds(converted_correct - correct, len(labels), _GAIN):
            correct = converted_correct
            best = name, correct / len(labels)
    return best


def _conversions(bounds, images: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    low, high = bounds
    unit = (images - low) / (high - low)
    channels = tuple(range(images.ndim - 1))
    spread = unit.std(axis=channels) + 1e-6
    converted = {
        "pixels in 0..255": 255.0 * unit,
        "pixels in 0..1": unit,
        "pixels in -1..1": 2.0 * unit - 1.0,
        "normalised pixels (mean 0, deviation 1)": (unit - unit.mean(axis=channels)) / spread,
        "light pixels dark and dark ones light": high + low - images,
    }
    if images.ndim == 4 and images.shape[-1] == 3:
        converted["channels in reverse order (BGR)"] = images[..., ::-1]
    for name, candidate in converted.items():
        if not np.allclose(candidate, images):
            yield name, candidate


def _label_order(subject: Subject) -> Check:
    """Learns which label belongs to each output from one half, and scores it on the other."""
    predictions, labels = subject.logits.argmax(axis=1), subject.labels
    num_classes = subject.logits.shape[1]
    scored = slice(1, None, 2)
    order = _best_order(predictions[::2], labels[::2], num_classes)
    candidates = {"another order": order[predictions[scored]] == labels[scored]}
    for shift in (1, -1):
        shifted = (predictions[scored] + shift) % num_classes == labels[scored]
        candidates[f"labels shifted by {-shift:+d}"] = shifted
    total = len(labels[scored])
    correct = int((predictions == labels)[scored].sum())
    name, matches = max(candidates.items(), key=lambda each: each[1].sum())
    count = int(matches.sum())
    if total < _FEWEST_EXAMPLES // 2:
        reason = "Too few examples to tell."
        return Check("label-order", "before", "skipped", "not measured", reason)
    figure = f"{correct / total:.1%} as given, {count / total:.1%} with {name}"
    if not exceeds(count - correct, total, _LABEL_GAIN):
        message = "No other order of the labels fits better."
        return Check("label-order", "before", "pass", figure, message)
    return Check(
        "label-order",
        "before",
        "fail",
        figure,
        "The model's outputs stand in another order than the labels: map the labels to the order "
        f"the model was trained with ({name} fits).",
    )


def _best_order(predictions, labels, num_classes: int) -> np.ndarray:
    """Returns the label for each output such that most of the predictions become right."""
    from scipy.optimize import linear_sum_assignment

    counts = np.zeros((num_classes, num_classes), int)
    np.add.at(counts, (predictions, labels), 1)
    # Where nothing decides, an output keeps its own label.
    preference = counts + 0.5 * np.eye(num_classes)
    return linear_sum_assignment(preference, maximize=True)[1]
