"""Analyses of trained models: numbers and a picture each, by which the papers explain themselves.

`get("gradient-norms", num_steps=10).run(subjects, folder)` measures, `names()` lists them. To add
one, add a file with a subclass of `Analysis` under `@register("its-name")`; nothing else changes.
"""

from he_keras.analysis.analysis import Analysis, Subject
from he_keras.analysis.class_weights import class_weight_geometry
from he_keras.analysis.gradient_norms import weight_gradient_norms
from he_keras.analysis.perturbations import perturbation_statistics
from he_keras.analysis.registry import from_text, get, names, register, summaries

__all__ = [
    "Analysis",
    "Subject",
    "class_weight_geometry",
    "from_text",
    "get",
    "names",
    "perturbation_statistics",
    "register",
    "summaries",
    "weight_gradient_norms",
]
