"""Pictures of adversarial perturbations, magnified, and numbers on how they look.

Paper: "Boosting Adversarial Training with Hypersphere Embedding", Fig. 2 (right): perturbations of
a standardly trained network look like noise. Those of adversarially trained ones follow the object
in the image, and more so with HE.

That is a statement about a few pictures, so two numbers over all images are given with them. One
says how much a pixel's change resembles its neighbours' (0 for noise). The other says how much of
the change lies at the image's edges.
"""

import base64
import dataclasses
import io
import math
from collections.abc import Mapping, Sequence

import numpy as np

from he_keras.analysis.analysis import Analysis, Subject
from he_keras.analysis.registry import register
from he_keras.arguments import check_positive_integer, check_seed
from he_keras.drawing import png

_CELL = 1.25
_FEWEST_PIXELS = 2


def perturbation_statistics(images: np.ndarray, x_adv: np.ndarray) -> dict[str, float]:
    """Returns how perturbations look, averaged over the images.

    "neighbour_correlation" is the correlation of a pixel's change with the change of the pixel to
    the right of it and below it. "edge_correlation" compares the size of the change with the size
    of the image's own differences at that place. Both are summed over the channels.

    Args:
        images: clean images, `(n, height, width, channels)`.
        x_adv: adversarial images of the same shape.

    Example:
        >>> import numpy as np
        >>> from he_keras.analysis import perturbation_statistics
        >>> images = np.zeros((1, 4, 4, 1))
        >>> chessboard = 0.1 * (-1.0) ** np.indices((4, 4)).sum(0)[None, ..., None]
        >>> round(perturbation_statistics(images, images + chessboard)["neighbour_correlation"], 6)
        -1.0
    """
    changes = np.asarray(x_adv, np.float64) - np.asarray(images, np.float64)
    neighbours = [_neighbour_correlation(change) for change in changes]
    edges = [
        _correlation(_edges(np.asarray(image, np.float64)), np.abs(change).sum(axis=-1)[:-1, :-1])
        for image, change in zip(images, changes, strict=True)
    ]
    return {
        "neighbour_correlation": _mean_of_finite(neighbours),
        "edge_correlation": _mean_of_finite(edges),
        "mean_absolute_change": float(np.abs(changes).mean()),
    }


@register("perturbations")
@dataclasses.dataclass(eq=False)
class Perturbations(Analysis):
    """Magnified adversarial perturbations of several models side by side (HE paper, Fig. 2 right).

    Shows the first images that every model classifies correctly (if none: the first ones). Grey
    means no change; the largest change of each picture reaches black or white.

    Args:
        num_images: images in the picture.
        num_steps: steps of PGD, each of 2.5 * epsilon / num_steps from a uniform start.
        seed: seed of the random start.
    """

    num_images: int = 5
    num_steps: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        check_positive_integer("num_images", self.num_images)
        check_positive_integer("num_steps", self.num_steps)
        check_seed(self.seed)

    def measure(self, subjects: Sequence[Subject]) -> dict:
        """Returns pictures as PNG in base64, verdicts, and the statistics over all images."""
        first = subjects[0]
        for subject in subjects:
            _check_same_images(subject, first)
        clean = [subject.scored(subject.images) for subject in subjects]
        x_advs = [subject.last_iterates(self.num_steps, self.seed) for subject in subjects]
        all_right = ~np.any([each.wrong for each in clean], axis=0)
        shown = np.flatnonzero(all_right)[: self.num_images]
        shown = shown if len(shown) else np.arange(len(first.labels))[: self.num_images]
        low, high = first.threat.bounds
        models = {
            subject.name: _shown_and_measured(subject, x_adv, shown)
            for subject, x_adv in zip(subjects, x_advs, strict=True)
        }
        return {
            "positions": shown,
            "labels": first.labels[shown],
            "images": [png((first.images[row] - low) / (high - low)) for row in shown],
            "models": models,
        }

    def draw(self, numbers: Mapping, figure) -> None:
        """Draws a row for each image: the image, then its perturbation for each model."""
        models = numbers["models"]
        num_rows, num_columns = len(numbers["images"]), 1 + len(models)
        figure.set_size_inches(max(1.75 * num_columns, 3.6), 0.8 + _CELL * num_rows)
        panels = figure.subplots(num_rows, num_columns, squeeze=False)
        for row, label in enumerate(numbers["labels"]):
            _show(panels[row, 0], numbers["images"][row])
            panels[row, 0].set_ylabel(f"class {label}", fontsize=8)
            for column, entry in enumerate(models.values(), 1):
                _show(panels[row, column], entry["perturbations"][row])
                panels[row, column].set_ylabel(f"-> {entry['predictions'][row]}", fontsize=8)
        panels[0, 0].set_title("image", fontsize=8)
        for column, (name, entry) in enumerate(models.items(), 1):
            title = f"{name}\n{_magnification(entry['magnification'])}"
            panels[0, column].set_title(title, fontsize=8)
        figure.suptitle("Perturbations, and the class they lead to", fontsize=10)

    def table(self, numbers: Mapping) -> str:
        """Returns the statistics of each model."""
        return "\n".join(
            f"{name}: correlation of neighbouring changes {entry['neighbour_correlation']:.3f}, "
            f"of changes and edges {entry['edge_correlation']:.3f}, mean change "
            f"{entry['mean_absolute_change']:.4f}"
            for name, entry in numbers["models"].items()
        )


