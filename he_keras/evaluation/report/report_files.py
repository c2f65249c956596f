"""The files of one report, written and read: `report.json`, and the arrays beside it.

`docs/reference/report.md` describes each field and each array.
"""

import dataclasses
import hashlib
import pathlib
from typing import Any

import numpy as np

from he_keras.attacks.framework.ensemble import parts
from he_keras.evaluation.report.robustness_report import SCHEMA_VERSION, RobustnessReport
from he_keras.evaluation.run.attack_runs import AttackRuns
from he_keras.evaluation.run.examples import Examples
from he_keras.evaluation.run.facts import for_report, section_differences, shown
from he_keras.evaluation.run.journal import read_batch
from he_keras.files import read_json, read_npz, write_json, write_npz

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
