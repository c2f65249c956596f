"""The analyses that compare runs trained in different ways, by the accuracies of each."""

from collections.abc import Mapping, Sequence

from he_keras.analysis.accuracies import check_attack_options, measure_accuracies
from he_keras.analysis.analysis import Analysis, Subject


class ComparedRuns(Analysis):
    """Measures the accuracies of several runs; what distinguishes them, subclasses say.

    Args:
        num_steps: steps of the evaluating attacks, each of 0.003 / 0.031 of epsilon.
        seed: seed of the random starts.
    """

    min_subjects = 2

    def __init__(self, num_steps: int = 20, seed: int = 0) -> None:
        check_attack_options(num_steps, seed)
        self.num_steps = num_steps
        self.seed = seed

    def measure_runs(
        self, subjects: Sequence[Subject], distinctions: Sequence[Mapping]
    ) -> tuple[list[dict], dict]:
        """Returns a row for each run, and what all of them have in common.

        Args:
            subjects: the runs.
            distinctions: for each run, what its row says about it before its accuracies.
        """
        rows = [
            {
                "name": subject.name,
                **distinction,
                **measure_accuracies(subject, self.num_steps, self.seed),
            }
            for subject, distinction in zip(subjects, distinctions, strict=True)
        ]
        least = min(len(subject.labels) for subject in subjects)
        return rows, {"num_steps": self.num_steps, "num_examples": least, "runs": rows}
