"""Robust accuracy over the number of attack steps in training, with and without HE.

Paper: "Boosting Adversarial Training with Hypersphere Embedding", Fig. 2 (left): PGD-AT with 1 to 7
steps, evaluated by PGD-20; with HE fewer steps should be enough.
"""

from collections.abc import Mapping, Sequence

from he_keras.analysis.analysis import Subject
from he_keras.analysis.compared_runs import (
    ComparedRuns,
    averaged,
    column_label,
    head_label,
    in_order,
    interval_lengths,
    require_different,
    setting,
    table_header,
    table_row,
)
from he_keras.analysis.registry import register
from he_keras.drawing import draw_curve, legend_above, plain_axes

_SHOWN = ("paper", "margin")


@register("attack-steps")
class AttackSteps(ComparedRuns):
    """Robust accuracy over the number of attack steps in training (HE paper, Fig. 2 left).

    Takes run folders whose objective has `num_steps`. Runs of the same head make one curve; runs
    that differ in the seed only are averaged. See `compared_runs` for the three attacks.

    Args:
        num_steps: steps of the evaluating attacks, each of 0.003 / 0.031 of epsilon.
        seed: seed of the random starts.
    """

    def measure(self, subjects: Sequence[Subject]) -> dict:
        """Returns the accuracies of each run, and for each head those at each number of steps."""
        steps = [int(setting(subject, "objective.num_steps")) for subject in subjects]
        heads = [head_label(subject) for subject in subjects]
        require_different(subjects, steps, "objective.num_steps")
        distinctions = [
            {"head": head, "training_steps": count}
            for head, count in zip(heads, steps, strict=True)
        ]
        runs, numbers = self.measure_runs(subjects, distinctions)
        points = averaged(runs, ["head", "training_steps"])
        points.sort(key=lambda point: point["training_steps"])
        curves = {
            head: [point for point in points if point["head"] == head] for head in in_order(heads)
        }
        return {**numbers, "curves": curves}

    def draw(self, numbers: Mapping, figure) -> None:
        """Draws accuracy over training steps: a panel for each attack, a curve for each head."""
        panels = figure.subplots(1, len(_SHOWN), sharey=True)
        figure.set_size_inches(8.4, 4.0)
        for axes, column in zip(panels, _SHOWN, strict=True):
            for number, (head, points) in enumerate(numbers["curves"].items()):
                shares = [point[column] for point in points]
                steps = [point["training_steps"] for point in points]
                errors = interval_lengths(shares, numbers["num_examples"])
                draw_curve(axes, steps, shares, errors, number, head)
            axes.set_title(column_label(column, numbers["num_steps"]), fontsize=9, pad=24)
            axes.set_xlabel("attack steps K in training")
            axes.set_xticks(sorted({run["training_steps"] for run in numbers["runs"]}))
            plain_axes(axes)
            legend_above(axes, 4)
        panels[0].set_ylabel("robust accuracy in %")
        figure.suptitle("Robust accuracy over the attack steps in training", fontsize=10)

    def table(self, numbers: Mapping) -> str:
        """Returns one line for each head and number of steps."""
        lines = [
            f"{head:<12}{point['training_steps']:>4}{table_row(point)}"
            for head, points in numbers["curves"].items()
            for point in points
        ]
        return "\n".join([f"{'head':<12}{'K':>4}{table_header()}", *lines])
