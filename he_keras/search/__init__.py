"""Search for scale, margin and other numbers with keras-tuner, on an objective no scale can fool.

`he_keras.experiment.run_search` searches over a configuration; this package has the parts that it
is made of. Models and their training come in as functions: this package knows keras-tuner, and
nothing of experiments.
"""

from he_keras.search.scale_free import OBJECTIVES, scale_free_attack
from he_keras.search.settings import PROJECT, TUNERS, SearchSettings, role
from he_keras.search.space import NAMES, Space
from he_keras.search.trials import best, collect, read_tables, write_tables

# These import keras-tuner, which takes seconds.
_OF_THE_TUNER = ("join", "make_hypermodel", "make_tuner", "run_trials")

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


def __getattr__(name: str):
    if name in _OF_THE_TUNER:
        from he_keras.search import tuner

        return getattr(tuner, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
