"""What the analyses share that compare ways of training: settings, accuracies, and their averages.

Three attacks stand side by side. The HE paper's protocol (raw cosines, last iterate) overstates
cosine heads. The second is the same attack on the logits as trained. No scale can fool the third,
which attacks the margin. Cost: 3 * num_steps forward and backward passes per example.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from he_keras import attacks
from he_keras.analysis.analysis import Analysis, Subject
from he_keras.arguments import check_positive_integer, check_seed
from he_keras.evaluation.robustness import evaluate_robustness
from he_keras.evaluation.statistics import wilson_interval

#: What `measure_accuracies` returns, and how pictures call it; {steps} is the number of steps.
COLUMNS = {
    "clean": "clean",
    "paper": "PGD-{steps}, scale 1 (the paper's)",
    "pgd": "PGD-{steps}, scale as trained",
    "margin": "PGD-{steps} on the margin",
}
# In the order in which pictures show them.
_HEAD_ORDER = ("linear", "no norm", "FN", "WN", "FN+AM", "WN+AM", "FN+WN", "FN+WN+AM", "m-HE")
# The step and the radius of the paper's evaluation.
_PAPER_STEP = 0.003 / 0.031
_MISSING = object()


@dataclasses.dataclass(eq=False)
class ComparedRuns(Analysis):
    """Measures the accuracies of several runs; what distinguishes them, subclasses say.

    Args:
        num_steps: steps of the evaluating attacks, each of 0.003 / 0.031 of epsilon.
        seed: seed of the random starts.
    """

    min_subjects = 2

    num_steps: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        check_positive_integer("num_steps", self.num_steps)
        check_seed(self.seed)

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
        fewest = min(len(subject.labels) for subject in subjects)
        return rows, {"num_steps": self.num_steps, "num_examples": fewest, "runs": rows}


def measure_accuracies(subject: Subject, num_steps: int, seed: int) -> dict[str, float]:
    """Returns the accuracies of `COLUMNS` and the worst case of the three attacks, 0..1."""
    options = {"num_steps": num_steps, "step_size": subject.threat.epsilon * _PAPER_STEP}
    pgd = attacks.PGD(subject.threat, seed=seed, name="pgd-scale-as-trained", **options)
    margin = attacks.PGD(subject.threat, loss="cw", seed=seed, name="pgd-margin", **options)
    paper = attacks.PGD(
        subject.threat,
        logit_scale="unit",
        keep="last",
        stop_when_broken=False,
        seed=seed,
        name="pgd-scale-1",
        **options,
    )
    report = evaluate_robustness(
        subject.model,
        (subject.images, subject.labels),
        subject.threat,
        [paper, pgd, margin],
        mode="individual",
        checks=False,
    )
    after_paper, after_pgd, after_margin = (row.robust_accuracy for row in report.rows)
    return {
        "clean": report.clean_accuracy,
        "paper": after_paper,
        "pgd": after_pgd,
        "margin": after_margin,
        "worst": report.worst_case,
    }


def averaged(runs: Sequence[Mapping], keys: Sequence[str]) -> list[dict]:
    """Averages the runs that agree in all of the keys: they differ in their seed only.

    Returns:
        A row for each combination of values: the values, "num_runs", and the mean accuracies.
    """
    groups: dict[tuple, list[Mapping]] = {}
    for run in runs:
        groups.setdefault(tuple(run[key] for key in keys), []).append(run)
    return [
        {
            **dict(zip(keys, values, strict=True)),
            "num_runs": len(rows),
            **{column: float(np.mean([row[column] for row in rows])) for column in COLUMNS},
        }
        for values, rows in groups.items()
    ]


def column_label(column: str, num_steps: int) -> str:
    """What a picture calls a column."""
    return COLUMNS[column].format(steps=num_steps)


def table_row(row: Mapping) -> str:
    """The accuracies of a row, as part of a line of text."""
    return "".join(f"{row[column]:>8.1%}" for column in COLUMNS)


def table_header() -> str:
    """The names of the accuracies, above `table_row`."""
    return "".join(f"{column:>8}" for column in COLUMNS)


def interval_lengths(accuracies: Sequence[float], num_examples: int) -> np.ndarray:
    """Returns how far the 95 % intervals reach below and above, in percent, shape (2, n)."""
    ends = [wilson_interval(round(each * num_examples), num_examples) for each in accuracies]
    low, high = np.array(ends).T
    # A mean over runs is no whole number of examples, and rounding could leave the interval.
    return 100.0 * np.maximum([np.array(accuracies) - low, high - np.array(accuracies)], 0.0)


def setting(subject: Subject, key: str) -> Any:
    """Returns an entry of the run's configuration, such as "objective.num_steps"."""
    value: Any = subject.settings
    for part in key.split("."):
        value = value.get(part, _MISSING) if isinstance(value, Mapping) else _MISSING
    if value is _MISSING:
        section = subject.settings.get(key.partition(".")[0])
        raise ValueError(
            "This analysis compares ways of training; expected run folders whose configuration has "
            f"{key}; received {subject.name} with {key.partition('.')[0]}={section!r}"
        )
    return value


def head_label(subject: Subject) -> str:
    """Names the head: "linear", "m-HE", or which of FN, WN and AM (the margin) it has."""
    kind = setting(subject, "head.kind")
    if kind == "linear":
        return "linear"
    if kind == "m_he":
        return "m-HE"
    switches = {"feature_norm": "FN", "weight_norm": "WN"}
    parts = [label for key, label in switches.items() if setting(subject, f"head.{key}")]
    parts += ["AM"] if setting(subject, "head.margin") > 0 else []
    return "+".join(parts) or "no norm"


def in_order(labels: Iterable[str]) -> list[str]:
    """The labels of heads, each once, in the order in which pictures show them."""
    found = sorted(set(labels))
    known = [label for label in _HEAD_ORDER if label in found]
    return known + [label for label in found if label not in known]


def require_different(subjects: Sequence[Subject], values: Sequence, what: str) -> None:
    """Raises a ValueError if all runs were trained alike in what is to be compared."""
    if len(set(values)) < 2:
        raise ValueError(
            f"Nothing to compare; expected runs that differ in {what}; received "
            f"{[subject.name for subject in subjects]}, all with {values[0]}"
        )
