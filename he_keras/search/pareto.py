"""Clean against robust accuracy: the trials that no other trial beats in both."""

import math
import pathlib
from collections.abc import Sequence

from he_keras.drawing import COLOURS, new_figure, plain_axes, save_figure

_FIGURE_INCHES = (6.4, 4.6)
_LABEL_POINTS = 7
_LABEL_RIGHT_UP = (9, 6)
_LINE_SPACING = 1.4


def on_front(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Tells of each point whether no other is at least as good in both and better in one.

    Example:
        >>> from he_keras.search.pareto import on_front
        >>> on_front([(0.9, 0.3), (0.8, 0.5), (0.8, 0.4)])
        [True, True, False]
    """
    return [not any(_beats(other, point) for other in points) for point in points]


def draw_pareto(rows: Sequence[dict], winner: dict, path: pathlib.Path, objective: str) -> None:
    """Draws every completed trial, the front, and the trial that won."""
    done = [row for row in rows if row["status"] == "completed"]
    front = sorted((row for row in done if row["pareto"]), key=_point)
    figure = new_figure(*_FIGURE_INCHES)
    axes = figure.subplots()
    others = [row for row in done if not row["pareto"]]
    axes.plot(*_columns(others), "o", color="#999999", markersize=5, label="trials")
    axes.plot(
        *_columns(front), "-s", color=COLOURS[0], linewidth=1.2, markersize=6, label="Pareto front"
    )
    ring = {"markerfacecolor": "none", "markeredgewidth": 2, "markersize": 15}
    axes.plot(*_columns([winner]), "o", color=COLOURS[1], label="best_config.py", **ring)
    plain_axes(axes)
    # Room for the words at the points on the right and at the top.
    axes.margins(x=0.2, y=0.14)
    axes.set_xlabel("clean accuracy in %")
    axes.set_ylabel(f"robust accuracy in % ({objective})")
    axes.set_title("Trials on the validation split", fontsize=10)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    _annotate(axes, front)
    save_figure(figure, path)


def _annotate(axes, front: Sequence[dict]) -> None:
    """Writes the values at each point of the front, each label above those further to the right.

    Above and to the right of the front there is no other point.
    """
    axes.figure.draw_without_rendering()
    points_per_pixel = 72.0 / axes.figure.dpi
    bottom = -math.inf
    for place in sorted({_point(row) for row in front}, reverse=True):
        labels = [_label(row) for row in front if _point(row) == place]
        percent = tuple(100.0 * share for share in place)
        height = axes.transData.transform(percent)[1] * points_per_pixel
        lift = max(_LABEL_RIGHT_UP[1], bottom - height)
        axes.annotate(
            "\n".join(labels),
            percent,
            textcoords="offset points",
            xytext=(_LABEL_RIGHT_UP[0], lift),
            fontsize=_LABEL_POINTS,
            arrowprops={"arrowstyle": "-", "color": "#999999", "linewidth": 0.5, "relpos": (0, 0)},
        )
        bottom = height + lift + _LINE_SPACING * _LABEL_POINTS * len(labels)


def _beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one != other and one[0] >= other[0] and one[1] >= other[1]


def _point(row: dict) -> tuple[float, float]:
    return row["clean_accuracy"], row["robust_accuracy"]


def _columns(rows: Sequence[dict]) -> tuple[list[float], list[float]]:
    points = [_point(row) for row in rows]
    return [100.0 * clean for clean, _ in points], [100.0 * robust for _, robust in points]


def _label(row: dict) -> str:
    names = {"scale": "s", "margin": "m", "learning_rate": "lr", "weight_decay": "wd", "beta": "β"}
    return ", ".join(f"{short} {row[name]:.3g}" for name, short in names.items() if name in row)
