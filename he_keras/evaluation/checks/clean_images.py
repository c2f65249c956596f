"""Checks before the attacks of a model's answers to clean images: is it a classifier of these?

The answers must be finite logits that depend on the image alone. A wrong range of the pixels or a
wrong order of the classes gives a low clean accuracy and a meaningless robust one. These checks try
out the usual mistakes, and name the one that explains the accuracy.

Papers: Croce & Hein 2020 (AutoAttack's checks of the model); Carlini et al. 2019, "On evaluating
adversarial robustness".
"""

from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from he_keras.attacks.framework.agreement import probe
from he_keras.attacks.framework.victim import check_not_probabilities
from he_keras.evaluation.checks.check import CleanSample, Outcome, failed, passed, skipped, warned
from he_keras.evaluation.statistics import (
    CHANCE_LEVEL,
    Pair,
    fewest_beyond,
    fewest_gains,
    resolution,
)
from he_keras.precision import LARGEST_CHANGE, change_by_rounding

#: Bounds the cost: each image takes as many passes as the next number says, which is AutoAttack's.
_NUM_REPEATED = 32
_REPEATS = 5
#: Few images show a dependence on the batch; those alone take one call each.
_NUM_REARRANGED = 16
_NUM_ALONE = 3
#: Moves pixels by as little as another order of additions moves a sum in float32.
_ROUNDED = 1.0 + 1e-5
#: Chosen: several additions in another order add up.
_ROUNDINGS = 4.0
#: Bounds the cost: each conversion passes these images through the model.
_NUM_TRIED = 64
#: Chosen: with fewer, hardly any accuracy can be told from chance.
_FEWEST_EXAMPLES = 10
#: Pixels from 0 to 1 in bounds of (0, 255) use 0.4 % of them.
_SLIVER = 0.1
#: Pixels from 0 to 1 in bounds of (-1, 1) use 50 % of them.
_HALF_USED = 0.55
#: Chosen: a model that reads images in a wrong way loses more than this.
_GAIN = 0.15
#: Chosen: larger, because the order is learnt from few examples of each class.
_LABEL_GAIN = 0.2
#: Smallest radius that makes sense, as a share of the distance to a grey image.
_TINY_RADIUS = {"linf": 0.002, "l2": 0.002, "l1": 0.0002}


def finite(sample: CleanSample) -> Outcome:
    """Looks for answers that are NaN or infinite."""
    logits = sample.logits
    bad = int((~np.isfinite(logits)).any(axis=1).sum())
    figure = f"{bad} of {len(logits)} images"
    if not bad:
        limit = resolution(1, len(logits))
        return passed(figure, "Every answer is finite.", limit)
    return failed(
        figure,
        "The model answers NaN or infinity: an attack counts that as broken; find the layer that "
        "overflows before you evaluate.",
    )


def are_logits(sample: CleanSample) -> Outcome:
    """Looks for probabilities, whose gradients vanish."""
    logits = sample.logits
    if sample.victim.scale != 1.0:
        # Probabilities times a number would no longer look like probabilities.
        logits = probe(sample.model, sample.images).logits
    figure = f"values {logits.min():.3g} to {logits.max():.3g}"
    try:
        check_not_probabilities(logits, sample.model)
    except ValueError:
        return failed(
            f"{figure}: probabilities",
            "The model returns probabilities, whose gradients vanish: remove the softmax of its "
            "last layer, or evaluate `lambda images: tf.math.log(model(images, training=False))`.",
        )
    return passed(figure, "The outputs are no probabilities.")


def deterministic(sample: CleanSample) -> Outcome:
    """AutoAttack's check: five passes, logits of unit length."""
    images = tf.constant(sample.images[:_NUM_REPEATED])
    answers = np.stack([sample.victim.logits(images).numpy() for _ in range(_REPEATS)])
    change = max(_largest_change(answer, answers[0]) for answer in answers[1:])
    predictions = answers.argmax(axis=2)
    flips = int((predictions != predictions[0]).any(axis=0).sum())
    tolerance = change_by_rounding(sample.victim, images)
    figure = (
        f"largest change {change:.1e}, rounding explains {tolerance:.1e}; {flips} of {len(images)} "
        "predictions flip"
    )
    if change <= tolerance:
        return passed(figure, "Repeated passes agree.")
    return Outcome(
        "fail" if flips else "warn",
        figure,
        "The model answers differently each time, so single gradients mislead an attack and no "
        "verdict can be repeated: use autoattack-rand, or attacks with eot_samples > 1.",
    )


