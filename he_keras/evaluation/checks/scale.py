"""Checks whether the scale of the logits, or the head, hides weakness from attacks.

Cross-entropy attacks lose their gradient if logits are large, and their aim if logits are small.
That is how hypersphere embedding looked stronger than it was. Its released models hold 57 to 60 %
under a cross-entropy attack, and 53 % under attacks on logit differences.
"""

import numpy as np
import tensorflow as tf

from he_keras import losses
from he_keras.attacks.framework.result import is_wrong
from he_keras.evaluation.checks.check import (
    Outcome,
    Wording,
    paired_outcome,
    points,
    skipped,
    surplus_outcome,
)
from he_keras.evaluation.checks.sample import AttackedSample, compiled
from he_keras.evaluation.statistics import Pair
from he_keras.layers import CosineHead

#: One point (ours): the released HE models show seven.
_GAP = 0.01
#: Carlini et al. give no number for transfer: this is AutoAttack's for Square.
_TRANSFER_GAIN = 0.002
#: If the logits are so far apart that the cross-entropy saturates, only smaller ones can help an
#: attack; otherwise only larger ones can. Looking the other way would only add chance findings.
_SATURATING_MARGIN = 5.0
#: Powers of ten: enough to leave the saturated or the flat part of the cross-entropy.
_FACTORS = {"smaller": (0.1, 0.01), "larger": (10.0, 100.0)}


def _cross_entropy(sample: AttackedSample) -> dict[float, np.ndarray]:
    """Returns which examples an attack on the cross-entropy breaks, for each factor of the logits.

    The factor is a variable, so that one compiled attack serves all factors.
    """
    margins = losses.margin(tf.constant(sample.logits), sample.labels).numpy()
    size = float(np.median(np.abs(margins)))
    others = _FACTORS["smaller" if size > _SATURATING_MARGIN else "larger"]
    factor = tf.Variable(1.0)
    rescaled = compiled(lambda images: factor * sample.function(images), sample.images)
    attack = sample.ascent("ce")
    broken = {}
    for value in (1.0, *others):
        factor.assign(value)
        broken[value] = sample.run(attack, function=rescaled)
    return broken


def loss_gap(sample: AttackedSample) -> Outcome:
    """Compares attacks on the cross-entropy and on logit differences."""
    cross_entropy = sample.once(_cross_entropy)[1.0]
    broken = {"margin": sample.plain}
    if sample.num_classes >= 3:
        broken["DLR"] = sample.run(sample.ascent("dlr"))
    pairs = {name: Pair.of(cross_entropy, each) for name, each in broken.items()}
    words = Wording(
        _accuracies({"cross-entropy": cross_entropy, **broken}) + _beyond(pairs),
        "Attacks on the cross-entropy find what attacks on logit differences find.",
        "The cross-entropy overstates robustness, as the scale of the logits masks its gradient: "
        "report attacks on logit differences (cw-linf, apgd-dlr, apgd-t, autoattack).",
    )
    left = int((~cross_entropy).sum())
    return paired_outcome(list(pairs.values()), left, _GAP, words)


def logit_rescale(sample: AttackedSample) -> Outcome:
    """Attacks the cross-entropy at other scales; only a factor that helps the attack counts."""
    broken = sample.once(_cross_entropy)
    named = {f"x{factor:g}": each for factor, each in sorted(broken.items())}
    pairs = {
        name: Pair.of(broken[1.0], each) for name, each in named.items() if each is not broken[1.0]
    }
    words = Wording(
        _accuracies(named) + _beyond(pairs),
        "No other scale of the logits helps an attack on the cross-entropy.",
        "Multiplying the logits by a constant, which changes no decision, makes the model look "
        "less robust: its own scale hides its weakness from the cross-entropy.",
    )
    left = int((~broken[1.0]).sum())
    return paired_outcome(list(pairs.values()), left, _GAP, words)


def _accuracies(broken: dict[str, np.ndarray]) -> str:
    return ", ".join(f"{name} {1.0 - each.mean():.1%}" for name, each in broken.items())


def _beyond(pairs: dict[str, Pair]) -> str:
    """Returns, as text, the pair that speaks most for a difference."""
    name, pair = min(pairs.items(), key=lambda each: each[1].chance)
    return f"; {pair.gains} of {pair.total} only with {name}, {pair.losses} only without"


def a_cosine_head(sample: AttackedSample) -> str:
    """Says why there is no head to take away; nothing if there is one."""
    is_cosine = isinstance(sample.victim.head, CosineHead)
    return "" if is_cosine else "The model has no cosine head to take away."


def transfer_without_head(sample: AttackedSample) -> Outcome:
    """Crafts on the inner products of features and class weights, neither of them normalised."""
    victim = sample.victim
    try:
        kernel = victim.head_weights()[0]
        victim.features(tf.constant(sample.images[:1]))
    except ValueError as error:
        return skipped(f"The features of the model are not accessible: {error}")
    headless = compiled(lambda images: victim.features(images) @ kernel, sample.images)
    rows = np.flatnonzero(sample.unbroken)
    gained = 0
    if len(rows):
        attack = sample.ascent(stop_when_broken=False)
        result = attack(headless, sample.images[rows], sample.labels[rows], example_ids=rows)
        gained = int(is_wrong(sample.answers(result.x_adv), sample.labels[rows]).numpy().sum())
    words = Wording(
        f"{points(gained, len(sample))} beyond the attacks on the model itself",
        "What is crafted on the network without its head breaks nothing new.",
        "Images crafted on the same network without its head break what attacks on the model left: "
        "the head masks gradients; use the attack `feature` and square-5000.",
    )
    return surplus_outcome(gained, len(rows), len(sample), _TRANSFER_GAIN, words)
