"""Robust accuracy over the number of attack steps in training, with and without HE.

Paper: "Boosting Adversarial Training with Hypersphere Embedding", Fig. 2 (left): PGD-AT with 1 to 7
steps, evaluated by PGD-20; with HE fewer steps should do.
"""

from collections.abc import Mapping, Sequence

from he_keras.analysis.accuracies import (
    ROBUST_COLUMNS,
    column_label,
    interval_lengths,
    mean_accuracies,
)
from he_keras.analysis.analysis import Subject
from he_keras.analysis.compared_runs import ComparedRuns
from he_keras.analysis.drawing import legend_above, plain_axes, style
from he_keras.analysis.registry import register
from he_keras.analysis.trained_settings import head_label, head_place, require_different, setting

_SHOWN = ("paper", "margin")


@register("attack-steps")
class AttackSteps(ComparedRuns):
    """Robust accuracy over the number of attack steps in training (HE paper, Fig. 2 left).

    Takes run folders whose objective has `num_steps`. Runs of the same head make one curve; runs
    that differ in the seed only are averaged. See `accuracies` for the three attacks.

    Args:
        num_steps: steps of the evaluating attacks, each of 0.003 / 0.031 of epsilon.
        seed: seed of the random starts.
    """

    def measure(self, subjects: Sequence[Subject]) -> dict:
        """Returns the accuracies of each run, and for each head those at each number of steps."""
        steps = [_training_steps(subject) for subject in subjects]
        heads = [head_label(subject) for subject in subjects]
        require_different(subjects, steps, "objective.num_steps")
        distinctions = [
            {"head": head, "training_steps": count}
            for head, count in zip(heads, steps, strict=True)
        ]
        runs, numbers = self.measure_runs(subjects, distinctions)
        curves = {head: _curve(runs, head) for head in sorted(set(heads), key=head_place)}
        return {**numbers, "curves": curves}

    def draw(self, numbers: Mapping, figure) -> None:
        """Draws accuracy over training steps: a panel for each attack, a curve for each head."""
        panels = figure.subplots(1, len(_SHOWN), sharey=True)
        figure.set_size_inches(8.4, 4.0)
        for axes, column in zip(panels, _SHOWN, strict=True):
            for number, (head, points) in enumerate(numbers["curves"].items()):
                shares = [point[column] for point in points]
                axes.errorbar(
                    [point["training_steps"] for point in points],
                    [100.0 * share for share in shares],
                    yerr=interval_lengths(shares, numbers["num_examples"]),
                    capsize=2,
                    elinewidth=0.7,
                    label=head,
                    **style(number),
                )
            axes.set_title(column_label(column, numbers["num_steps"]), fontsize=9, pad=24)
            axes.set_xlabel("attack steps K in training")
            axes.set_xticks(sorted({run["training_steps"] for run in numbers["runs"]}))
            plain_axes(axes)
            legend_above(axes, 4)
        panels[0].set_ylabel("robust accuracy in %")
        figure.suptitle("Robust accuracy over the attack steps in training", fontsize=10)

    def table(self, numbers: Mapping) -> str:
        """Returns one line for each head and number of steps."""
        lines = [f"{'head':<12}{'K':>4}{'clean':>8}{'paper':>8}{'pgd':>8}{'margin':>8}"]
        for head, points in numbers["curves"].items():
            for point in points:
                shares = "".join(f"{point[column]:>8.1%}" for column in ("clean", *ROBUST_COLUMNS))
                lines.append(f"{head:<12}{point['training_steps']:>4}{shares}")
        return "\n".join(lines)


def _training_steps(subject: Subject) -> int:
    return int(setting(subject, "objective.num_steps"))


def _curve(runs: Sequence[Mapping], head: str) -> list[dict]:
    """The runs of a head by number of steps, those of the same number averaged."""
    own = [run for run in runs if run["head"] == head]
    counts = sorted({run["training_steps"] for run in own})
    points = []
    for count in counts:
        rows = [run for run in own if run["training_steps"] == count]
        points.append({"training_steps": count, "num_runs": len(rows), **mean_accuracies(rows)})
    return points