def repeatable_answers(sample: CleanSample) -> str:
    """Says that the answers differ each time; nothing if they do not."""
    is_random = sample.once(deterministic).fired
    return "Cannot be decided for a model that answers differently each time." if is_random else ""


def batch_independence(sample: CleanSample) -> Outcome:
    """Compares the answers to images in other batches, in another order, and alone."""
    images = sample.images[:_NUM_REARRANGED]
    together = sample.victim.logits(tf.constant(images)).numpy()
    order = np.random.default_rng(0).permutation(len(images))
    changes = [
        # The same images inside the larger batch, in another order, and some all alone.
        _largest_change(sample.logits[: len(images)], together),
        _largest_change(sample.victim.logits(tf.constant(images[order])).numpy(), together[order]),
    ]
    for row in range(min(_NUM_ALONE, len(images))):
        alone = sample.victim.logits(tf.constant(images[row : row + 1])).numpy()
        changes.append(_largest_change(alone, together[row : row + 1]))
    tolerance = _tolerance_in_batches(sample, images, together)
    figure = f"largest change {max(changes):.1e}, rounding explains {tolerance:.1e}"
    if max(changes) <= tolerance:
        return passed(figure, "An image's logits are its own.")
    return failed(
        figure,
        "The logits of an image depend on the batch it is in, as batch norm in training mode does: "
        "call the model with training=False.",
    )


def _tolerance_in_batches(sample: CleanSample, images, logits: np.ndarray) -> float:
    """Returns the change that rounding explains, by the dtype or as measured on these images.

    The measurement finds precisions that no layer declares. It means nothing for a random model.
    """
    low, high = sample.threat.bounds
    rounded = np.clip(images * np.float32(_ROUNDED), low, high)
    moved = sample.victim.logits(tf.constant(rounded)).numpy()
    measured = min(_ROUNDINGS * _largest_change(moved, logits), LARGEST_CHANGE)
    return max(measured, change_by_rounding(sample.victim, images))


def frozen_state(sample: CleanSample) -> Outcome:
    """Looks for variables that the passes of all other checks have changed."""
    variables = sample.variables
    changed = [
        getattr(variable, "path", getattr(variable, "name", "a variable"))
        for variable, value in zip(variables, sample.initial_values, strict=True)
        if not np.array_equal(variable.numpy(), value, equal_nan=True)
    ]
    figure = f"{len(changed)} of {len(variables)} variables changed"
    if not changed:
        return passed(figure, "No pass changes the model.")
    return failed(
        figure,
        f"Calling the model changes it ({changed[0]}), so that every attack meets another model: "
        "call it with training=False, and keep state out of the forward pass.",
    )


def enough_classes(sample: CleanSample) -> Outcome:
    """Counts the classes that the losses of the attacks need."""
    num_classes = sample.num_classes
    figure = f"{num_classes} classes"
    if num_classes >= 4:
        message = "Every loss of the attacks is defined."
        return passed(figure, message)
    missing = "DLR loss is" if num_classes == 3 else "DLR loss, targeted or not, is"
    return warned(
        figure,
        f"The {'targeted ' if num_classes == 3 else ''}{missing} undefined, which autoattack "
        "needs: use fast, cw-linf-100 and square-5000 instead.",
    )


def _largest_change(logits: np.ndarray, reference: np.ndarray) -> float:
    """Largest distance between logit vectors, divided by the length of each."""
    difference = np.linalg.norm(_directions(logits) - _directions(reference), axis=1)
    return float(difference.max(initial=0.0))


def _directions(logits: np.ndarray) -> np.ndarray:
    # Another check reports what is not finite.
    logits = np.nan_to_num(logits.astype(np.float64), posinf=0.0, neginf=0.0)
    return logits / (np.linalg.norm(logits, axis=1, keepdims=True) + 1e-10)


def grey_distances(threat, images: np.ndarray) -> np.ndarray:
    """Returns the length of the perturbation that makes each image grey, and so erases it."""
    grey = np.full_like(images, sum(threat.bounds) / 2)
    return np.asarray(threat.distance(tf.constant(grey), tf.constant(images)))


def input_range(sample: CleanSample) -> Outcome:
    """Compares the values of the images with the bounds."""
    low, high = sample.threat.bounds
    smallest, largest = float(sample.images.min()), float(sample.images.max())
    used = (largest - smallest) / (high - low)
    figure = f"values {smallest:.3g} to {largest:.3g} in bounds {low:.3g} to {high:.3g}"
    if used > _HALF_USED:
        message = "The images use the range that the threat model declares."
        return passed(figure, message)
    return Outcome(
        "fail" if used <= _SLIVER else "warn",
        figure,
        f"The images use only {used:.1%} of the bounds: bounds and epsilon must be in the units of "
        "the images (for pixels 0 to 255: bounds=(0, 255) and epsilon=8).",
    )


