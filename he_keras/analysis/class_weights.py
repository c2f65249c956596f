"""Norms of the head's class weights, and the angles between them.

Paper: "Boosting Adversarial Training with Hypersphere Embedding", Sec. 3.4. Without weight
normalisation, the weights of classes with more or easier examples grow, and adversarial examples
pull the weights of similar classes together. With it only directions count, and they spread.
"""

import math
from collections.abc import Mapping

import numpy as np

from he_keras.analysis.analysis import Analysis, Subject
from he_keras.analysis.registry import register
from he_keras.attacks import Victim
from he_keras.drawing import COLOURS, draw_cells, plain_axes

_MOST_LABELLED_CLASSES = 20
_BINS = 20


def class_weight_geometry(kernel: np.ndarray) -> dict:
    """Returns norms and pairwise angles of class weights.

    Args:
        kernel: the head's kernel, `(features, classes)`.

    Returns:
        "norms" `(classes,)`, "angles" in degrees `(classes, classes)`, NaN for a zero vector.

    Example:
        >>> import numpy as np
        >>> from he_keras.analysis import class_weight_geometry
        >>> geometry = class_weight_geometry(np.array([[3.0, 0.0], [0.0, 4.0]]))
        >>> geometry["norms"].tolist(), geometry["angles"].round(6).tolist()
        ([3.0, 4.0], [[0.0, 90.0], [90.0, 0.0]])
    """
    kernel = np.asarray(kernel, np.float64)
    norms = np.linalg.norm(kernel, axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        directions = kernel / norms
    cosines = directions.T @ directions
    angles = np.degrees(np.arccos(np.clip(cosines, -1.0, 1.0)))
    # Rounding leaves a weight some 1e-6 degrees away from itself.
    np.fill_diagonal(angles, np.where(norms > 0, 0.0, np.nan))
    return {"norms": norms, "angles": angles}


def simplex_angle(num_classes: int) -> float:
    """The angle in degrees between any two directions if all are as far apart as possible."""
    return math.degrees(math.acos(-1.0 / (num_classes - 1)))


@register("class-weights")
class ClassWeights(Analysis):
    """Norms of the head's class weights and the angles between them (HE paper, Sec. 3.4).

    The head must have a kernel: `Dense` or `CosineHead`. If the head normalises its weights, their
    norms change no prediction. The analysis needs no pass through the network.
    """

    def measure_one(self, subject: Subject) -> dict:
        """Returns norms, angles and their summaries."""
        return _summarized(Victim(subject.model).head_weights()[0].numpy())

    def draw(self, numbers: Mapping, figure) -> None:
        """Draws for each subject its angles as a heat map and a histogram, and its norms."""
        panels = figure.subplots(
            3, len(numbers), squeeze=False, sharey="row", height_ratios=(2.2, 1, 1)
        )
        figure.set_size_inches(4.0 * len(numbers) + 0.6, 8.0)
        angles = [np.array(entry["angles"], float) for entry in numbers.values()]
        low = min(_smallest_pair(each) for each in angles)
        high = max(np.nanmax(each) for each in angles)
        for column, (name, entry) in enumerate(numbers.items()):
            image = _draw_heat_map(panels[0, column], angles[column], (low, high))
            _draw_histogram(panels[1, column], angles[column], (low, high))
            _draw_norms(panels[2, column], np.array(entry["norms"], float))
            panels[0, column].set_title(name, fontsize=9)
        figure.colorbar(image, ax=list(panels[0]), label="angle in degrees", shrink=0.85)
        figure.suptitle("Class weights: angles between them and norms", fontsize=10)

    def table(self, numbers: Mapping) -> str:
        """Returns the ranges of angles and norms for each subject."""
        return "\n".join(
            f"{name}: angles {entry['smallest_angle']:.1f} to {entry['largest_angle']:.1f} degrees,"
            f" mean {entry['mean_angle']:.1f} (all equal at {entry['simplex_angle']:.1f}); "
            f"norms {min(entry['norms']):.3f} to {max(entry['norms']):.3f}"
            for name, entry in numbers.items()
        )


def _summarized(kernel: np.ndarray) -> dict:
    geometry = class_weight_geometry(kernel)
    between = _pairs(geometry["angles"])
    norms = geometry["norms"]
    return {
        **geometry,
        "smallest_angle": between.min(),
        "mean_angle": between.mean(),
        "largest_angle": between.max(),
        "simplex_angle": simplex_angle(len(norms)),
        "norm_spread": norms.std() / norms.mean() if norms.any() else math.nan,
    }


def _pairs(angles: np.ndarray) -> np.ndarray:
    """The angle of every pair of classes, once."""
    return angles[np.triu_indices(len(angles), k=1)]


def _smallest_pair(angles: np.ndarray) -> float:
    return float(np.nanmin(_pairs(angles)))


def _draw_heat_map(axes, angles: np.ndarray, limits):
    between = np.where(np.eye(len(angles), dtype=bool), np.nan, angles)
    is_small = len(angles) <= _MOST_LABELLED_CLASSES
    image = draw_cells(axes, between, limits, "{:.0f}" if is_small else "", fontsize=6)
    axes.set_xlabel("class")
    axes.set_ylabel("class")
    if is_small:
        axes.set_xticks(range(len(angles)))
        axes.set_yticks(range(len(angles)))
    return image


def _draw_histogram(axes, angles: np.ndarray, limits) -> None:
    between = _pairs(angles)
    axes.hist(between[np.isfinite(between)], bins=_BINS, range=limits, color=COLOURS[0])
    simplex = simplex_angle(len(angles))
    axes.axvline(simplex, color="black", linestyle="--", linewidth=1)
    axes.set_xlabel(f"angle in degrees (dashed: simplex, {simplex:.1f})", fontsize=8)
    axes.set_ylabel("pairs of classes", fontsize=8)
    plain_axes(axes)


def _draw_norms(axes, norms: np.ndarray) -> None:
    axes.bar(range(len(norms)), norms, color=COLOURS[1], width=0.7)
    axes.set_xlabel("class", fontsize=8)
    axes.set_ylabel("norm of weights", fontsize=8)
    if len(norms) <= _MOST_LABELLED_CLASSES:
        axes.set_xticks(range(len(norms)))
    plain_axes(axes)
