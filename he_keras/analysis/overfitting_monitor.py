"""Has single-step training collapsed? Catastrophic overfitting, from the history and the model.

Papers: Wong et al. 2020, "Fast is better than free": within some hundred steps a model learns to
mislead the single step it is trained on. Then any attack of several steps breaks it. Andriushchenko
and Flammarion 2020, "Understanding and improving fast adversarial training": then the gradient at
an image and the gradient near it are nearly orthogonal.

The evidence, and the thresholds that `overfitting_verdict` holds it against:

* the model at hand: accuracy under one step (FGSM) and under many (PGD), and the mean cosine of
  `grad(x)` and `grad(x + u)`, u uniform in the ball;
* the columns of history.csv that hold robust accuracy, epoch by epoch.

Deviations: `x + u` is clipped to the pixels' bounds.
"""

import csv
import dataclasses
import math
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from he_keras.analysis.analysis import Analysis, Subject, batches
from he_keras.analysis.registry import register
from he_keras.arguments import check_positive_integer, check_seed
from he_keras.attacks import FGSM, PGD, Victim, check_examples
from he_keras.attacks.framework.gradients import loss_and_gradient
from he_keras.drawing import draw_bars, legend_above, plain_axes, style
from he_keras.losses import cross_entropy
from he_keras.objectives.grad_align import cosine_distance
from he_keras.threat import ThreatModel

VERDICTS = ("sound", "at risk", "collapsed")
#: Robust accuracy of every epoch, if the run has it, and what the picture calls it. The first
#: column is drawn and judged first.
ROBUST_COLUMNS = {
    "val_robust_accuracy": "validation",
    "guard_accuracy": "guard",
    "guard_accuracy_min": "guard, lowest",
}
# Smaller differences of accuracies are noise.
_SMALLEST_FALL = 0.05
# The share of what FGSM leaves correct that PGD leaves correct too.
_COLLAPSED_SHARE, _RISK_SHARE = 0.5, 0.8
# Measured: 0.97 in sound models of CIFAR-10 at 8/255, and 0.4 in collapsed models of 8x8 digits.
# The paper sees values near 0 after the collapse of larger models.
_COLLAPSED_COSINE, _RISK_COSINE = 0.2, 0.5
# A drop from the best epoch, as a share of the best: robust overfitting alone costs less than half.
_COLLAPSED_DROP, _RISK_DROP = 0.5, 0.25


def gradient_alignment(
    model, images, labels, threat: ThreatModel, batch_size: int = 128, seed: int = 0
) -> np.ndarray:
    """Returns for each image the cosine of `grad(x)` and `grad(x + u)`, u uniform in the ball.

    The gradient is that of the cross-entropy in the pixels. An image where either is zero has no
    cosine: NaN. Cost per image: two forward and backward passes.

    Args:
        model: a `keras.Model` or a callable `images -> logits`.
        images: images within the threat model's bounds.
        labels: integer labels.
        threat: the threat model.
        batch_size: images in a pass.
        seed: seed of u, which is drawn from (seed, position of the image).

    Example:
        >>> import he_keras as he, numpy as np, tensorflow as tf
        >>> from he_keras.analysis import gradient_alignment
        >>> linear = lambda images: images @ tf.constant([[1.0, 0.0], [0.0, 1.0]])
        >>> image, label = np.array([[0.6, 0.4]], "float32"), np.array([0])
        >>> gradient_alignment(linear, image, label, he.ThreatModel("linf", 0.1)).round(3)
        array([1.], dtype=float32)
    """
    images, labels = check_examples(threat, images, labels)
    check_positive_integer("batch_size", batch_size)
    check_seed(seed)
    victim = Victim(model)

    @tf.function(reduce_retracing=True)
    def cosines(x, y, seeds):
        def gradient(place):
            return loss_and_gradient(victim, lambda logits: cross_entropy(logits, y), place)[2]

        here, beside = gradient(x), gradient(threat.random_start(x, seeds))
        axes = list(range(1, x.shape.rank))
        is_zero = tf.reduce_all(here == 0.0, axis=axes) | tf.reduce_all(beside == 0.0, axis=axes)
        cosine = 1.0 - cosine_distance(here, beside)
        return tf.where(is_zero, tf.constant(math.nan, cosine.dtype), cosine)

    parts = [cosines(*batch).numpy() for batch in batches(images, labels, batch_size, seed)]
    return np.concatenate(parts)


