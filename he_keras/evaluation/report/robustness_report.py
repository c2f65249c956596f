"""The result of an evaluation as an object: its figures, as text and as plain data."""

import collections
import dataclasses
import datetime
import sys
from collections.abc import Sequence

import numpy as np

from he_keras.environment import environment
from he_keras.evaluation.checks.check import Check
from he_keras.evaluation.report.page import notebook_table
from he_keras.evaluation.run.attack_runs import AttackRow, AttackRuns
from he_keras.evaluation.statistics import share_of, wilson_interval
from he_keras.threat import ThreatModel

#: The version of report.json that is written, and that the page understands.
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
# The short form names so many.
_SHOWN_ATTACKS = 5
_SHOWN_CLASSES = 1000


@dataclasses.dataclass(frozen=True, repr=False)
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
        class_names: names of the classes, if known.
        training: the configuration that the model was trained with, if known.
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
    training: dict | None = None
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
            "training": self.training,
            "files": {},
        }

    def table(self) -> str:
        """Returns the report as a text table."""
        shown = [(name, row) for row in self.rows for name, row in _named(row)]
        width = max(24, *(len(name) + 1 for name, _ in shown))
        lines = [
            f"Accuracy; {ThreatModel(**self.threat).text()}",
            f"{'attack':<{width}}{'accuracy':>10}{'broken':>10}{'time':>10}{'forward':>10}"
            f"{'backward':>10}",
            f"{'':<{width}}{'of all':>10}{'examples':>10}{'seconds':>10}{'passes per example':>20}",
            f"{'(clean)':<{width}}{self.clean_accuracy:>10.2%}",
        ]
        for name, row in shown:
            lines.append(
                f"{name:<{width}}{row.robust_accuracy:>10.2%}{row.num_broken:>10}"
                f"{row.seconds:>10.1f}{row.forward_passes:>10.1f}{row.backward_passes:>10.1f}"
            )
        lines.append(
            f"{'(worst case)':<{width}}{self.worst_case:>10.2%}   n = {self.num_examples}, "
            f"95 % interval {self._interval()}"
        )
        if self.mode == "survivors" and len(self.rows) > 1:
            lines.append(
                "Each attack ran on what all before it left; see accuracy as running total."
            )
        return "\n".join([*lines, checks_in_short(self.checks), *self._remarks()])

    def _subject(self) -> str:
        return f"{ThreatModel(**self.threat).text()}; {self.num_examples} examples"

    def _interval(self) -> str:
        low, high = self.worst_case_interval
        return f"{low:.2%} to {high:.2%}"

    def __repr__(self) -> str:
        attacks = [f"{row.name} {row.robust_accuracy:.2%}" for row in self.rows]
        rest = f" and {len(attacks) - _SHOWN_ATTACKS} more" if len(attacks) > _SHOWN_ATTACKS else ""
        warned = ", ".join(row.name for row in self.rows if row.warnings)
        lines = [
            f"<RobustnessReport; {self._subject()}",
            f" clean {self.clean_accuracy:.2%}, worst case {self.worst_case:.2%}, "
            f"95 % interval {self._interval()}",
            f" {', '.join(attacks[:_SHOWN_ATTACKS])}{rest}",
            f" {checks_in_short(self.checks)}",
            f" {f'WARNINGS ({warned}); ' if warned else ''}all of it: print(report.table())>",
        ]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = [("(clean)", f"{self.clean_accuracy:.2%}", "")]
        for row in self.rows:
            rows += [
                (name, f"{each.robust_accuracy:.2%}", str(each.num_broken))
                for name, each in _named(row)
            ]
        rows.append(("(worst case)", f"{self.worst_case:.2%}", ""))
        remarks = [
            f"95 % interval of the worst case: {self._interval()}.",
            checks_in_short(self.checks),
            *self._remarks(),
        ]
        columns = ("Attack", "Accuracy", "Broken examples")
        return notebook_table(f"Accuracy; {self._subject()}", columns, rows, remarks)

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


def checks_in_short(checks: Sequence[Check]) -> str:
    """Counts the checks by verdict in one line, and names those that fail or warn.

    Example:
        >>> from he_keras.evaluation import Check
        >>> from he_keras.evaluation.report.robustness_report import checks_in_short
        >>> verdicts = {"finite": "pass", "logits": "pass", "loss-gap": "warn"}
        >>> checks_in_short([Check(name, "after", each, "", "") for name, each in verdicts.items()])
        '3 checks: 2 pass, 1 warn: loss-gap'
    """
    if not checks:
        return "No checks ran."
    names = collections.defaultdict(list)
    for check in checks:
        names[check.verdict].append(check.name)
    quiet = [f"{len(names[each])} {each}" for each in ("pass", "skipped") if each in names]
    loud = [
        f"{len(names[each])} {each}: {', '.join(names[each])}"
        for each in ("fail", "warn")
        if each in names
    ]
    return f"{len(checks)} checks: {', '.join([*quiet, *loud[:1]])}{'; '.join(['', *loud[1:]])}"


def _of(panel: dict) -> str:
    return f"first {panel['num_examples']} examples"


def _named(row: AttackRow) -> list[tuple[str, AttackRow]]:
    """A row and those of its stages, with the names that the table shows."""
    scale = row.settings.get("logit_scale", "model")
    name = row.name if scale == "model" else f"{row.name} [scale {scale}]"
    return [(f"  {stage.name}", stage) for stage in row.stages] + [(name, row)]


def summarize(
    runs: AttackRuns, positions, sample, threat: ThreatModel, class_names, protocol, training
) -> RobustnessReport:
    """Returns the report over the examples with the given positions, without checks."""
    num_examples = len(positions)
    is_clean, unbroken = runs.clean[positions], runs.unbroken[positions]
    flags = {name: flags[positions] for name, flags in runs.correct.items()}
    return RobustnessReport(
        num_examples=num_examples,
        clean_accuracy=share_of(int(is_clean.sum()), num_examples),
        clean_interval=wilson_interval(int(is_clean.sum()), num_examples),
        rows=tuple(runs.rows(positions, sample)),
        worst_case=share_of(int(unbroken.sum()), num_examples),
        worst_case_interval=wilson_interval(int(unbroken.sum()), num_examples),
        correct={"clean": is_clean, **flags},
        threat=threat.get_config(),
        mode=runs.mode,
        protocol=protocol,
        confusion=_confusion(runs, positions),
        class_names=class_names,
        training=training,
    )


def _confusion(runs: AttackRuns, positions) -> np.ndarray:
    num_classes = min(runs.num_classes, _SHOWN_CLASSES)
    counts = np.zeros((num_classes, num_classes), int)
    broken = positions[runs.worst.broken_by[positions] >= 0]
    pairs = runs.labels[broken], runs.worst.prediction[broken]
    known = (pairs[0] < num_classes) & (0 <= pairs[1]) & (pairs[1] < num_classes)
    np.add.at(counts, (pairs[0][known], pairs[1][known]), 1)
    return counts
