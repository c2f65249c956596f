"""The result of an evaluation as an object and as files; `docs/report.md` describes each field."""

import dataclasses
import datetime
import pathlib
import sys

import numpy as np

from he_keras.atomic_files import write_json, write_npz
from he_keras.environment import environment
from he_keras.evaluation.attack_runs import AttackRow, AttackRuns
from he_keras.evaluation.check import Check
from he_keras.evaluation.examples import Examples
from he_keras.evaluation.intervals import wilson_interval
from he_keras.evaluation.journal import read_batch
from he_keras.evaluation.report import write_html
from he_keras.threat import ThreatModel

SCHEMA_VERSION = 1
#: Columns of `per_example.npz` that no attack may be named after.
RESERVED = (
    "clean",
    "labels",
    "clean_prediction",
    "adversarial_prediction",
    "broken_by",
    "margin",
    "distance",
)
_GALLERY_SIZE = 6
_SHOWN_CLASSES = 1000


@dataclasses.dataclass(frozen=True)
class RobustnessReport:
    """The result of `evaluate_robustness`.

    Attributes:
        num_examples: how many examples were scored.
        clean_accuracy: share classified correctly without attack.
        clean_interval: its 95 % confidence interval.
        rows: one entry for each attack.
        worst_case: share that no attack broke.
        worst_case_interval: its 95 % confidence interval.
        correct: per-example flags "still correct": "clean" and one entry for each attack; in mode
            "survivors" what an earlier attack broke counts as not correct.
        threat: the threat model's configuration.
        mode: "survivors" or "individual".
        protocol: text for the headline, or None.
        confusion: how often an example of a class (row) was broken into another (column).
        class_names: names of the classes, where known.
        checks: what the checks before and after found; empty if they were not asked for.
        he_panel: attacks at several scales side by side, for cosine heads.
        epsilon_curve: accuracy at several radii on a few examples.
    """

    num_examples: int
    clean_accuracy: float
    clean_interval: tuple[float, float]
    rows: tuple[AttackRow, ...]
    worst_case: float
    worst_case_interval: tuple[float, float]
    correct: dict[str, np.ndarray]
    threat: dict
    mode: str
    protocol: str | None
    confusion: np.ndarray
    class_names: tuple[str, ...]
    checks: tuple[Check, ...] = ()
    he_panel: dict | None = None
    epsilon_curve: dict | None = None

    def to_json(self) -> dict:
        """Returns everything but the per-example flags, and the versions, as plain data."""
        return {
            "schema_version": SCHEMA_VERSION,
            "title": "Robustness report",
            "command": " ".join(sys.argv),
            "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "mode": self.mode,
            "protocol": self.protocol,
            "num_examples": self.num_examples,
            "clean_accuracy": self.clean_accuracy,
            "clean_interval": list(self.clean_interval),
            "worst_case": self.worst_case,
            "worst_case_interval": list(self.worst_case_interval),
            "threat": self.threat,
            "attacks": [dataclasses.asdict(row) for row in self.rows],
            "he_panel": self.he_panel,
            "checks": [dataclasses.asdict(check) for check in self.checks],
            "epsilon_curve": self.epsilon_curve,
            "class_names": list(self.class_names),
            "confusion": self.confusion.tolist(),
            "gallery": [],
            "corruptions": None,
            "transfer": None,
            "environment": environment(),
            "settings": {},
        }

    def table(self) -> str:
        """Returns the report as a text table."""
        shown = [(name, row) for row in self.rows for name, row in _named(row)]
        width = max(24, *(len(name) + 1 for name, _ in shown))
        lines = [
            f"{'attack':<{width}}{'accuracy':>10}{'broken':>10}{'seconds':>10}{'forward':>10}"
            f"{'backward':>10}",
            f"{'(clean)':<{width}}{self.clean_accuracy:>10.2%}",
        ]
        for name, row in shown:
            lines.append(
                f"{name:<{width}}{row.robust_accuracy:>10.2%}{row.num_broken:>10}"
                f"{row.seconds:>10.1f}{row.forward_passes:>10.1f}{row.backward_passes:>10.1f}"
            )
        low, high = self.worst_case_interval
        lines.append(
            f"{'(worst case)':<{width}}{self.worst_case:>10.2%}   n = {self.num_examples}, "
            f"95 % interval {low:.2%} to {high:.2%}"
        )
        if self.mode == "survivors" and len(self.rows) > 1:
            lines.append(
                "Each attack ran on what all before it left; see accuracy as running total."
            )
        return "\n".join(lines + self._remarks())

    def _remarks(self) -> list[str]:
        lines = []
        if self.he_panel:
            lines.append(f"Cosine head, scale and loss side by side ({_of(self.he_panel)}):")
            for row in self.he_panel["rows"]:
                lines.append(f"  {row['name']:<24}{row['robust_accuracy']:>8.2%}  {row['meaning']}")
        lines += [f"note ({row.name}): {row.note}" for row in self.rows if row.note]
        lines += [f"WARNING ({row.name}): {text}" for row in self.rows for text in row.warnings]
        for check in self.checks:
            if check.fired:
                lines.append(
                    f"{check.verdict.upper()} ({check.name}): {check.figure}. {check.message}"
                )
        return lines


