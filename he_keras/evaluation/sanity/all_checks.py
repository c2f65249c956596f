"""Runs every check after the attacks.

Costs for each example up to about 280 forward and backward passes and 400 forward passes, fewer
for examples that break early; and half a second for each of about 15 attacks to be compiled.

Example:
    >>> import he_keras as he, numpy as np, tensorflow as tf
    >>> from he_keras.evaluation.sanity import sanity_checks
    >>> images = np.random.default_rng(0).uniform(size=(40, 4)).astype("float32")
    >>> checks = sanity_checks(
    ...     lambda images: 9 * images, images, images.argmax(1), he.ThreatModel("linf", 0.1))
    >>> [check.name for check in checks if check.fired]
    []
"""

from collections.abc import Mapping

import numpy as np

from he_keras.attacks.checks import check_not_probabilities, check_positive_integer
from he_keras.evaluation.check import Check
from he_keras.evaluation.planted import planted_adversarial
from he_keras.evaluation.preflight_gradients import has_gradient
from he_keras.evaluation.sanity.black_box import black_box, random_noise
from he_keras.evaluation.sanity.radii import radius_checks
from he_keras.evaluation.sanity.sample import Sample, points, skipped, surplus_check
from he_keras.evaluation.sanity.scale import scale_checks, transfer_without_head
from he_keras.evaluation.sanity.strength import silent_success, strength_checks
from he_keras.threat import ThreatModel

#: The checks, in the order in which they are returned.
NAMES = (
    "iterative-beats-single-step",
    "more-steps",
    "plateaued-loss",
    "more-restarts",
    "loss-gap",
    "logit-rescale",
    "transfer-without-head",
    "black-box",
    "random-noise",
    "monotone-in-epsilon",
    "half-range-attack",
    "unbounded-attack",
    "silent-success",
    "planted-adversarial",
    "worst-case-holds",
)
_MISSED = 0.005


def sanity_checks(
    model,
    images,
    labels,
    threat: ThreatModel,
    *,
    num_examples: int = 64,
    num_steps: int = 20,
    num_queries: int = 200,
    num_points: int = 100,
    num_planted: int = 16,
    logit_scale: float | str = "model",
    seed: int = 0,
    curve: dict | None = None,
    still_correct: Mapping[str, np.ndarray] | None = None,
) -> tuple[Check, ...]:
    """Runs cheap experiments on a sample whose outcome is known if attacks and model are sound.

    Args:
        model: a `keras.Model` or a callable `images -> logits`.
        images: images within the threat model's bounds.
        labels: integer labels.
        threat: the threat model.
        num_examples: how many of the images to use, from the first.
        num_steps: steps of the iterated attack.
        num_queries: queries of the attack without gradients.
        num_points: random points tried around each image.
        num_planted: images around which an adversarial image is planted.
        logit_scale: see `he_keras.attacks.Victim`.
        seed: seed of all draws.
        curve: result of `epsilon_curve`; None measures one.
        still_correct: flags for the same images that attacks left, by the name of the attack.
    """
    check_positive_integer("num_examples", num_examples)
    images, labels = np.asarray(images)[:num_examples], np.asarray(labels)[:num_examples]
    sample = Sample(model, images, labels, threat, logit_scale, num_steps, seed)
    reason = _unusable(sample)
    if reason:
        return tuple(skipped(name, reason) for name in NAMES)
    return (
        *strength_checks(sample),
        *scale_checks(sample),
        transfer_without_head(sample),  # from here on, what no gradient attack has broken counts
        black_box(sample, num_queries),
        random_noise(sample, num_points),
        *radius_checks(sample, curve),
        silent_success(sample),
        planted_adversarial(model, images, labels, threat, num_planted, num_steps, seed),
        _worst_case_holds(sample, still_correct),
    )


def _unusable(sample: Sample) -> str:
    """Why no attack can say anything about a model, or nothing."""
    try:
        check_not_probabilities(sample.logits)
    except ValueError:
        return "The model returns probabilities, which no attack accepts: see logits."
    right = np.flatnonzero(sample.unbroken)
    if not len(right):
        return "No example of the sample is classified correctly: see clean-accuracy."
    if not has_gradient(sample.victim, sample.images[right], sample.labels[right]):
        return "The model has no gradient, which these checks compare with: see differentiable."
    return ""


def _worst_case_holds(sample: Sample, still_correct) -> Check:
    name = "worst-case-holds"
    if not still_correct:
        return skipped(name, "No results of an evaluation were given.")
    left = np.all([np.asarray(flags)[: len(sample)] for flags in still_correct.values()], axis=0)
    broken_here = np.zeros(len(sample), bool)
    for rows, result in sample.results:
        broken_here[rows] |= result.success
    missed = int((left & broken_here).sum())
    return surplus_check(
        name,
        missed,
        sample,
        _MISSED,
        f"{points(missed, sample)} beyond {', '.join(still_correct)}",
        "The cheap attacks of these checks break nothing that the evaluation left.",
        "The cheap attacks of these checks break examples that the evaluation reports as robust: "
        "its attacks are too weak; report autoattack.",
    )
