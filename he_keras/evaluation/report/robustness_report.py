"""The result of an evaluation as an object and as files.

`docs/reference/report.md` describes each field.
"""

import collections
import dataclasses
import datetime
import pathlib
import sys
from collections.abc import Sequence

import numpy as np

from he_keras.attacks.framework.ensemble import parts
from he_keras.environment import environment
from he_keras.evaluation.checks.check import Check
from he_keras.evaluation.report.page import notebook_table
from he_keras.evaluation.report.report_page import write_html
from he_keras.evaluation.report.stored_report import (
    GALLERY,
    PER_EXAMPLE,
    SCHEMA_VERSION,
    digests_of,
)
from he_keras.evaluation.run.attack_runs import AttackRow, AttackRuns
from he_keras.evaluation.run.examples import Examples
from he_keras.evaluation.run.facts import for_report, section_differences, shown
from he_keras.evaluation.run.journal import read_batch
from he_keras.evaluation.statistics import share_of, wilson_interval
from he_keras.files import read_json, write_json, write_npz
from he_keras.threat import ThreatModel

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


def write_report(
    report: RobustnessReport,
    runs: AttackRuns,
    examples: Examples,
    settings: dict,
    folder,
    pictures: dict[str, np.ndarray],
) -> pathlib.Path:
    """Writes all files of a report; returns the path of the page."""
    worst = runs.worst
    content = report.to_json()
    content["title"] = f"Robustness of {_name_of(folder)}"
    content["settings"] = for_report(settings)
    names = [row.name for row in report.rows]
    content["gallery"], shown = _gallery(runs, examples, names, pictures)
    write_npz(folder / GALLERY, shown)
    write_npz(
        folder / PER_EXAMPLE,
        {
            "labels": runs.labels,
            "clean_prediction": runs.clean_prediction,
            "adversarial_prediction": worst.prediction,
            "broken_by": worst.broken_by,
            "margin": worst.margin,
            "distance": worst.distance,
            **report.correct,
        },
    )
    content["files"] = digests_of(folder)
    write_json(folder / "report.json", content)
    return write_html(folder)


def _name_of(folder: pathlib.Path) -> str:
    """The name of the run if the folder is its `evaluation`, else the folder's."""
    folder = folder.resolve()
    return folder.parent.name if folder.name == "evaluation" else folder.name


def add_to_report(folder: pathlib.Path, **sections) -> pathlib.Path:
    """Adds sections of `docs/reference/report.md` to a report; returns the path of the page."""
    path = folder / "report.json"
    for section in sections.values():
        check_belongs(folder, section)
    write_json(path, {**read_json(path), **sections})
    return write_html(folder)


def check_belongs(folder: pathlib.Path, section: dict) -> None:
    """Raises a ValueError if a section is not of a report's model, images and threat model."""
    path = folder / "report.json"
    found = section_differences(read_json(path), section)
    if found:
        raise ValueError(
            "The report is of another evaluation; expected results of its model, images and threat "
            f"model; received {shown(found)} for {path}; use another output_dir"
        )


def pictures_of_unbroken(
    runs: AttackRuns, examples: Examples, shard: tuple[int, int] | None, merge: bool
) -> dict[str, np.ndarray]:
    """Returns the first attack's strongest images of the unbroken examples of largest margin.

    They are found once more, because an evaluation records only what it broke. A shard records
    them for the merge, which attacks nothing.
    """
    if merge:
        return runs.journal.recall_pictures()
    easiest = _easiest_first(runs)[:_GALLERY_SIZE]
    held = examples.at(easiest)
    attack = parts(runs.attacks[0])[0]
    pictures = {"positions": easiest, "x_adv": held}
    pictures |= {"margin": runs.worst.margin[easiest], "distance": runs.worst.distance[easiest]}
    if len(held):
        result = attack(runs.model, held, runs.labels[easiest], example_ids=easiest)
        distance = attack.threat.distance(result.x_adv, held).numpy()
        pictures |= {"x_adv": result.x_adv, "margin": result.margin, "distance": distance}
    if shard is not None:
        runs.journal.record_pictures(shard, pictures)
    return pictures


def _easiest_first(runs: AttackRuns) -> np.ndarray:
    """The positions of the unbroken examples, the largest margin first."""
    unbroken = np.flatnonzero(runs.done & (runs.worst.broken_by == -1))
    return unbroken[np.argsort(-runs.worst.margin[unbroken], kind="stable")]


def _gallery(
    runs: AttackRuns, examples: Examples, names, pictures: dict[str, np.ndarray]
) -> tuple[list[dict], dict]:
    """The broken examples of the most negative margin, and the unbroken ones of the largest.

    The pictures of an unbroken example show the strongest image of the first attack, with the
    margin and the distance of that image.
    """
    by_margin = np.argsort(runs.worst.margin, kind="stable")
    broken_by = runs.worst.broken_by[by_margin]
    hardest = by_margin[broken_by >= 0][:_GALLERY_SIZE]
    row_of = {int(position): row for row, position in enumerate(pictures["positions"])}
    easiest = [each for each in _easiest_first(runs) if int(each) in row_of][:_GALLERY_SIZE]
    rows = [row_of[int(position)] for position in easiest]
    clean = examples.at([*hardest, *easiest])
    places = [runs.worst.file_and_row[int(position)] for position in hardest]
    found = [read_batch(path).x_adv[row] for path, row in places]
    found += [pictures["x_adv"][row] for row in rows]
    margins = [*runs.worst.margin[hardest], *pictures["margin"][rows]]
    distances = [*runs.worst.distance[hardest], *pictures["distance"][rows]]
    entries = [
        {
            "position": int(position),
            "label": int(runs.labels[position]),
            "clean_prediction": int(runs.clean_prediction[position]),
            "adversarial_prediction": int(runs.worst.prediction[position]),
            "kind": "hardest" if number < len(hardest) else "easiest",
            "broken_by": names[runs.worst.broken_by[position]] if number < len(hardest) else None,
            "distance": float(distances[number]),
            "margin": float(margins[number]),
        }
        for number, position in enumerate((*hardest, *easiest))
    ]
    adversarial = np.array(found, clean.dtype).reshape(clean.shape)
    return entries, {"clean": clean, "adversarial": adversarial}
