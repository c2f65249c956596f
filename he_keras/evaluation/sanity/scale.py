"""Checks whether the scale of the logits, or the head, hides weakness from attacks.

Cross-entropy attacks lose their gradient where logits are large, and their aim where they are
small. That is how hypersphere embedding looked stronger than it was: its released models hold 57 to
60 % under a cross-entropy attack, and 53 % under attacks on logit differences.
"""

import numpy as np
import tensorflow as tf

from he_keras.attacks.attack import is_wrong
from he_keras.evaluation.check import Check
from he_keras.evaluation.sanity.sample import Sample, compiled, points, skipped, surplus_check
from he_keras.layers import CosineHead

_GAP = 0.01
_TRANSFER_GAIN = 0.002
_FACTORS = (0.01, 0.1, 10.0, 100.0)


def scale_checks(sample: Sample) -> tuple[Check, ...]:
    """Returns the checks that vary the loss and the scale of the logits."""
    broken = _cross_entropy(sample)
    return _loss_gap(sample, broken[1.0]), _logit_rescale(sample, broken)


def _cross_entropy(sample: Sample) -> dict[float, np.ndarray]:
    """Which examples an attack on the cross-entropy breaks, by what the logits are multiplied with.

    The factor is a variable, so that one compiled attack serves all.
    """
    factor = tf.Variable(1.0)
    rescaled = compiled(lambda images: factor * sample.model(images), sample.images)
    attack = sample.ascent("ce")
    broken = {}
    for value in (1.0, *_FACTORS):
        factor.assign(value)
        broken[value] = sample.run(attack, model=rescaled)
    return broken


def _loss_gap(sample: Sample, cross_entropy: np.ndarray) -> Check:
    counts = {"cross-entropy": int(cross_entropy.sum()), "margin": int(sample.plain.sum())}
    if sample.num_classes >= 3:
        counts["DLR"] = int(sample.run(sample.ascent("dlr")).sum())
    accuracies = ", ".join(
        f"{name} {1.0 - count / len(sample):.1%}" for name, count in counts.items()
    )
    gap = max(counts.values()) - counts["cross-entropy"]
    return surplus_check(
        "loss-gap",
        gap,
        sample,
        _GAP,
        f"{accuracies}: {points(gap, sample)}",
        "Attacks on the cross-entropy find what attacks on logit differences find.",
        "The cross-entropy overstates robustness, as the scale of the logits masks its gradient: "
        "report attacks on logit differences (cw-linf, apgd-dlr, apgd-t, autoattack).",
    )


def _logit_rescale(sample: Sample, broken: dict[float, np.ndarray]) -> Check:
    """Only a factor that helps the attack counts: large ones saturate any cross-entropy."""
    counts = {factor: int(each.sum()) for factor, each in sorted(broken.items())}
    gain = max(counts.values()) - counts[1.0]
    shown = ", ".join(
        f"x{factor:g}: {1.0 - count / len(sample):.1%}" for factor, count in counts.items()
    )
    return surplus_check(
        "logit-rescale",
        gain,
        sample,
        _GAP,
        f"{shown}; {points(gain, sample)}",
        "No other scale of the logits helps an attack on the cross-entropy.",
        "Multiplying the logits by a constant, which changes no decision, makes the model look "
        "less robust: its own scale hides its weakness from the cross-entropy.",
    )


def transfer_without_head(sample: Sample) -> Check:
    """Crafts on the inner products of features and class weights, neither of them normalised."""
    name = "transfer-without-head"
    victim = sample.victim
    if not isinstance(victim.head, CosineHead):
        return skipped(name, "The model has no cosine head to take away.")
    try:
        kernel = victim.head_weights()[0]
        victim.features(tf.constant(sample.images[:1]))
    except ValueError as error:
        return skipped(name, f"The features of the model are not accessible: {error}")
    headless = compiled(lambda images: victim.features(images) @ kernel, sample.images)
    rows = np.flatnonzero(sample.unbroken)
    gained = 0
    if len(rows):
        attack = sample.ascent(stop_when_broken=False)
        result = attack(headless, sample.images[rows], sample.labels[rows], example_ids=rows)
        gained = int(is_wrong(sample.answers(result.x_adv), sample.labels[rows]).numpy().sum())
    return surplus_check(
        name,
        gained,
        sample,
        _TRANSFER_GAIN,
        f"{points(gained, sample)} beyond the attacks on the model itself",
        "What is crafted on the network without its head breaks nothing new.",
        "Images crafted on the same network without its head break what attacks on the model left: "
        "the head masks gradients; use the attack `feature` and square-5000.",
    )
