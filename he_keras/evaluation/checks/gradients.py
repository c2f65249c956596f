"""Checks before the attacks that concern gradients: are there any, and do they tell the truth?

Papers: Pintor et al. 2022, "Indicators of attack failure" (unavailable gradients, unstable
predictions); Croce & Hein 2020 (zero gradients); Athalye et al. 2018, "Obfuscated gradients give a
false sense of security" (what the failures look like).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from he_keras import losses
from he_keras.attacks import Victim
from he_keras.attacks.framework.gradients import image_gradient
from he_keras.attacks.framework.result import is_wrong
from he_keras.attacks.framework.victim import check_not_probabilities
from he_keras.evaluation.checks.check import (
    CleanSample,
    Outcome,
    Sample,
    Wording,
    failed,
    mean_outcome,
    passed,
    skipped,
    warned,
)
from he_keras.evaluation.statistics import (
    CHANCE_LEVEL,
    FEWEST_VALUES,
    exceeds,
    resolution,
    share_exceeds,
)

#: Bounds the cost: each image takes gradients of two losses and passes at several points.
_NUM_IMAGES = 32
#: Random points around each image; few, because the mean over all images is what is tested.
_NUM_POINTS = 6
#: Radii and steps that should be too short to change the decision, in epsilons.
_SMALL = 0.01
#: Ten times the share that a smooth loss has at a radius of `_SMALL`.
_ROUGHNESS = 0.1
#: Chosen: the margin may change by half its own size within the ball.
_UNSTABLE = 0.5
#: Chosen: leaves room for curvature between the two ends of a step of `_SMALL`.
_DISAGREEMENT = 0.25
_LOSSES: dict[str, Callable] = {"margin": losses.cw_margin, "cross-entropy": losses.cross_entropy}
_NO_GRADIENT = (
    "The logits do not depend differentiably on the images, so no gradient attack works: attack a "
    "differentiable stand-in of the step that breaks the chain (BPDA), and use square-5000."
)


class _Slope(NamedTuple):
    """Per-example loss and its gradient, None where there is none."""

    loss: np.ndarray
    gradient: Any


class _Slopes(NamedTuple):
    """Some images, their labels, and the slope of each loss there."""

    images: np.ndarray
    labels: np.ndarray
    by_loss: dict[str, _Slope]

    @property
    def exist(self) -> bool:
        """Whether every loss has a gradient."""
        return all(each.gradient is not None for each in self.by_loss.values())


def a_gradient(sample: CleanSample) -> str:
    """Says that there is no gradient; nothing if there is one."""
    return "" if sample.once(_slopes).exist else "The model has no gradient."


def an_attackable_model(sample: Sample) -> str:
    """Says why no attack can tell anything about a model; nothing if one can."""
    try:
        check_not_probabilities(sample.logits)
    except ValueError:
        return "The model returns probabilities, which no attack accepts: see logits."
    right = np.flatnonzero(~is_wrong(sample.logits, sample.labels).numpy())
    if not len(right):
        return "No example of the sample is classified correctly: see clean-accuracy."
    first = right[:1]
    slope = _slope(sample.victim, sample.images[first], sample.labels[first], losses.cw_margin)
    if slope.gradient is None:
        return "The model has no gradient, which these checks compare with: see differentiable."
    return ""


def _slopes(sample: CleanSample) -> _Slopes:
    # Attacks leave alone what is wrong from the start, so that the correct images come first.
    rows = np.argsort(~sample.correct, kind="stable")[:_NUM_IMAGES]
    images, labels = sample.images[rows], sample.labels[rows]
    slopes = {name: _slope(sample.victim, images, labels, loss) for name, loss in _LOSSES.items()}
    return _Slopes(images, labels, slopes)


def _slope(victim: Victim, images, labels, loss_function) -> _Slope:
    images = tf.constant(images)

    def loss_of(logits):
        return loss_function(logits, tf.constant(labels, tf.int32))

    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(images)
        logits = victim.logits(images)
    try:
        loss, gradient = image_gradient(tape, loss_of, images, logits)
    except LookupError:
        # An operation without any registered gradient, such as `tf.numpy_function`.
        loss, gradient = loss_of(logits), None
    return _Slope(loss.numpy(), None if gradient is None else gradient.numpy())


def differentiable(sample: CleanSample) -> Outcome:
    """Looks for gradients that are missing or not finite."""
    slopes = sample.once(_slopes)
    if not slopes.exist:
        return failed("no gradient", _NO_GRADIENT)
    gradients = [each.gradient for each in slopes.by_loss.values()]
    finite = np.array([_per_example(np.isfinite(each)) for each in gradients])
    bad = int((~finite.all(axis=0)).sum())
    figure = f"{bad} of {finite.shape[1]} gradients are not finite"
    if not bad:
        message = "Gradients flow from the logits to the images."
        limit = resolution(1, finite.shape[1])
        return passed(figure, message, limit)
    return failed(
        figure,
        "Gradients are NaN or infinite, and attacks take them as zero: look for a division, root "
        "or logarithm at zero.",
    )


def zero_gradients(sample: CleanSample) -> Outcome:
    """Looks for gradients that are exactly zero."""
    slopes = sample.once(_slopes).by_loss
    is_zero = {name: _per_example(each.gradient == 0.0) for name, each in slopes.items()}
    shares = {name: float(zero.mean()) for name, zero in is_zero.items()}
    figure = ", ".join(f"{share:.0%} under the {name}" for name, share in shares.items())
    verdict, message = "pass", "Every image has a gradient that an attack can follow."
    if shares["margin"] > 0:
        zeros = is_zero["margin"]
        verdict = "fail" if exceeds(int(zeros.sum()), len(zeros), 0.5) else "warn"
        message = (
            "Gradients are exactly zero, so gradient attacks stay where they are: find the layer "
            "that is flat (quantisation, saturation), attack without it, and use square-5000."
        )
    elif shares["cross-entropy"] > 0:
        verdict = "warn"
        message = (
            "The cross-entropy saturates because the logits are large: believe only attacks on "
            "logit differences (cw-linf, apgd-dlr, apgd-t, autoattack)."
        )
    limit = resolution(1, len(is_zero["margin"]))
    return Outcome(verdict, figure, message, limit)


def gradient_direction(sample: CleanSample) -> Outcome:
    """Compares the gradient with what a short step along it really does to the loss."""
    images, labels, slopes = sample.once(_slopes)
    slope, threat = slopes["margin"], sample.threat
    steepest = np.asarray(threat.steepest_step(tf.constant(slope.gradient)))
    moved = np.clip(images + _SMALL * threat.epsilon * steepest, *threat.bounds)
    axes = tuple(range(1, images.ndim))
    expected = np.sum((moved - images) * slope.gradient, axis=axes, dtype=np.float64)
    logits = sample.victim.logits(tf.constant(moved.astype(np.float32)))
    actual = losses.cw_margin(logits, labels).numpy().astype(np.float64) - slope.loss
    size = np.nan_to_num(np.abs(expected) + np.abs(actual))
    if len(size) < FEWEST_VALUES:
        return skipped(f"Fewer than {FEWEST_VALUES} images are too few to tell.")
    if not size.any():
        return skipped("The loss does not move along the gradient: see zero-gradients.")
    error = np.nan_to_num(np.abs(actual - expected))
    words = Wording(
        f"{error.sum() / size.sum():.0%} of the change differs at a hundredth of epsilon",
        "A short step along the gradient changes the loss as the gradient says.",
        "The gradient does not say how the loss changes (shattered, rounded or replaced): attack "
        "a smooth stand-in of the layer that does this, and use square-5000 and transfer attacks.",
    )
    return mean_outcome(error, size, _DISAGREEMENT, "fail", words)


def noisy_loss_surface(sample: CleanSample) -> Outcome:
    """Indicator I-2, on the margin, in the ball and in one of a hundredth of its radius.

    Losses are summed over the images before they are divided, because the margin of a single image
    may be near zero.
    """
    images, labels, slopes = sample.once(_slopes)
    loss, epsilon = slopes["margin"].loss, sample.threat.epsilon
    if len(loss) < FEWEST_VALUES:
        return skipped(f"Fewer than {FEWEST_VALUES} images are too few to tell.")
    large = _mean_changes(sample, images, labels, loss, epsilon)
    small = _mean_changes(sample, images, labels, loss, _SMALL * epsilon)
    scale = np.nan_to_num(np.abs(loss).astype(np.float64))
    relative = min(large.sum() / scale.sum(), 1.0) if scale.any() else 1.0
    roughness = small.sum() / large.sum() if large.any() else 0.0
    figure = f"{relative:.3f} of the margin at random points; {roughness:.3f} of that near by"
    # There are two questions, so each may be answered wrongly by chance half as often.
    level = CHANCE_LEVEL / 2
    is_unstable, least = share_exceeds(large, scale, _UNSTABLE, level)
    is_rough, least_rough = share_exceeds(small, large, _ROUGHNESS, level)
    limit = f"with {len(loss)} images less than {least:.2f} and {least_rough:.2f} may go unseen"
    if not (is_unstable or is_rough):
        message = "The loss changes little, and the less the shorter the step."
        return passed(figure, message, limit)
    return warned(
        figure,
        "The loss jumps between neighbouring points, so gradients lead nowhere: use eot_samples > "
        "1 where the model is random, else a smooth stand-in of the rough layer, and square-5000.",
        limit,
    )


def _mean_changes(sample: CleanSample, images, labels, loss, radius: float) -> np.ndarray:
    """Mean change of each margin from the image to random points in a ball."""
    changes = []
    for point in range(_NUM_POINTS):
        seed = tf.constant([point, 0])
        nearby = sample.threat.random_start(tf.constant(images), seed, radius)
        moved = losses.cw_margin(sample.victim.logits(nearby), labels).numpy()
        changes.append(np.abs(moved.astype(np.float64) - loss))
    return np.nan_to_num(np.mean(changes, axis=0))


def _per_example(mask: np.ndarray) -> np.ndarray:
    return np.all(mask.reshape(len(mask), -1), axis=1)
