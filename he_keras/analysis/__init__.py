"""Analyses of trained models: each measures numbers and draws a picture of them.

`get("gradient-norms", num_steps=10).run(subjects, folder)` runs one, and `names()` lists all. To
add one, add a file with a subclass of `Analysis` under `@register("its-name")`; nothing else
changes.
"""

from he_keras.analysis.analysis import Analysis, Subject
from he_keras.analysis.class_weights import class_weight_geometry
from he_keras.analysis.gradient_norms import weight_gradient_norms
from he_keras.analysis.hessian import HessianSpectrum, top_hessian_eigenvalues
from he_keras.analysis.linearity import local_linearity
from he_keras.analysis.loss_landscape import LossSurface, loss_surface
from he_keras.analysis.overfitting_monitor import gradient_alignment, overfitting_verdict
from he_keras.analysis.perturbations import perturbation_statistics
from he_keras.analysis.registry import from_text, get, names, register, summaries
from he_keras.analysis.weight_space import WeightSpace

__all__ = [
    "Analysis",
    "HessianSpectrum",
    "LossSurface",
    "Subject",
    "WeightSpace",
    "class_weight_geometry",
    "from_text",
    "get",
    "gradient_alignment",
    "local_linearity",
    "loss_surface",
    "names",
    "overfitting_verdict",
    "perturbation_statistics",
    "register",
    "summaries",
    "top_hessian_eigenvalues",
    "weight_gradient_norms",
]
