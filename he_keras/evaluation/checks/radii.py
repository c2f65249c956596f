"""Checks that vary epsilon, from a fraction of it to the whole range of the pixels.

Paper: Carlini et al. 2019, "On evaluating adversarial robustness". Accuracy must fall with epsilon,
and must reach zero. It cannot beat chance where any image can be turned into a grey one.
"""

import math
import numbers
from collections.abc import Sequence

import numpy as np

from he_keras.evaluation.checks.check import (
    AttackedSample,
    Outcome,
    Wording,
    failed,
    passed,
    skipped,
    surplus_outcome,
)
from he_keras.evaluation.statistics import exceeds, fewest_beyond, resolution
from he_keras.status_line import StatusLine
from he_keras.threat import ThreatModel

#: Radii of the curve, in epsilons.
_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
#: Radii of the check without a curve, in epsilons: fewer, because each is a whole attack.
_CHECKED_FACTORS = (0.5, 1.0, 2.0, 4.0)
#: Half a point (ours): Carlini et al. say that a larger radius breaks more, and give no number.
_RISE = 0.005
#: Chosen: what may be left by too few steps where everything is allowed; more of it is a failure.
_HELD_SHARE = 0.05


def epsilon_curve(
    model,
    images,
    labels,
    threat: ThreatModel,
    attack: str | None = None,
    epsilons: Sequence[float] | None = None,
    logit_scale: float | str = "model",
    seed: int = 0,
    show_progress: bool = False,
) -> dict:
    """Measures the accuracy at several radii, each by an attack of its own on every example.

    Nothing carries over from one radius to the next, so that the curve can rise. If it does, the
    attack fails at the larger radius, and `monotone-in-epsilon` reports it.

    Args:
        model: a `keras.Model` or a callable `images -> logits`.
        images: images within the threat model's bounds.
        labels: integer labels.
        threat: the threat model, whose epsilon is one of the default radii.
        attack: name of an attack; default PGD on the margin (l1: APGD on the margin), 20 steps.
        epsilons: radii above 0; default 1/4, 1/2, 1, 2, 4 and 8 times epsilon, as far as bounds go.
        logit_scale: see `he_keras.attacks.Victim`.
        seed: seed of the attack.
        show_progress: show which radius is measured.

    Example:
        >>> import he_keras as he, numpy as np, tensorflow as tf
        >>> from he_keras.evaluation.checks import epsilon_curve
        >>> logits = lambda images: images @ tf.constant([[1.0, -1.0], [-1.0, 1.0]])
        >>> images = np.array([[0.9, 0.1], [0.55, 0.5]], "float32")
        >>> threat, labels = he.ThreatModel("linf", 0.1), np.array([0, 0])
        >>> curve = epsilon_curve(logits, images, labels, threat, epsilons=[0.05, 0.8])
        >>> [point["accuracy"] for point in curve["points"]]
        [1.0, 0.5, 0.0]
    """
    sample = AttackedSample(model, images, labels, threat, logit_scale, seed=seed)
    if epsilons is None:
        epsilons = _default_epsilons(sample, _FACTORS)
    epsilons = _checked_epsilons(epsilons)
    with StatusLine("curve over epsilon", show_progress) as line:
        return measured_curve(sample, attack, epsilons, line)


def measured_curve(
    sample: AttackedSample,
    attack: str | None,
    epsilons: Sequence[float],
    line: StatusLine | None = None,
) -> dict:
    """Returns the curve of `epsilon_curve`, at the given radii, for a sample."""
    line = line or StatusLine("curve", show=False)
    clean = float((sample.logits.argmax(axis=1) == sample.labels).mean())
    measured = [{"epsilon": 0.0, "accuracy": clean}]
    smaller = regained = np.zeros(len(sample), bool)
    name = attack
    for number, epsilon in enumerate(epsilons):
        line.count(number, len(epsilons), f"radius {number + 1} of {len(epsilons)}")
        threat = ThreatModel(sample.threat.norm, epsilon, sample.threat.bounds)
        if attack is None:
            built = sample.ascent(threat=threat)
            name = f"{built.name} (margin)"
        else:
            built = sample.build(attack, threat)
        broken = sample.run(built)
        regained = regained | (smaller & ~broken)
        smaller = smaller | broken
        measured.append({"epsilon": float(epsilon), "accuracy": float(1.0 - broken.mean())})
    line.count(1, 1, f"{len(epsilons)} radii")
    return {
        "attack": name,
        "num_examples": len(sample),
        "num_regained": int(regained.sum()),
        "points": measured,
    }