def _of(panel: dict) -> str:
    return f"first {panel['num_examples']} examples"


def _named(row: AttackRow) -> list[tuple[str, AttackRow]]:
    """A row and those of its stages, with the names that the table shows."""
    scale = row.settings.get("logit_scale", "model")
    name = row.name if scale == "model" else f"{row.name} [scale {scale}]"
    return [(f"  {stage.name}", stage) for stage in row.stages] + [(name, row)]


def summarize(
    runs: AttackRuns, positions, sample, threat: ThreatModel, class_names, protocol
) -> RobustnessReport:
    """Returns the report over the examples with the given positions, without checks."""
    num_examples = len(positions)
    is_clean, unbroken = runs.clean[positions], runs.unbroken[positions]
    flags = {name: flags[positions] for name, flags in runs.correct.items()}
    return RobustnessReport(
        num_examples=num_examples,
        clean_accuracy=float(is_clean.mean()),
        clean_interval=wilson_interval(int(is_clean.sum()), num_examples),
        rows=tuple(runs.rows(positions, sample)),
        worst_case=float(unbroken.mean()),
        worst_case_interval=wilson_interval(int(unbroken.sum()), num_examples),
        correct={"clean": is_clean, **flags},
        threat=threat.get_config(),
        mode=runs.mode,
        protocol=protocol,
        confusion=_confusion(runs, positions),
        class_names=class_names,
    )


def _confusion(runs: AttackRuns, positions) -> np.ndarray:
    num_classes = min(runs.num_classes, _SHOWN_CLASSES)
    counts = np.zeros((num_classes, num_classes), int)
    broken = positions[runs.worst.broken_by[positions] >= 0]
    pairs = runs.labels[broken], runs.worst.prediction[broken]
    known = (pairs[0] < num_classes) & (0 <= pairs[1]) & (pairs[1] < num_classes)
    np.add.at(counts, (pairs[0][known], pairs[1][known]), 1)
    return counts


def write_report(
    report: RobustnessReport, runs: AttackRuns, examples: Examples, settings: dict, folder
) -> pathlib.Path:
    """Writes all files of a report; returns the path of the page."""
    worst, labels = runs.worst, runs.labels
    shown = _gallery_positions(runs)
    clean, adversarial = _gallery_images(shown, examples, worst)
    content = report.to_json()
    content["settings"] = settings
    content["gallery"] = [
        {
            "position": int(position),
            "label": int(labels[position]),
            "clean_prediction": int(labels[position]),
            "adversarial_prediction": int(worst.prediction[position]),
            "kind": kind,
            "broken_by": report.rows[worst.broken_by[position]].name,
            "distance": float(worst.distance[position]),
            "margin": float(worst.margin[position]),
        }
        for kind, position in shown
    ]
    write_npz(folder / "gallery.npz", {"clean": clean, "adversarial": adversarial})
    write_npz(
        folder / "per_example.npz",
        {
            "labels": labels,
            "clean_prediction": runs.clean_prediction,
            "adversarial_prediction": worst.prediction,
            "broken_by": worst.broken_by,
            "margin": worst.margin,
            "distance": worst.distance,
            **report.correct,
        },
    )
    write_json(folder / "report.json", content)
    return write_html(folder)


def _gallery_positions(runs: AttackRuns) -> list[tuple[str, int]]:
    """The examples that took the most, and those that took the least, to break."""
    worst = runs.worst
    broken = np.flatnonzero(worst.broken_by >= 0)
    # Later attacks are stronger; among equals a margin near 0 was the harder one to reach.
    order = broken[np.lexsort((-worst.margin[broken], -worst.broken_by[broken]))]
    size = min(_GALLERY_SIZE, len(order) // 2 or len(order))
    hardest, easiest = order[:size], order[size:][::-1][:size]
    return [("hardest", at) for at in hardest] + [("easiest", at) for at in easiest]


def _gallery_images(shown, examples: Examples, worst) -> tuple[np.ndarray, np.ndarray]:
    clean = examples.at([position for _, position in shown])
    adversarial = []
    for _, position in shown:
        path, row = worst.file_and_row[int(position)]
        adversarial.append(read_batch(path).x_adv[row])
    return clean, np.array(adversarial, clean.dtype).reshape(clean.shape)