def overfitting_verdict(
    single_step: float,
    multi_step: float,
    alignment: float,
    history: Mapping[str, Sequence[float]] | None = None,
) -> tuple[str, list[str]]:
    """Returns "sound", "at risk" or "collapsed", and the reasons.

    Collapsed: the many-step accuracy is below half of the single-step accuracy, or the mean cosine
    is below 0.2. At risk: the accuracy is below four fifths, or the cosine below 0.5. Or robust
    accuracy in the history fell by more than a quarter from its best epoch. After a fall by more
    than half, the training had collapsed, perhaps only for a while or before the weights were put
    back. Accuracies closer than 0.05 count as equal. A sound model may still collapse later.

    Args:
        single_step: accuracy under one step of length epsilon, 0..1.
        multi_step: accuracy under PGD, 0..1.
        alignment: mean of `gradient_alignment`.
        history: robust accuracies by epoch, for each column.

    Example:
        >>> from he_keras.analysis import overfitting_verdict
        >>> overfitting_verdict(0.80, 0.02, 0.05)[0]
        'collapsed'
    """
    found = []
    share = multi_step / single_step if single_step - multi_step > _SMALLEST_FALL else 1.0
    if share < _RISK_SHARE:
        reason = f"PGD leaves {multi_step:.1%} correct where FGSM leaves {single_step:.1%}"
        found.append((1 + (share < _COLLAPSED_SHARE), reason))
    if math.isnan(alignment) or alignment < _RISK_COSINE:
        reason = f"gradients {alignment:.2f} aligned within the ball"
        found.append((1 + (not alignment >= _COLLAPSED_COSINE), reason))
    for column, values in (history or {}).items():
        found += _fall(column, np.array(values, float))
    worst = max((level for level, _ in found), default=0)
    return VERDICTS[worst], [reason for _, reason in found]


def _fall(column: str, values: np.ndarray) -> list[tuple[int, str]]:
    """The largest fall from the best value so far, if it is large; it is never proof alone."""
    known = np.flatnonzero(np.isfinite(values))
    if not known.size:
        return []
    best = np.maximum.accumulate(values[known])
    fallen = best - values[known]
    falls = np.divide(fallen, best, out=np.zeros(len(best)), where=fallen > _SMALLEST_FALL)
    place = int(falls.argmax())
    if falls[place] <= _RISK_DROP:
        return []
    how = "collapsed" if falls[place] > _COLLAPSED_DROP else "fell"
    values_text = f"from {best[place]:.1%} to {values[known][place]:.1%}"
    return [(1, f"{column} {how} {values_text} in epoch {known[place] + 1}")]


def read_history(folder: pathlib.Path | None) -> dict[str, list[float]]:
    """Returns the columns of a run's history.csv, NaN where a cell is empty; {} without a file."""
    path = None if folder is None else pathlib.Path(folder) / "history.csv"
    if path is None or not path.is_file():
        return {}
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    return {name: [_number(row[name]) for row in rows] for name in (rows[0] if rows else {})}


def _number(text: str | None) -> float:
    try:
        return float(text or "nan")
    except ValueError:
        return math.nan


