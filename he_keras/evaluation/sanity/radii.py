"""Checks that vary epsilon, from a fraction of it to the whole range of the pixels.

Paper: Carlini et al. 2019, "On evaluating adversarial robustness": accuracy falls with epsilon,
reaches zero, and cannot beat chance where any image can be turned into a grey one.
"""

import math
import numbers
from collections.abc import Sequence

import numpy as np

from he_keras.evaluation.check import Check, chance_of_at_least, exceeds
from he_keras.evaluation.sanity.sample import Sample, points, surplus_check
from he_keras.threat import ThreatModel

_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
_CHECKED_FACTORS = (0.5, 1.0, 2.0, 4.0)
_RISE = 0.005
_CHANCE_LEVEL = 0.05
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
) -> dict:
    """Measures the accuracy at several radii, each by an attack of its own on every example.

    Nothing carries over from one radius to the next, so that the curve can rise: then the attack
    fails at the larger radius, which `monotone-in-epsilon` reports.

    Args:
        model: a `keras.Model` or a callable `images -> logits`.
        images: images within the threat model's bounds.
        labels: integer labels.
        threat: the threat model, whose epsilon is one of the default radii.
        attack: name of an attack; default PGD on the margin (l1: APGD on the margin), 20 steps.
        epsilons: radii above 0; default 1/4, 1/2, 1, 2, 4 and 8 times epsilon, as far as bounds go.
        logit_scale: see `he_keras.attacks.Victim`.
        seed: seed of the attack.

    Example:
        >>> import he_keras as he, numpy as np, tensorflow as tf
        >>> from he_keras.evaluation.sanity import epsilon_curve
        >>> logits = lambda images: images @ tf.constant([[1.0, -1.0], [-1.0, 1.0]])
        >>> images = np.array([[0.9, 0.1], [0.55, 0.5]], "float32")
        >>> curve = epsilon_curve(logits, images, np.array([0, 0]), he.ThreatModel("linf", 0.1))
        >>> [point["accuracy"] for point in curve["points"]]
        [1.0, 1.0, 0.5, 0.5, 0.5, 0.0, 0.0]
    """
    sample = Sample(model, images, labels, threat, logit_scale, seed=seed)
    if epsilons is None:
        epsilons = _default_epsilons(sample, _FACTORS)
    return _curve(sample, attack, _checked_epsilons(epsilons))


def radius_checks(sample: Sample, curve: dict | None) -> tuple[Check, ...]:
    """Returns the checks that need attacks at other radii; `curve` saves one of them."""
    if curve is None:
        curve = _curve(sample, None, _default_epsilons(sample, _CHECKED_FACTORS))
    low, high = sample.threat.bounds
    # In every norm: the whole box, and the ball of the box that holds a grey image.
    unbounded = ThreatModel("linf", high - low, sample.threat.bounds)
    half = ThreatModel("linf", (high - low) / 2, sample.threat.bounds)
    return (
        _monotone(curve),
        _chance_at_half(sample, int((~sample.run(sample.ascent(threat=half))).sum())),
        _unbounded(sample, int((~sample.run(sample.ascent(threat=unbounded))).sum())),
    )


def _curve(sample: Sample, attack: str | None, epsilons: Sequence[float]) -> dict:
    clean = float((sample.logits.argmax(axis=1) == sample.labels).mean())
    measured = [{"epsilon": 0.0, "accuracy": clean}]
    name = attack
    for epsilon in epsilons:
        threat = ThreatModel(sample.threat.norm, epsilon, sample.threat.bounds)
        if attack is None:
            built = sample.ascent(threat=threat)
            name = f"{built.name}-{sample.num_steps} (margin)"
        else:
            built = sample.build(attack, threat)
        broken = sample.run(built)
        measured.append({"epsilon": float(epsilon), "accuracy": float(1.0 - broken.mean())})
    return {"attack": name, "num_examples": len(sample), "points": measured}


def _default_epsilons(sample: Sample, factors) -> list[float]:
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


def _monotone(curve: dict) -> Check:
    accuracies = np.array([point["accuracy"] for point in curve["points"]])
    total = curve["num_examples"]
    rises = np.round(np.diff(accuracies) * total).astype(int)
    worst = int(rises.max(initial=0))
    shown = ", ".join(
        f"{point['epsilon']:.3g}: {point['accuracy']:.1%}" for point in curve["points"]
    )
    return surplus_check(
        "monotone-in-epsilon",
        worst,
        range(total),
        _RISE,
        f"{shown}; largest rise {points(worst, range(total))}",
        "Accuracy never rises with epsilon.",
        "A larger epsilon, which allows all that a smaller one does, gives a higher accuracy: the "
        "attack fails at the larger one, so raise its steps, and suspect masked gradients.",
    )


def _chance_at_half(sample: Sample, held: int) -> Check:
    chance = float(np.bincount(sample.labels).max() / len(sample))
    figure = f"{held / len(sample):.1%} hold at half the range (linf), chance {chance:.1%}"
    if held <= chance * len(sample) or (
        chance_of_at_least(held, len(sample), chance) >= _CHANCE_LEVEL
    ):
        message = "Where any image can become grey, accuracy is no better than chance."
        return Check("half-range-attack", "after", "pass", figure, message)
    return Check(
        "half-range-attack",
        "after",
        "fail",
        figure,
        "Accuracy is above chance where any image can be made grey, which is impossible under a "
        "working attack: gradients are masked, or the attack's steps are far too short.",
    )


def _unbounded(sample: Sample, held: int) -> Check:
    figure = f"{1.0 - held / len(sample):.1%} of {len(sample)} broken"
    if not held:
        message = "An attack that may change everything breaks every example."
        return Check("unbounded-attack", "after", "pass", figure, message)
    return Check(
        "unbounded-attack",
        "after",
        "fail" if exceeds(held, len(sample), _HELD_SHARE) else "warn",
        figure,
        "An attack that may change every pixel to anything fails, so it fails for reasons other "
        "than robustness: see the checks of the gradients.",
    )
