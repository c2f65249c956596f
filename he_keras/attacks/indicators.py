"""Cheap signs that an attack's figure cannot be trusted, each a sentence or nothing.

They are those of AutoAttack (Croce & Hein 2020, and its later releases): a model that answers
differently each time, gradients that are exactly zero, and a black-box attack that succeeds where
gradients failed.
"""

import numpy as np
import tensorflow as tf

from he_keras.attacks.attack import is_wrong
from he_keras.attacks.gradients import loss_and_gradient
from he_keras.attacks.victim import Victim
from he_keras.losses import cw_margin

_NUM_PROBES = 64
_REPEATS = 5
_RANDOM_CHANGE = 1e-4
_LATE_SHARE = 0.002


def model_warnings(model, images, labels, logit_scale="model", allows_random=False) -> list[str]:
    """Returns what speaks against attacking this model by gradients, from a few examples.

    Cost: 5 forward passes and 1 backward pass on at most 64 examples.

    Args:
        model: a `keras.Model` or a callable `images -> logits`.
        images: array `(n, ...)`; the first 64 are used.
        labels: array `(n,)`.
        logit_scale: see `Victim`.
        allows_random: the attack averages over randomness, so that this is no warning.
    """
    victim = Victim(model, logit_scale)
    images = tf.constant(images[:_NUM_PROBES])
    labels = tf.constant(labels[:_NUM_PROBES], tf.int32)
    found = []
    if not allows_random and _changes_between_passes(victim, images):
        found.append(
            "the model answers differently each time: single gradients mislead attacks; use "
            "autoattack-rand, or eot_samples > 1"
        )
    share = _zero_gradient_share(victim, images, labels)
    if share > 0:
        found.append(
            f"the gradient of the margin is exactly zero for {share:.0%} of the examples tried: "
            "gradient attacks cannot move them, only black-box and transfer attacks can"
        )
    return found


def late_warning(name: str, newly_broken: int, num_examples: int) -> list[str]:
    """Returns a warning where a black-box attack broke what gradient attacks had left."""
    if newly_broken <= _LATE_SHARE * num_examples:
        return []
    return [
        f"{name}, which uses no gradient, broke {newly_broken} examples that every gradient attack "
        "before it had left: the gradients are probably masked"
    ]


def _changes_between_passes(victim: Victim, images) -> bool:
    def directions():
        logits = victim.logits(images).numpy().astype(np.float64)
        return logits / (np.linalg.norm(logits, axis=1, keepdims=True) + 1e-10)

    first = directions()
    change = max(
        np.linalg.norm(directions() - first, axis=1).max(initial=0.0) for _ in range(_REPEATS - 1)
    )
    return bool(change > _RANDOM_CHANGE)


def _zero_gradient_share(victim: Victim, images, labels) -> float:
    """Share of the correctly classified examples whose margin has no gradient at all."""
    logits, _, gradient = loss_and_gradient(
        victim, lambda logits: cw_margin(logits, labels), images
    )
    right = ~is_wrong(logits, labels).numpy()
    is_zero = ~np.any(gradient.numpy(), axis=tuple(range(1, gradient.shape.rank)))
    return float(is_zero[right].mean()) if right.any() else 0.0
