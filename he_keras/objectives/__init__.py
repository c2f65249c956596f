"""Training frameworks: what adversarial examples to craft and which loss to minimise.

To add one, add a file with a subclass of `Objective` that defines `craft` and `forward`, register a
name in it, and import it here.
"""

from he_keras.objectives.alp import ALP
from he_keras.objectives.awp import AWP
from he_keras.objectives.elle import ELLE
from he_keras.objectives.fast_adv_plus import FastAdvPlus
from he_keras.objectives.fast_at import FastAT
from he_keras.objectives.free_at import FreeAT
from he_keras.objectives.grad_align import GradAlign
from he_keras.objectives.llr import LLR
from he_keras.objectives.mart import MART
from he_keras.objectives.n_fgsm import NFGSM
from he_keras.objectives.objective import Objective, TrainingPass, TrainingStep
from he_keras.objectives.pgd_at import PGDAT
from he_keras.objectives.rat import RAT
from he_keras.objectives.registry import get, names, register
from he_keras.objectives.standard import Standard
from he_keras.objectives.trades import TRADES

__all__ = [
    "ALP",
    "AWP",
    "ELLE",
    "FastAT",
    "FastAdvPlus",
    "FreeAT",
    "GradAlign",
    "LLR",
    "MART",
    "NFGSM",
    "Objective",
    "PGDAT",
    "RAT",
    "Standard",
    "TRADES",
    "TrainingPass",
    "TrainingStep",
    "get",
    "names",
    "register",
]