def epsilon_units(sample: CleanSample) -> Outcome:
    """Compares epsilon with the distance to a grey image."""
    threat = sample.threat
    grey = float(np.median(grey_distances(threat, sample.images)))
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
    return Outcome(verdict, figure, message)


def clean_accuracy(sample: CleanSample) -> Outcome:
    """Compares the accuracy with chance, and with that under other conversions of the images."""
    correct, total = int(sample.correct.sum()), len(sample.labels)
    chance = max(sample.chance, 1.0 / sample.logits.shape[1])
    figure = f"{correct / total:.1%} of {total} images, chance {chance:.0%}"
    limit = resolution(fewest_beyond(total, chance), total, "an accuracy")
    better = None if sample.once(label_order).fired else _better_preprocessing(sample)
    if better is not None:
        name, share = better
        return failed(
            f"{figure}, {share:.1%} of {min(total, _NUM_TRIED)} with {name}",
            f"The model expects {name}: put that conversion into the model, so that images and "
            "attacks stay within the bounds.",
        )
    if total < _FEWEST_EXAMPLES:
        reason = f"Fewer than {_FEWEST_EXAMPLES} examples say nothing about accuracy."
        return Outcome("skipped", figure, reason)
    if correct >= fewest_beyond(total, chance):
        message = "The model classifies these images better than chance."
        return passed(figure, message, limit)
    return warned(
        figure,
        "These images do not show that the model beats chance, so robustness says nothing: check "
        "the weights, the order of the labels, and how the images are read and normalised.",
        limit,
    )


def _better_preprocessing(sample: CleanSample) -> tuple[str, float] | None:
    """Returns the conversion of the images under which accuracy is much higher, if there is one."""
    images, labels = sample.images[:_NUM_TRIED], sample.labels[:_NUM_TRIED]
    correct = {}
    for name, converted in _conversions(sample.threat.bounds, images):
        answers = sample.victim.logits(tf.constant(converted.astype(np.float32))).numpy()
        correct[name] = answers.argmax(axis=1) == labels
    # The more conversions are tried, the more each one has to show (Bonferroni).
    level = CHANCE_LEVEL / max(len(correct), 1)
    better = {
        name: float(each.mean())
        for name, each in correct.items()
        if Pair.of(sample.correct[:_NUM_TRIED], each).exceeds(_GAIN, level)
    }
    return max(better.items(), key=lambda each: each[1]) if better else None


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


def label_order(sample: CleanSample) -> Outcome:
    """Learns which label belongs to each output from one half, and scores it on the other."""
    predictions, labels = sample.logits.argmax(axis=1), sample.labels
    num_classes = sample.logits.shape[1]
    scored = slice(1, None, 2)
    order = _best_order(predictions[::2], labels[::2], num_classes)
    candidates = {"another order": order[predictions[scored]] == labels[scored]}
    for shift in (1, -1):
        shifted = (predictions[scored] + shift) % num_classes == labels[scored]
        candidates[f"labels shifted by {-shift:+d}"] = shifted
    total = len(labels[scored])
    as_given = (predictions == labels)[scored]
    level = CHANCE_LEVEL / len(candidates)
    name, matches = max(candidates.items(), key=lambda each: each[1].sum())
    if total < _FEWEST_EXAMPLES // 2:
        reason = "Too few examples to tell."
        return skipped(reason)
    figure = f"{as_given.mean():.1%} as given, {matches.mean():.1%} with {name}"
    limit = resolution(fewest_gains(total, _LABEL_GAIN, level), total, "a gain")
    if not Pair.of(as_given, matches).exceeds(_LABEL_GAIN, level):
        message = "No other order of the labels fits better."
        return passed(figure, message, limit)
    return failed(
        figure,
        "The model's outputs stand in another order than the labels: map the labels to the order "
        f"the model was trained with ({name} fits).",
        limit,
    )


def _best_order(predictions, labels, num_classes: int) -> np.ndarray:
    """Returns the label for each output such that most of the predictions become right."""
    from scipy.optimize import linear_sum_assignment

    counts = np.zeros((num_classes, num_classes), int)
    np.add.at(counts, (predictions, labels), 1)
    # An output keeps its own label if no prediction speaks for another one.
    preference = counts + 0.5 * np.eye(num_classes)
    return linear_sum_assignment(preference, maximize=True)[1]
