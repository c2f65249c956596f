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
from he_keras.evaluation.check import Check
from he_keras.evaluation.subject import Subject

_NUM_IMAGES = 32
_NUM_POINTS = 6
#: Radii and steps that should be too short to change the decision, in epsilons.
_SMALL = 0.01
_ROUGHNESS = 0.1
_UNSTABLE = 0.5
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


def gradient_checks(subject: Subject, is_random: bool) -> tuple[Check, ...]:
    """Returns the checks of the gradients, on images that are classified correctly if it can be."""
    # Wrong ones lose their place: they are what an attack leaves alone.
    rows = np.argsort(~subject.correct, kind="stable")[:_NUM_IMAGES]
    images, labels = subject.images[rows], subject.labels[rows]
    slopes = {name: _slope(subject.victim, images, labels, loss) for name, loss in _LOSSES.items()}
    slope = slopes["margin"]
    surface = _noisy_loss_surface(subject, images, labels, slope.loss)
    if any(each.gradient is None for each in slopes.values()):
        skipped = [_skipped(name, "The model has no gradient.") for name in _NAMES[1:3]]
        no_gradient = Check("differentiable", "before", "fail", "no gradient", _NO_GRADIENT)
        return no_gradient, *skipped, surface
    if is_random:
        reason = "Cannot be decided for a model that answers differently each time."
        direction = _skipped("gradient-direction", reason)
    else:
        direction = _gradient_direction(subject, images, labels, slope)
    return _differentiable(slopes), _zero_gradients(slopes), direction, surface


def has_gradient(victim: Victim, images: np.ndarray, labels: np.ndarray) -> bool:
    """Whether logits depend differentiably on the images."""
    return _slope(victim, images[:1], labels[:1], losses.cw_margin).gradient is not None


_NAMES = ("differentiable", "zero-gradients", "gradient-direction", "noisy-loss-surface")


def _skipped(name: str, reason: str) -> Check:
    return Check(name, "before", "skipped", "not measured", reason)


def _slope(victim: Victim, images, labels, loss_function) -> _Slope:
    images = tf.constant(images)
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(images)
        loss = loss_function(victim.logits(images), tf.constant(labels, tf.int32))
    try:
        gradient = tape.gradient(loss, images)
    except LookupError:
        # An operation without any registered gradient, such as `tf.numpy_function`.
        gradient = None
    return _Slope(loss.numpy(), None if gradient is None else gradient.numpy())


def _differentiable(slopes: dict[str, _Slope]) -> Check:
    finite = np.array([_per_example(np.isfinite(each.gradient)) for each in slopes.values()])
    bad = int((~finite.all(axis=0)).sum())
    figure = f"{bad} of {finite.shape[1]} gradients are not finite"
    if not bad:
        message = "Gradients flow from the logits to the images."
        return Check("differentiable", "before", "pass", figure, message)
    return Check(
        "differentiable",
        "before",
        "fail",
        figure,
        "Gradients are NaN or infinite, and attacks take them as zero: look for a division, root "
        "or logarithm at zero.",
    )


def _zero_gradients(slopes: dict[str, _Slope]) -> Check:
    is_zero = {name: _per_example(each.gradient == 0.0) for name, each in slopes.items()}
    shares = {name: float(zero.mean()) for name, zero in is_zero.items()}
    figure = ", ".join(f"{share:.0%} under the {name}" for name, share in shares.items())
    verdict, message = "pass", "Every image has a gradient that an attack can follow."
    if shares["margin"] > 0:
        verdict = "fail" if shares["margin"] > 0.5 else "warn"
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
    return Check("zero-gradients", "before", verdict, figure, message)


def _gradient_direction(subject: Subject, images, labels, slope: _Slope) -> Check:
    """Compares the gradient with what a short step along it really does to the loss."""
    name, threat = "gradient-direction", subject.threat
    steepest = np.asarray(threat.steepest_step(tf.constant(slope.gradient)))
    moved = np.clip(images + _SMALL * threat.epsilon * steepest, *threat.bounds)
    axes = tuple(range(1, images.ndim))
    expected = np.sum((moved - images) * slope.gradient, axis=axes, dtype=np.float64)
    logits = subject.victim.logits(tf.constant(moved.astype(np.float32)))
    actual = losses.cw_margin(logits, labels).numpy().astype(np.float64) - slope.loss
    size = np.abs(expected).sum() + np.abs(actual).sum()
    if size == 0.0:
        return _skipped(name, "The loss does not move along the gradient: see zero-gradients.")
    error = float(np.nan_to_num(np.abs(actual - expected)).sum() / size)
    figure = f"{error:.0%} of the change differs at a hundredth of epsilon"
    if error <= _DISAGREEMENT:
        message = "A short step along the gradient changes the loss as the gradient says."
        return Check(name, "before", "pass", figure, message)
    return Check(
        name,
        "before",
        "fail",
        figure,
        "The gradient does not say how the loss changes (shattered, rounded or replaced): attack "
        "a smooth stand-in of the layer that does this, and use square-5000 and transfer attacks.",
    )


def _noisy_loss_surface(subject: Subject, images, labels, loss: np.ndarray) -> Check:
    """Indicator I-2, on the margin, in the ball and in one of a hundredth of its radius.

    Losses are added up over the images before they are divided: the margin of a single image may be
    near zero.
    """
    epsilon = subject.threat.epsilon
    large = _mean_change(subject, images, labels, loss, epsilon)
    small = _mean_change(subject, images, labels, loss, _SMALL * epsilon)
    scale = float(np.abs(loss).mean())
    relative = min(large / scale, 1.0) if scale else 1.0
    roughness = small / large if large else 0.0
    figure = f"{relative:.3f} of the margin at random points; {roughness:.3f} of that near by"
    if relative <= _UNSTABLE and roughness <= _ROUGHNESS:
        message = "The loss changes little, and the less the shorter the step."
        return Check("noisy-loss-surface", "before", "pass", figure, message)
    return Check(
        "noisy-loss-surface",
        "before",
        "warn",
        figure,
        "The loss jumps between neighbouring points, so gradients lead nowhere: use eot_samples > "
        "1 where the model is random, else a smooth stand-in of the rough layer, and square-5000.",
    )


def _mean_change(subject: Subject, images, labels, loss, radius: float) -> float:
    """Mean change of the margin from the images to random points in a ball."""
    changes = []
    for point in range(_NUM_POINTS):
        seed = tf.constant([point, 0])
        nearby = subject.threat.random_start(tf.constant(images), seed, radius)
        moved = losses.cw_margin(subject.victim.logits(nearby), labels).numpy()
        changes.append(np.abs(moved.astype(np.float64) - loss))
    return float(np.nan_to_num(np.mean(changes)))


def _per_example(mask: np.ndarray) -> np.ndarray:
    return np.all(mask.reshape(len(mask), -1), axis=1)
