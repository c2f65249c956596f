"""The report of an evaluation: as an object, as text, and as files.

`docs/reference/report.md` describes each field and each array.
"""

import collections
import dataclasses
import datetime
import hashlib
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from he_keras.attacks.framework.ensemble import parts
from he_keras.environment import environment
from he_keras.evaluation.checks.check import Check
from he_keras.evaluation.report.page import notebook_table
from he_keras.evaluation.run.attack_runs import AttackRow, AttackRuns
from he_keras.evaluation.run.examples import Examples
from he_keras.evaluation.run.facts import for_report, section_differences, shown
from he_keras.evaluation.run.journal import read_batch
from he_keras.evaluation.statistics import share_of, wilson_interval
from he_keras.files import read_json, read_npz, write_json, write_npz
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
_REQUIRED = {
    "mode": str,
    "num_examples": int,
    "clean_accuracy": float,
    "worst_case": float,
    "threat": dict,
    "attacks": list,
}
_ARRAYS = ("labels", "clean", "broken_by")
_PICTURES = ("clean", "adversarial")
#: The files in the folder of report.json.
PER_EXAMPLE, GALLERY = "per_example.npz", "gallery.npz"
_GALLERY_SIZE = 6


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
) -> None:
    """Writes `report.json` and the arrays beside it."""
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


def _name_of(folder: pathlib.Path) -> str:
    """The name of the run if the folder is its `evaluation`, else the folder's."""
    folder = folder.resolve()
    return folder.parent.name if folder.name == "evaluation" else folder.name


def digests_of(folder: pathlib.Path) -> dict[str, str]:
    """Returns the digests of the files next to `report.json`, which `read_report` compares."""
    return {name: _digest(folder / name) for name in (PER_EXAMPLE, GALLERY)}


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


def check_belongs(folder: pathlib.Path, section: dict) -> None:
    """Raises a ValueError if a section is not of a report's model, images and threat model."""
    path = folder / "report.json"
    found = section_differences(read_json(path), section)
    if found:
        raise ValueError(
            "The report is of another evaluation; expected results of its model, images and threat "
            f"model; received {shown(found)} for {path}; use another output_dir"
        )


@dataclasses.dataclass(frozen=True)
class StoredReport:
    """A report as it lies on disk.

    Attributes:
        folder: where it lies.
        report: content of `report.json`.
        per_example: arrays of `per_example.npz`.
        gallery: arrays of `gallery.npz`; empty if the report has no gallery.
    """

    folder: pathlib.Path
    report: dict[str, Any] = dataclasses.field(repr=False)
    per_example: dict[str, np.ndarray] = dataclasses.field(repr=False)
    gallery: dict[str, np.ndarray] = dataclasses.field(repr=False)

    @property
    def num_classes(self) -> int:
        """How many classes there are, as far as names and labels tell."""
        named = len(self.report.get("class_names") or ())
        counted = len(self.report.get("confusion") or ())
        return max(named, counted, int(self.per_example["labels"].max(initial=-1)) + 1)

    def class_name(self, number) -> str:
        """The name of a class, or its number if it has no name."""
        names = self.report.get("class_names") or ()
        if isinstance(number, int) and 0 <= number < len(names):
            return str(names[number])
        return f"class {number}"


def read_report(folder, with_gallery: bool = True) -> StoredReport:
    """Reads the files of a report, and checks that they belong together.

    Args:
        folder: the evaluation's `output_dir`.
        with_gallery: read the pictures also.
    """
    folder = pathlib.Path(folder)
    report = read_json(folder / "report.json", "a report that an evaluation wrote")
    _check_report(report, folder / "report.json")
    per_example = read_per_example(folder)
    _check_lengths(per_example, report["num_examples"], folder / PER_EXAMPLE)
    _check_accuracies(report, per_example, folder)
    examples = (report.get("gallery") or ()) if with_gallery else ()
    gallery = _read_arrays(folder / GALLERY, _PICTURES) if examples else {}
    _check_lengths(gallery, len(examples), folder / GALLERY)
    _check_digests(report, [PER_EXAMPLE, *([GALLERY] if examples else [])], folder)
    return StoredReport(folder, report, per_example, gallery)


def read_per_example(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """Reads the verdicts on all examples."""
    return _read_arrays(folder / PER_EXAMPLE, _ARRAYS)


def _digest(path: pathlib.Path) -> str:
    return "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()


def _check_digests(report: dict, names: list[str], folder: pathlib.Path) -> None:
    """Equal counts do not make equal examples, so the files themselves are compared."""
    for name in names:
        expected = (report.get("files") or {}).get(name)
        if expected is not None and _digest(folder / name) != expected:
            raise ValueError(
                f"Files of different evaluations; expected the {name} that report.json was written "
                f"with; received another one in {folder}: run the evaluation again"
            )


def _check_accuracies(report: dict, per_example: dict[str, np.ndarray], folder) -> None:
    """The verdicts on the examples must add up to the accuracies, which may be rounded."""
    counted = {
        "clean_accuracy": per_example["clean"].astype(bool),
        "worst_case": per_example["broken_by"] == -1,
    }
    for name, holds in counted.items():
        share = float(holds.mean()) if len(holds) else 0.0
        if abs(share - report[name]) > max(0.5 / max(len(holds), 1), 1e-4):
            raise ValueError(
                f"Files of different evaluations; expected {name}={report[name]!r} in "
                f"per_example.npz, as report.json says; received {share} in {folder}"
            )


def _check_report(report: dict, path: pathlib.Path) -> None:
    version = report.get("schema_version")
    if version != SCHEMA_VERSION:
        raise ValueError(
            f"Unknown version of report.json; expected schema_version={SCHEMA_VERSION}, as this "
            f"version of he_keras writes it; received schema_version={version!r} in {path}"
        )
    for name, kind in _REQUIRED.items():
        value = report.get(name)
        accepted = (int, float) if kind is float else kind
        if not isinstance(value, accepted):
            raise ValueError(
                f"Incomplete report; expected {name} of type {kind.__name__}; "
                f"received {name}={value!r} in {path}"
            )


def _read_arrays(path: pathlib.Path, required) -> dict[str, np.ndarray]:
    try:
        arrays = read_npz(path)
    except FileNotFoundError as error:
        raise ValueError(
            f"Incomplete report; expected {path.name} next to report.json; "
            f"received a folder without it: {path.parent}"
        ) from error
    except ValueError as error:
        raise ValueError(
            f"Damaged report; expected NumPy arrays in {path.name}; received {path}: {error}"
        ) from error
    missing = [name for name in required if name not in arrays]
    if missing:
        raise ValueError(
            f"Incomplete report; expected the arrays {', '.join(required)} in {path.name}; "
            f"received {path} without {', '.join(missing)}"
        )
    return arrays


def _check_lengths(arrays: dict[str, np.ndarray], expected: int, path: pathlib.Path) -> None:
    lengths = {name: len(array) if array.ndim else None for name, array in arrays.items()}
    wrong = {name: length for name, length in lengths.items() if length != expected}
    if wrong:
        raise ValueError(
            f"Files of different evaluations; expected {expected} entries in every array of "
            f"{path.name}, as report.json says; received {wrong} in {path}"
        )