@register("overfitting-monitor")
@dataclasses.dataclass(eq=False)
class OverfittingMonitor(Analysis):
    """Tells catastrophic overfitting: FGSM against PGD, gradient alignment, and the history.

    Cost for each example: num_steps + 3 forward and backward passes and three forward passes.

    Args:
        num_steps: steps of PGD, each of 2.5 * epsilon / num_steps.
        batch_size: images in a pass.
        seed: seed of the random starts and of the noise.
    """

    num_steps: int = 20
    batch_size: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        check_positive_integer("num_steps", self.num_steps)
        check_positive_integer("batch_size", self.batch_size)
        check_seed(self.seed)

    def measure_one(self, subject: Subject) -> dict:
        """Returns accuracies, alignment, history and verdict."""
        data = subject.model, subject.images, subject.labels
        settings = {"batch_size": self.batch_size, "seed": self.seed}
        single = FGSM(subject.threat, **settings)(*data)
        multi = PGD(subject.threat, self.num_steps, **settings)(*data)
        cosines = gradient_alignment(*data, subject.threat, **settings)
        has_gradient = np.isfinite(cosines)
        alignment = float(cosines[has_gradient].mean()) if has_gradient.any() else math.nan
        history = read_history(subject.folder)
        robust = {name: history[name] for name in ROBUST_COLUMNS if name in history}
        judged, reasons = overfitting_verdict(
            single.robust_accuracy, multi.robust_accuracy, alignment, robust
        )
        return {
            "clean": float((~subject.scored(subject.images).wrong).mean()),
            "single_step": single.robust_accuracy,
            "multi_step": multi.robust_accuracy,
            "gap": single.robust_accuracy - multi.robust_accuracy,
            "alignment": alignment,
            "zero_gradients": float((~has_gradient).mean()),
            "verdict": judged,
            "reasons": reasons,
            "history": history,
        }

    def table(self, numbers: Mapping) -> str:
        """Returns the verdicts and what they rest on."""
        lines = []
        for name, entry in numbers.items():
            accuracies = (
                f"clean {entry['clean']:.1%}, FGSM {entry['single_step']:.1%}, "
                f"PGD-{self.num_steps} {entry['multi_step']:.1%}"
            )
            reasons = f" ({'; '.join(entry['reasons'])})" if entry["reasons"] else ""
            lines.append(
                f"{name}: {entry['verdict']}{reasons}; {accuracies}, "
                f"alignment {_shown(entry['alignment'])}"
            )
        return "\n".join(lines)

    def draw(self, numbers: Mapping, figure) -> None:
        """Draws robust accuracy by epoch on the left, and the model at hand on the right."""
        figure.set_size_inches(5.0 + 2.0 * len(numbers), 4.4)
        figure.suptitle("Catastrophic overfitting: does PGD break what FGSM cannot?", fontsize=10)
        epochs, bars = figure.subplots(1, 2, width_ratios=[3.0, 1.4 * len(numbers) + 1.0])
        for number, (name, entry) in enumerate(numbers.items()):
            _draw_history(epochs, name, entry["history"], number)
        epochs.set_xlabel("epoch")
        epochs.set_ylabel("accuracy in %")
        epochs.set_ylim(0, None)
        plain_axes(epochs)
        if epochs.lines:
            epochs.set_title("robust accuracy (thin: on the examples trained on)", fontsize=9)
            epochs.legend(fontsize=7, edgecolor="none")
        else:
            epochs.set_title("no history.csv", fontsize=9)
        labels = {"clean": "clean", "single_step": "FGSM", "multi_step": f"PGD-{self.num_steps}"}
        groups = [
            f"{name}\nalignment {_shown(entry['alignment'])}\n{entry['verdict']}"
            for name, entry in numbers.items()
        ]
        series = {
            label: [100.0 * entry[key] for entry in numbers.values()]
            for key, label in labels.items()
        }
        draw_bars(bars, groups, series)
        bars.set_ylabel("accuracy in %")
        bars.set_ylim(0, 1.1 * max(1.0, *(max(heights) for heights in series.values())))
        bars.tick_params(axis="x", labelsize=8)
        legend_above(bars, len(series))


def _draw_history(axes, name: str, history: Mapping, number: int) -> None:
    """One colour for a run: robust accuracies with markers, that of training as a thin line."""
    shown = [column for column in ROBUST_COLUMNS if column in history]
    for place, column in enumerate(shown):
        values = 100.0 * np.array(history[column], float)
        look = {**style(number), "linestyle": ("-", "--", ":")[place]}
        label = f"{name}, {ROBUST_COLUMNS[column]}"
        axes.plot(range(1, len(values) + 1), values, markersize=4, label=label, **look)
    if shown and "accuracy" in history:
        values = 100.0 * np.array(history["accuracy"], float)
        look = {"color": style(number)["color"], "linewidth": 0.8, "alpha": 0.7}
        axes.plot(range(1, len(values) + 1), values, label="_training", **look)


def _shown(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f}"
