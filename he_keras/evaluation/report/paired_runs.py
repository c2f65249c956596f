"""What a comparison of runs consists of."""

import dataclasses

import numpy as np

from he_keras.evaluation.report.stored_report import StoredReport

#: The two criteria that every run has, beside its attacks.
CLEAN, WORST_CASE = "clean", "worst case"
_SCHEMA_VERSION = 1


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
