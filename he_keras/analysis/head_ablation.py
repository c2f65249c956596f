"""What feature normalisation, weight normalisation and margin contribute each.

Paper: "Boosting Adversarial Training with Hypersphere Embedding", Sec. 4.1, "Ablation studies":
PGD-AT on CIFAR-10 with FN 86.43 % clean and 54.46 % under PGD-20, with WN 87.28 and 53.93, with
both 86.20 and 58.95.
"""

from collections.abc import Mapping, Sequence

from he_keras.analysis.accuracies import (
    COLUMNS,
    column_label,
    interval_lengths,
    mean_accuracies,
)
from he_keras.analysis.analysis import Subject
from he_keras.analysis.compared_runs import ComparedRuns
from he_keras.analysis.drawing import draw_bars, legend_above
from he_keras.analysis.registry import register
from he_keras.analysis.trained_settings import head_label, head_place, require_different


@register("head-ablation")
class HeadAblation(ComparedRuns):
    """Accuracies of heads with and without FN, WN and the margin AM (HE paper, Sec. 4.1).

    Takes run folders that differ in their head. Runs of the same kind of head are averaged. See
    `accuracies` for the three attacks.

    Args:
        num_steps: steps of the evaluating attacks, each of 0.003 / 0.031 of epsilon.
        seed: seed of the random starts.
    """

    def measure(self, subjects: Sequence[Subject]) -> dict:
        """Returns the accuracies of each run and of each kind of head."""
        labels = [head_label(subject) for subject in subjects]
        require_different(subjects, labels, "their head")
        runs, numbers = self.measure_runs(subjects, [{"head": label} for label in labels])
        heads = {}
        for label in sorted(set(labels), key=head_place):
            rows = [run for run in runs if run["head"] == label]
            heads[label] = {"num_runs": len(rows), **mean_accuracies(rows)}
        return {**numbers, "heads": heads}

    def draw(self, numbers: Mapping, figure) -> None:
        """Draws a group of bars for each kind of head."""
        axes = figure.subplots()
        heads = numbers["heads"]
        figure.set_size_inches(max(6.0, 1.2 + 1.35 * len(heads)), 4.4)
        series, errors = {}, {}
        for column in COLUMNS:
            label = column_label(column, numbers["num_steps"])
            shares = [entry[column] for entry in heads.values()]
            series[label] = [100.0 * share for share in shares]
            errors[label] = interval_lengths(shares, numbers["num_examples"])
        draw_bars(axes, list(heads), series, errors)
        axes.set_xlabel("head")
        axes.set_ylabel("accuracy in %")
        figure.suptitle("Feature norm (FN), weight norm (WN), margin (AM)", fontsize=10)
        legend_above(axes, 2)

    def table(self, numbers: Mapping) -> str:
        """Returns one line for each kind of head."""
        lines = [f"{'head':<12}" + "".join(f"{column:>8}" for column in COLUMNS)]
        for head, entry in numbers["heads"].items():
            lines.append(f"{head:<12}" + "".join(f"{entry[column]:>8.1%}" for column in COLUMNS))
        return "\n".join(lines)
