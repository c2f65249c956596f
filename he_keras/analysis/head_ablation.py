"""What feature normalisation, weight normalisation and margin contribute each.

Paper: "Boosting Adversarial Training with Hypersphere Embedding", Sec. 4.1, "Ablation studies":
PGD-AT on CIFAR-10 with FN 86.43 % clean and 54.46 % under PGD-20, with WN 87.28 and 53.93, with
both 86.20 and 58.95.
"""

from collections.abc import Mapping, Sequence

from he_keras.analysis.analysis import Subject
from he_keras.analysis.compared_runs import (
    COLUMNS,
    ComparedRuns,
    averaged,
    column_label,
    head_label,
    in_order,
    interval_lengths,
    require_different,
    table_header,
    table_row,
)
from he_keras.analysis.registry import register
from he_keras.drawing import draw_bars, legend_above


@register("head-ablation")
class HeadAblation(ComparedRuns):
    """Accuracies of heads with and without FN, WN and the margin AM (HE paper, Sec. 4.1).

    Takes run folders that differ in their head. Runs of the same kind of head are averaged. See
    `compared_runs` for the three attacks.

    Args:
        num_steps: steps of the evaluating attacks, each of 0.003 / 0.031 of epsilon.
        seed: seed of the random starts.
    """

    def measure(self, subjects: Sequence[Subject]) -> dict:
        """Returns the accuracies of each run and of each kind of head."""
        labels = [head_label(subject) for subject in subjects]
        require_different(subjects, labels, "their head")
        runs, numbers = self.measure_runs(subjects, [{"head": label} for label in labels])
        heads = {row["head"]: row for row in averaged(runs, ["head"])}
        return {**numbers, "heads": {label: heads[label] for label in in_order(labels)}}

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
        lines = [f"{head:<12}{table_row(entry)}" for head, entry in numbers["heads"].items()]
        return "\n".join([f"{'head':<12}{table_header()}", *lines])
