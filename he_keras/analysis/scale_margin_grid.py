"""Accuracies over the scale s and the margin m of the head.

Paper: "Boosting Adversarial Training with Hypersphere Embedding", Table 9: TRADES+HE with s in 1,
5, 10, 15, 20 at m = 0.2, and with m from 0 to 0.5 at s = 15, clean and under PGD-20.

The paper attacks raw cosines. That attack is weak where the scale is large. So a part of what a
larger scale seems to gain is only the attack's failure. The attack on the margin shows how much.
"""

import collections
from collections.abc import Mapping, Sequence

from he_keras.analysis.analysis import Subject
from he_keras.analysis.compared_runs import (
    COLUMNS,
    ComparedRuns,
    averaged,
    column_label,
    head_label,
    interval_lengths,
    require_different,
    setting,
    table_header,
    table_row,
)
from he_keras.analysis.registry import register
from he_keras.drawing import draw_curve, legend_below, plain_axes

_SYMBOLS = {"scale": "s", "margin": "m"}


@register("scale-margin-grid")
class ScaleMarginGrid(ComparedRuns):
    """Clean and robust accuracy over the head's scale s and margin m (HE paper, Table 9).

    Takes run folders of HE heads. The picture has two curves. One is over the scale, at the margin
    that most runs share. The other is over the margin, at the scale that most runs share. Runs that
    differ in the seed only are averaged. See `compared_runs` for the three attacks.

    Args:
        num_steps: steps of the evaluating attacks, each of 0.003 / 0.031 of epsilon.
        seed: seed of the random starts.
    """

    def measure(self, subjects: Sequence[Subject]) -> dict:
        """Returns the accuracies of each run, and of each pair of scale and margin."""
        pairs = [_scale_and_margin(subject) for subject in subjects]
        require_different(subjects, pairs, "head.scale or head.margin")
        distinctions = [{"scale": scale, "head_margin": margin} for scale, margin in pairs]
        runs, numbers = self.measure_runs(subjects, distinctions)
        cells = averaged(runs, ["scale", "head_margin"])
        cells.sort(key=lambda cell: (cell["scale"], cell["head_margin"]))
        return {**numbers, "cells": cells}

    def draw(self, numbers: Mapping, figure) -> None:
        """Draws the accuracies over each of the two settings that varies."""
        curves = [
            (varied, fixed, curve)
            for varied, fixed in (("scale", "head_margin"), ("head_margin", "scale"))
            if len(curve := _curve(numbers["cells"], varied, fixed)) > 1
        ]
        # Runs of which no two share a scale or a margin: over the scale, as they are.
        curves = curves or [("scale", "head_margin", list(numbers["cells"]))]
        panels = figure.subplots(1, len(curves), sharey=True, squeeze=False)[0]
        figure.set_size_inches(2.6 + 3.4 * len(curves), 4.4)
        for axes, (varied, fixed, curve) in zip(panels, curves, strict=True):
            _draw_curve(axes, curve, varied, numbers)
            axes.set_title(f"{_words(fixed)} = {curve[0][fixed]:g}", fontsize=9)
            axes.set_xlabel(_words(varied))
        panels[0].set_ylabel("accuracy in %")
        legend_below(figure, panels[0], 2)
        figure.suptitle("Scale and margin of the HE head", fontsize=10)

    def table(self, numbers: Mapping) -> str:
        """Returns one line for each pair of scale and margin."""
        lines = [
            f"{cell['scale']:>6g}{cell['head_margin']:>6g}{table_row(cell)}"
            for cell in numbers["cells"]
        ]
        return "\n".join([f"{'s':>6}{'m':>6}{table_header()}", *lines])


def _scale_and_margin(subject: Subject) -> tuple[float, float]:
    if head_label(subject) == "linear":
        raise ValueError(
            "A linear head has no scale and no margin; expected runs with head.kind he or m_he; "
            f"received {subject.name}"
        )
    return float(setting(subject, "head.scale")), float(setting(subject, "head.margin"))


def _curve(cells: Sequence[Mapping], varied: str, fixed: str) -> list[Mapping]:
    """The cells at the most common value of what is fixed, in the order of what is varied."""
    common, _ = collections.Counter(cell[fixed] for cell in cells).most_common(1)[0]
    return sorted((cell for cell in cells if cell[fixed] == common), key=lambda cell: cell[varied])


def _draw_curve(axes, curve: Sequence[Mapping], varied: str, numbers: Mapping) -> None:
    places = [cell[varied] for cell in curve]
    for number, column in enumerate(COLUMNS):
        shares = [cell[column] for cell in curve]
        errors = interval_lengths(shares, numbers["num_examples"])
        label = column_label(column, numbers["num_steps"])
        draw_curve(axes, places, shares, errors, number, label)
    axes.set_xticks(places)
    plain_axes(axes)


def _words(key: str) -> str:
    name = key.removeprefix("head_")
    return f"{name} {_SYMBOLS[name]}"
