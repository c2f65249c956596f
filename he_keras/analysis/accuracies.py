"""Clean and robust accuracies, for the analyses that compare ways of training.

Three attacks stand beside each other: the HE paper's protocol (raw cosines, last iterate), which
overstates cosine heads; the same attack on the logits as trained; and one on the margin, which no
scale can fool. Cost: 3 * num_steps forward and backward passes for each example.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from he_keras import attacks
from he_keras.analysis.analysis import Subject
from he_keras.attacks.checks import check_positive_integer, check_seed
from he_keras.evaluation.intervals import wilson_interval
from he_keras.evaluation.robustness import evaluate_robustness
from he_keras.evaluation.scoring import Scored, Scorer

#: What `measure_accuracies` returns, and how pictures call it; {steps} is the number of steps.
COLUMNS = {
    "clean": "clean",
    "paper": "PGD-{steps}, scale 1 (the paper's)",
    "pgd": "PGD-{steps}, scale as trained",
    "margin": "PGD-{steps} on the margin",
}
ROBUST_COLUMNS = ("paper", "pgd", "margin")
_PAPER_STEP = 0.003 / 0.031
_BATCH_SIZE = 250


def check_attack_options(num_steps, seed) -> None:
    """Raises a ValueError for options that no attack could take."""
    check_positive_integer("num_steps", num_steps)
    check_seed(seed)


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
    robust = {
        column: row.robust_accuracy for column, row in zip(ROBUST_COLUMNS, report.rows, strict=True)
    }
    return {"clean": report.clean_accuracy, **robust, "worst": report.worst_case}


def scored(subject: Subject, images: np.ndarray) -> Scored:
    """Returns what the model says about images, which belong to the subject's labels in order."""
    scorer = Scorer(subject.model)
    firsts = range(0, len(images), _BATCH_SIZE)
    parts = [
        scorer(images[first : first + _BATCH_SIZE], subject.labels[first : first + _BATCH_SIZE])
        for first in firsts
    ]
    return Scored(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def column_label(column: str, num_steps: int) -> str:
    """What a picture calls a column."""
    return COLUMNS[column].format(steps=num_steps)


def mean_accuracies(rows: Sequence[Mapping]) -> dict[str, float]:
    """Returns the mean of each column over the rows, which are runs of other seeds."""
    return {column: float(np.mean([row[column] for row in rows])) for column in COLUMNS}


def interval_lengths(accuracies: Sequence[float], num_examples: int) -> np.ndarray:
    """Returns how far the 95 % intervals reach below and above, in percent, shape (2, n)."""
    ends = [wilson_interval(round(each * num_examples), num_examples) for each in accuracies]
    low, high = np.array(ends).T
    # A mean over runs is no whole number of examples, and rounding could leave the interval.
    return 100.0 * np.maximum([np.array(accuracies) - low, high - np.array(accuracies)], 0.0)
