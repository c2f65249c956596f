"""Attacks on any `keras.Model` or callable `images -> logits`.

`get("pgd-20", threat)` builds one by name, `names()` lists them. To add an attack, add a file
with a subclass of `Attack` that defines `run`, register a name in it, and import it here.
"""

from he_keras.attacks.apgd import APGD, APGDCE, APGDDLR
from he_keras.attacks.apgd_targeted import APGDTargeted
from he_keras.attacks.autoattack import (
    AutoAttack,
    AutoAttackFastFirst,
    AutoAttackPlus,
    AutoAttackRand,
)
from he_keras.attacks.carlini_wagner import CarliniWagnerL2
from he_keras.attacks.cleverhans_bridge import (
    Cleverhans,
    CleverhansCWL2,
    CleverhansFGSM,
    CleverhansIterated,
)
from he_keras.attacks.deepfool import DeepFool
from he_keras.attacks.fab import FAB, FABT
from he_keras.attacks.fast import Fast, Screen
from he_keras.attacks.feature_attack import FeatureAttack
from he_keras.attacks.feature_norm_pgd import FeatureNormPGD
from he_keras.attacks.framework.attack import Attack
from he_keras.attacks.framework.ensemble import Ensemble, EnsembleResult
from he_keras.attacks.framework.result import AttackResult, Crafted
from he_keras.attacks.framework.victim import Victim
from he_keras.attacks.gradient_estimation import NES, SPSA, GradientEstimation
from he_keras.attacks.multi_targeted import MultiTargeted
from he_keras.attacks.projected_gradient import (
    BIM,
    FGSM,
    MIM,
    PGD,
    AdaptivePGD,
    CWLinf,
    ProjectedGradient,
    TradesKL,
)
from he_keras.attacks.rays import RayS
from he_keras.attacks.registry import check_name, get, names, register
from he_keras.attacks.square import Square
from he_keras.attacks.transfer import Transfer
from he_keras.attacks.zeroth_order import ZOO
from he_keras.threat import check_examples

__all__ = [
    "APGD",
    "APGDCE",
    "APGDDLR",
    "APGDTargeted",
    "AdaptivePGD",
    "Attack",
    "AttackResult",
    "AutoAttack",
    "AutoAttackFastFirst",
    "AutoAttackPlus",
    "AutoAttackRand",
    "BIM",
    "CWLinf",
    "CarliniWagnerL2",
    "Cleverhans",
    "CleverhansCWL2",
    "CleverhansFGSM",
    "CleverhansIterated",
    "Crafted",
    "DeepFool",
    "Ensemble",
    "EnsembleResult",
    "FAB",
    "FABT",
    "FGSM",
    "Fast",
    "FeatureAttack",
    "FeatureNormPGD",
    "GradientEstimation",
    "MIM",
    "MultiTargeted",
    "NES",
    "PGD",
    "ProjectedGradient",
    "RayS",
    "SPSA",
    "Screen",
    "Square",
    "TradesKL",
    "Transfer",
    "Victim",
    "ZOO",
    "check_examples",
    "check_name",
    "get",
    "names",
    "register",
]
