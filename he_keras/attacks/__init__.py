"""Attacks on any `keras.Model` or callable `images -> logits`.

`get("pgd-20", threat)` builds one by name, `names()` lists them. To add an attack, add a file
with a subclass of `Attack` that defines `run`, register a name in it, and import it here.
"""

from he_keras.attacks.attack import Attack
from he_keras.attacks.checks import check_examples
from he_keras.attacks.ensemble import Ensemble, EnsembleResult
from he_keras.attacks.projected_gradient import (
    BIM,
    FGSM,
    MIM,
    PGD,
    AdaptivePGD,
    CWLinf,
    ProjectedGradient,
)
from he_keras.attacks.registry import get, names, register
from he_keras.attacks.result import AttackResult, Crafted
from he_keras.attacks.victim import Victim

__all__ = [
    "AdaptivePGD",
    "Attack",
    "AttackResult",
    "BIM",
    "CWLinf",
    "Crafted",
    "Ensemble",
    "EnsembleResult",
    "FGSM",
    "MIM",
    "PGD",
    "ProjectedGradient",
    "Victim",
    "check_examples",
    "get",
    "names",
    "register",
]