def _check_same_images(subject: Subject, first: Subject) -> None:
    shape = subject.images.shape
    if len(shape) != 4 or shape[-1] not in (1, 3) or min(shape[1:3]) < _FEWEST_PIXELS:
        raise ValueError(
            "These cannot be shown; expected grey or colour images (n, height, width, 1 or 3); "
            f"received shape {shape} for {subject.name}"
        )
    if shape != first.images.shape or not np.array_equal(subject.images, first.images):
        raise ValueError(
            "Pictures side by side need the same images; expected one data set for all models; "
            f"received other images for {subject.name} than for {first.name}"
        )


def _shown_and_measured(subject: Subject, x_adv: np.ndarray, shown: np.ndarray) -> dict:
    changes = x_adv[shown].astype(np.float64) - subject.images[shown]
    largest = np.abs(changes).max(axis=(1, 2, 3))
    safe = np.where(largest > 0, largest, 1.0)
    pictures = 0.5 + 0.5 * changes / safe[:, None, None, None]
    answers = subject.scored(x_adv)
    return {
        "perturbations": [png(each) for each in pictures],
        "predictions": answers.prediction[shown],
        "magnification": 0.5 / safe,
        "robust_accuracy": float(1.0 - answers.wrong.mean()),
        **perturbation_statistics(subject.images, x_adv),
    }


def _edges(image: np.ndarray) -> np.ndarray:
    """Size of the differences to the right and below, `(height - 1, width - 1)`."""
    right = np.abs(np.diff(image, axis=1))[:-1]
    below = np.abs(np.diff(image, axis=0))[:, :-1]
    return (right + below).sum(axis=-1)


def _neighbour_correlation(change: np.ndarray) -> float:
    sideways = change[:, :-1].ravel(), change[:, 1:].ravel()
    downwards = change[:-1].ravel(), change[1:].ravel()
    pairs = [np.concatenate(parts) for parts in zip(sideways, downwards, strict=True)]
    return _correlation(*pairs)


def _correlation(first: np.ndarray, second: np.ndarray) -> float:
    first, second = first.ravel() - first.mean(), second.ravel() - second.mean()
    length = math.sqrt((first @ first) * (second @ second))
    return float(first @ second / length) if length > 0 else math.nan


def _mean_of_finite(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return float(np.mean(finite)) if finite else math.nan


def _magnification(factors: Sequence[float]) -> str:
    low, high = min(factors), max(factors)
    return f"x {low:.0f}" if high - low < 1.0 else f"x {low:.0f} to {high:.0f}"


def _show(axes, picture: str) -> None:
    from PIL import Image

    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(picture))))
    axes.imshow(pixels, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])
