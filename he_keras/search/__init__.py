"""Search for scale, margin and other numbers with keras-tuner, on an objective no scale can fool.

`he_keras.experiment.run_search` searches over a configuration; here is what it is made of. The
models and their training come in as functions: this package knows keras-tuner, not experiments.
"""

from he_keras.search.scale_free import OBJECTIVES, scale_free_attack
from he_keras.search.settings import TUNERS, SearchSettings, role
from he_keras.search.space import NAMES, Space
from he_keras.search.trials import best, collect, read_tables, write_tables
from he_keras.search.tuner import PROJECT, join, make_hypermodel, make_tuner, run_trials

__all__ = [
    "NAMES",
    "OBJECTIVES",
    "PROJECT",
    "TUNERS",
    "SearchSettings",
    "Space",
    "best",
    "collect",
    "join",
    "make_hypermodel",
    "make_tuner",
    "read_tables",
    "role",
    "run_trials",
    "scale_free_attack",
    "write_tables",
]
