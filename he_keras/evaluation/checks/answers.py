"""Checks before the attacks that concern the answers: finite, logits, repeatable, independent.

Papers: Croce & Hein 2020 (AutoAttack's checks of the model); Carlini et al. 2019, "On evaluating
adversarial robustness".
"""

import numpy as np
import tensorflow as tf

from he_keras.attacks.framework.agreement import probe
from he_keras.attacks.framework.victim import check_not_probabilities
from he_keras.evaluation.checks.check import Outcome, failed, passed, warned
from he_keras.evaluation.checks.sample import CleanSample
from he_keras.evaluation.statistics import resolution
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
        "needs: use screen, cw-linf-100 and square-5000 instead.",
    )


def _largest_change(logits: np.ndarray, reference: np.ndarray) -> float:
    """Largest distance between logit vectors, divided by the length of each."""
    difference = np.linalg.norm(_directions(logits) - _directions(reference), axis=1)
    return float(difference.max(initial=0.0))


def _directions(logits: np.ndarray) -> np.ndarray:
    # Another check reports what is not finite.
    logits = np.nan_to_num(logits.astype(np.float64), posinf=0.0, neginf=0.0)
    return logits / (np.linalg.norm(logits, axis=1, keepdims=True) + 1e-10)
