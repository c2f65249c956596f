"""The attacks that may decide which scale is best: those that no scale can fool.

The gradient of the cross-entropy vanishes where logits are large. So a search that maximises
accuracy under an attack on the cross-entropy finds the largest scale. Its model is not more robust,
but harder to attack in this one way. The margin is the true logit minus the largest other one. The
DLR loss is the margin over the spread of the logits. The direction of their gradients does not
depend on the scale.
"""

from he_keras import attacks
from he_keras.attacks.framework.attack import Attack
from he_keras.threat import ThreatModel

# For each beginning of a name: the beginning of the attack's name, and its options.
_ATTACKS = {
    "margin-pgd": ("pgd", {"loss": "cw"}),
    "dlr-pgd": ("pgd", {"loss": "dlr"}),
    "apgd-dlr": ("apgd-dlr", {}),
}
OBJECTIVES = tuple(f"{name}-K" for name in _ATTACKS)


def scale_free_attack(objective: str, threat: ThreatModel, num_classes: int, seed: int) -> Attack:
    """Returns the attack of an objective such as "margin-pgd-20" (K steps).

    Args:
        objective: "margin-pgd-K", "dlr-pgd-K" or "apgd-dlr-K".
        threat: the threat model.
        num_classes: classes of the model; the DLR loss needs three.
        seed: seed of the random starts.

    Example:
        >>> import he_keras as he
        >>> from he_keras.search import scale_free_attack
        >>> scale_free_attack("margin-pgd-20", he.ThreatModel(), num_classes=10, seed=0).loss
        'cw'
    """
    base, _, steps = str(objective).rpartition("-")
    if base not in _ATTACKS or not steps.isdecimal() or int(steps) < 1:
        raise ValueError(
            f"Unknown objective of a search; expected one of {', '.join(OBJECTIVES)} (K: steps; an "
            "attack on the cross-entropy would reward large scales, which hide the gradient); "
            f"received objective={objective!r}"
        )
    name, options = _ATTACKS[base]
    attack = attacks.get(f"{name}-{steps}", threat, seed=seed, **{"name": objective, **options})
    needed = max(attack.min_classes, 3 if "dlr" in base else 2)
    if num_classes < needed:
        raise ValueError(
            f"Too few classes for this objective; expected at least {needed} for {objective}, or "
            f"objective='margin-pgd-{steps}'; received head.num_classes={num_classes}"
        )
    return attack