def _default_epsilons(sample: AttackedSample, factors) -> list[float]:
    low, high = sample.threat.bounds
    size = math.prod(sample.images.shape[1:])
    widest = (high - low) * {"linf": 1.0, "l2": math.sqrt(size), "l1": size}[sample.threat.norm]
    return sorted({min(factor * sample.threat.epsilon, widest) for factor in factors})


def _checked_epsilons(epsilons) -> list[float]:
    for epsilon in epsilons:
        is_number = isinstance(epsilon, numbers.Real) and not isinstance(epsilon, bool)
        if not is_number or not 0 < epsilon < math.inf:
            raise ValueError(
                "Invalid epsilons; expected finite numbers above 0; received "
                f"epsilons={list(epsilons)!r}"
            )
    return sorted(float(epsilon) for epsilon in epsilons)


def monotone_in_epsilon(sample: AttackedSample) -> Outcome:
    """Looks for examples that a larger radius leaves and a smaller one breaks."""
    curve = sample.curve or sample.once(_checked_curve)
    total = curve["num_examples"]
    if "num_regained" not in curve:
        return skipped("The curve does not say which examples it is about; measure it anew.")
    regained = curve["num_regained"]
    shown = ", ".join(
        f"{point['epsilon']:.3g}: {point['accuracy']:.1%}" for point in curve["points"]
    )
    words = Wording(
        f"{shown}; {regained} of {total} broken at one radius hold at a larger one",
        "What a smaller epsilon breaks, a larger one breaks too.",
        "A larger epsilon, which allows all that a smaller one does, leaves what that one breaks: "
        "the attack fails at the larger one, so raise its steps, and suspect masked gradients.",
    )
    return surplus_outcome(regained, total, total, _RISE, words)


def _checked_curve(sample: AttackedSample) -> dict:
    return measured_curve(sample, None, _default_epsilons(sample, _CHECKED_FACTORS))


def half_range_attack(sample: AttackedSample) -> Outcome:
    """Attacks in half the range of the pixels, in which any image can become grey."""
    held, chance = _held_within(sample, 0.5), sample.chance
    figure = f"{held / len(sample):.1%} hold at half the range (linf), chance {chance:.1%}"
    needed = fewest_beyond(len(sample), chance)
    limit = resolution(needed, len(sample), "an accuracy")
    if held < needed:
        message = "Where any image can become grey, accuracy is no better than chance."
        return passed(figure, message, limit)
    return failed(
        figure,
        "Accuracy is above chance where any image can be made grey, which is impossible under a "
        "working attack: gradients are masked, or the attack's steps are far too short.",
        limit,
    )


def _held_within(sample: AttackedSample, share: float) -> int:
    """Returns how many examples hold if every pixel may move by a share of its range.

    The norm is linf whatever the threat model's is: half the range holds a grey image, and all of
    it every image.
    """
    low, high = sample.threat.bounds
    threat = ThreatModel("linf", share * (high - low), sample.threat.bounds)
    return int((~sample.run(sample.ascent(threat=threat))).sum())


def unbounded_attack(sample: AttackedSample) -> Outcome:
    """Attacks in the whole range of the pixels."""
    held = _held_within(sample, 1.0)
    figure = f"{1.0 - held / len(sample):.1%} of {len(sample)} broken"
    limit = resolution(1, len(sample))
    if not held:
        message = "An attack that may change everything breaks every example."
        return passed(figure, message, limit)
    return Outcome(
        "fail" if exceeds(held, len(sample), _HELD_SHARE) else "warn",
        figure,
        "An attack that may change every pixel to anything fails, so it fails for reasons other "
        "than robustness: see the checks of the gradients.",
        limit,
    )
