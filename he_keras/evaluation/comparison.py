"""Compares evaluations of several models on the same examples, example by example.

Two accuracies with overlapping intervals may still differ for certain. The models saw the same
examples, and only those count on which they disagree. McNemar's test asks how likely so uneven a
split of the disagreements would be if neither model were better.

Paper: McNemar, "Note on the sampling error of the difference between correlated proportions or
percentages", Psychometrika 12 (1947); here the exact binomial form.
"""

import dataclasses
import itertools
import pathlib

import numpy as np

from he_keras.evaluation.report.stored_report import StoredReport, read_report
from he_keras.evaluation.run.examples import PREFIX
from he_keras.evaluation.statistics import mcnemar_p_value

#: The two criteria that every run has, in addition to its attacks.
CLEAN, WORST_CASE = "clean", "worst case"
_SCHEMA_VERSION = 1
_UNKNOWN_DATA = (
    "Not every report says which images it is about, so it is not certain that they are the same."
)
# Settings that change what an attack costs and not what it is.
_NEUTRAL_SETTINGS = frozenset({"batch_size", "name", "threat"})


@dataclasses.dataclass(frozen=True)
class ComparedRun:
    """One evaluation of a comparison.

    Attributes:
        letter: short name, from A.
        source: its files.
        holds: for each criterion (clean, worst case, attacks) the flags "classified correctly".
    """

    letter: str
    source: StoredReport
    holds: dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class PairedCounts:
    """Two runs under one criterion.

    Attributes:
        first: letter of one run.
        second: letter of the other.
        criterion: clean, worst case, or an attack.
        both_hold: examples that both classify correctly.
        only_first: positions of the examples that only the first does.
        only_second: positions of the examples that only the second does.
        both_broken: examples that neither does.
        p_value: of McNemar's exact two-sided test.
    """

    first: str
    second: str
    criterion: str
    both_hold: int
    only_first: np.ndarray
    only_second: np.ndarray
    both_broken: int
    p_value: float

    @property
    def difference(self) -> float:
        """Accuracy of the first run minus that of the second."""
        size = self.both_hold + len(self.only_first) + len(self.only_second) + self.both_broken
        return (len(self.only_first) - len(self.only_second)) / size

    def to_json(self) -> dict:
        """Returns everything as plain data."""
        return {
            "first": self.first,
            "second": self.second,
            "criterion": self.criterion,
            "both_hold": self.both_hold,
            "only_first": len(self.only_first),
            "only_second": len(self.only_second),
            "both_broken": self.both_broken,
            "difference": self.difference,
            "p_value": self.p_value,
            "only_first_positions": self.only_first.tolist(),
            "only_second_positions": self.only_second.tolist(),
        }


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The result of `compare`.

    Attributes:
        runs: the evaluations, in the order given.
        pairs: every two runs under every criterion that they share.
        notes: what a reader must know about the comparison.
    """

    runs: tuple[ComparedRun, ...]
    pairs: tuple[PairedCounts, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict:
        """Returns everything as plain data, with the positions of all disagreements."""
        return {
            "schema_version": _SCHEMA_VERSION,
            "runs": [
                {
                    "letter": run.letter,
                    "folder": str(run.source.folder),
                    "title": run.source.report.get("title"),
                    "accuracy": {name: float(flags.mean()) for name, flags in run.holds.items()},
                }
                for run in self.runs
            ],
            "notes": list(self.notes),
            "pairs": [pair.to_json() for pair in self.pairs],
        }


def compare(folders) -> Comparison:
    """Compares evaluations that share examples and threat model.

    Args:
        folders: two or more folders that evaluations wrote, with `report.json` and
            `per_example.npz`.

    Example:
        >>> from he_keras.evaluation import compare
        >>> compare(["runs/a/evaluation"])
        Traceback (most recent call last):
        ValueError: Nothing to compare; expected two or more different folders; received ...
    """
    if isinstance(folders, str | pathlib.Path):
        raise TypeError(
            f"Invalid folders; expected a sequence of folders; received folders={folders!r}"
        )
    folders = [pathlib.Path(folder) for folder in folders]
    if len(folders) < 2 or len({folder.resolve() for folder in folders}) < len(folders):
        raise ValueError(
            "Nothing to compare; expected two or more different folders; received "
            f"{[str(folder) for folder in folders]}"
        )
    sources = [read_report(folder, with_gallery=False) for folder in folders]
    for source in sources[1:]:
        _check_same_examples(sources[0], source)
    runs = tuple(
        ComparedRun(_letter(number), source, _holds(source))
        for number, source in enumerate(sources)
    )
    pairs, notes = [], []
    for first, second in itertools.combinations(runs, 2):
        criteria, pair_notes = _shared_criteria(first, second)
        pairs += [_paired_counts(first, second, criterion) for criterion in criteria]
        notes += pair_notes
    if not all(map(_data_digest, sources)):
        notes.append(_UNKNOWN_DATA)
    return Comparison(runs, tuple(pairs), tuple(notes))


def _letter(number: int) -> str:
    """A, B, ..., Z, A1, B1, ..."""
    lap, rest = divmod(number, 26)
    return chr(ord("A") + rest) + (str(lap) if lap else "")


def _check_same_examples(first: StoredReport, other: StoredReport) -> None:
    def refuse(what: str, expected, received) -> None:
        raise ValueError(
            f"Runs that cannot be compared: different {what}; expected {expected}, as in "
            f"{first.folder}; received {received} in {other.folder}"
        )

    sizes = [source.report["num_examples"] for source in (first, other)]
    if sizes[0] != sizes[1]:
        refuse("numbers of examples", f"num_examples={sizes[0]}", f"num_examples={sizes[1]}")
    threats = [_threat(source) for source in (first, other)]
    if threats[0] != threats[1]:
        refuse("threat models", threats[0], threats[1])
    labels = [source.per_example["labels"] for source in (first, other)]
    different = np.flatnonzero(labels[0] != labels[1])
    if len(different):
        where = int(different[0])
        refuse(
            f"labels at {len(different)} positions",
            f"label {labels[0][where]} at position {where}",
            f"label {labels[1][where]}",
        )
    data = [_data_digest(source) for source in (first, other)]
    if all(data) and data[0] != data[1]:
        refuse("images with equal labels", f"data {data[0]:.19}", f"data {data[1]:.19}")


def _threat(source: StoredReport) -> dict:
    """Returns what two threat models must agree on, however their numbers are written."""
    threat = source.report["threat"]
    bounds = [float(bound) for bound in threat.get("bounds") or ()]
    return {"norm": threat.get("norm"), "epsilon": threat.get("epsilon"), "bounds": bounds}


def _data_digest(source: StoredReport) -> str | None:
    """The digest of images and labels; None where it was not recorded, or depended on batches."""
    digest = str((source.report.get("settings") or {}).get("data"))
    return digest if digest.startswith(PREFIX) else None


def _holds(source: StoredReport) -> dict[str, np.ndarray]:
    arrays = source.per_example
    holds = {CLEAN: arrays["clean"].astype(bool), WORST_CASE: arrays["broken_by"] == -1}
    for attack in source.report["attacks"]:
        name = attack.get("name")
        if name in arrays:
            holds[name] = arrays[name].astype(bool)
    return holds


def _shared_criteria(first: ComparedRun, second: ComparedRun) -> tuple[list[str], list[str]]:
    """What both runs measured in the same way, and notes on what they did not."""
    pair = f"{first.letter} and {second.letter}"
    shared = [name for name in first.holds if name in second.holds]
    reports = first.source.report, second.source.report
    modes = [report["mode"] for report in reports]
    if modes[0] != modes[1]:
        note = (
            f"{pair}: single attacks are not compared, because one run attacked every example "
            "with each attack and the other only those left over."
        )
        return [CLEAN, WORST_CASE], [note]
    attacks = [{attack["name"]: attack for attack in report["attacks"]} for report in reports]
    notes = []
    if list(attacks[0]) != list(attacks[1]):
        notes.append(
            f"{pair}: the runs did not use the same attacks in the same order. The worst case of "
            "the run with fewer or weaker ones is too high compared with the other's."
        )
        if modes[0] == "survivors":
            # An attack's flags count what the attacks before it broke: they must be the same.
            common = itertools.takewhile(
                lambda names: names[0] == names[1], zip(*attacks, strict=False)
            )
            alike = {names[0] for names in common}
            shared = [name for name in shared if name in {CLEAN, WORST_CASE} | alike]
    for name in shared[2:]:
        differing = _differing_settings(attacks[0][name], attacks[1][name])
        if differing:
            notes.append(f"{pair}: {name} ran with different settings ({', '.join(differing)}).")
    return shared, notes


def _differing_settings(first: dict, second: dict) -> list[str]:
    settings = [attack.get("settings") or {} for attack in (first, second)]
    names = sorted((settings[0].keys() | settings[1].keys()) - _NEUTRAL_SETTINGS)
    return [
        f"{name} {settings[0].get(name)!r} and {settings[1].get(name)!r}"
        for name in names
        if settings[0].get(name) != settings[1].get(name)
    ]


def _paired_counts(first: ComparedRun, second: ComparedRun, criterion: str) -> PairedCounts:
    holds = first.holds[criterion], second.holds[criterion]
    only_first = np.flatnonzero(holds[0] & ~holds[1])
    only_second = np.flatnonzero(~holds[0] & holds[1])
    return PairedCounts(
        first=first.letter,
        second=second.letter,
        criterion=criterion,
        both_hold=int((holds[0] & holds[1]).sum()),
        only_first=only_first,
        only_second=only_second,
        both_broken=int((~holds[0] & ~holds[1]).sum()),
        p_value=mcnemar_p_value(len(only_first), len(only_second)),
    )
