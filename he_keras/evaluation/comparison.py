"""Compares evaluations of several models, example by example and seed by seed.

Two accuracies with overlapping intervals may still differ for certain. The models saw the same
examples, and only those count on which they disagree. McNemar's test asks how likely so uneven a
split of the disagreements would be if neither model were better.

That says which of two networks is better, and not which way of training. Runs whose configurations
differ in the seed only form a group. Two groups are paired by the seeds that they share. Student's
t asks how likely such differences would be if neither way of training were better.

Papers: McNemar, "Note on the sampling error of the difference between correlated proportions or
percentages", Psychometrika 12 (1947), here the exact binomial form; Student, "The probable error of
a mean", Biometrika 6 (1908).
"""

import collections
import dataclasses
import itertools
import json
from collections.abc import Sequence

import numpy as np

from he_keras.configurable import flat_settings
from he_keras.evaluation.report.robustness_report import StoredReport
from he_keras.evaluation.run.examples import PREFIX
from he_keras.evaluation.statistics import MeanDifference, mcnemar_interval, mcnemar_p_value

#: The two criteria that every run has, in addition to its attacks.
CLEAN, WORST_CASE = "clean", "worst case"
_UNKNOWN_DATA = (
    "Not every report says which images it is about, so it is not certain that they are the same."
)
# Settings that change what an attack costs and not what it is.
_NEUTRAL_SETTINGS = frozenset({"batch_size", "name", "threat"})
# What may differ between two trainings of one configuration, beside the seed.
_NEUTRAL_TRAINING = frozenset({"name", "seed", "data.data_dir"})


@dataclasses.dataclass(frozen=True)
class ComparedRun:
    """One evaluation of a comparison.

    Attributes:
        letter: short name, from A.
        source: its files.
        holds: for each criterion (clean, worst case, attacks) the flags "classified correctly".
    """

    letter: str
    source: StoredReport = dataclasses.field(repr=False)
    holds: dict[str, np.ndarray] = dataclasses.field(repr=False)

    @property
    def title(self) -> str:
        """The name of the run."""
        title = str(self.source.report.get("title") or self.source.folder.name)
        return title.removeprefix("Robustness of ")

    @property
    def training(self) -> dict:
        """The configuration that the model was trained with; empty if it is not known."""
        return self.source.report.get("training") or {}

    @property
    def seed(self) -> int | None:
        """The seed of the training, if it is known."""
        return self.training.get("seed")

    def count_checks(self, verdict: str) -> int:
        """How many checks of its evaluation ended so."""
        checks = self.source.report.get("checks") or []
        return sum(check.get("verdict") == verdict for check in checks)

    def accuracy(self, criterion: str) -> float:
        """The share of all examples that it classifies correctly."""
        return float(self.holds[criterion].mean())


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
    only_first: np.ndarray = dataclasses.field(repr=False)
    only_second: np.ndarray = dataclasses.field(repr=False)
    both_broken: int
    p_value: float

    @property
    def difference(self) -> float:
        """Accuracy of the first run minus that of the second."""
        return (len(self.only_first) - len(self.only_second)) / self.num_examples

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the difference."""
        return mcnemar_interval(len(self.only_first), len(self.only_second), self.num_examples)

    @property
    def num_examples(self) -> int:
        """How many examples both runs saw."""
        return self.both_hold + self.num_disagreements + self.both_broken

    @property
    def num_disagreements(self) -> int:
        """How many examples one run holds and the other does not."""
        return len(self.only_first) + len(self.only_second)

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
            "interval": list(self.interval),
            "p_value": self.p_value,
            "only_first_positions": self.only_first.tolist(),
            "only_second_positions": self.only_second.tolist(),
        }


@dataclasses.dataclass(frozen=True)
class SeedGroup:
    """Runs whose trainings differ in their seed only; one run alone is a group as well.

    Attributes:
        name: of the configuration.
        runs: one for each seed.
        criteria: what all of them measured in the same way.
    """

    name: str
    runs: tuple[ComparedRun, ...]
    criteria: tuple[str, ...]

    @property
    def label(self) -> str:
        """Its name and its runs."""
        return f"{self.name} ({', '.join(run.letter for run in self.runs)})"

    @property
    def seeds(self) -> list[int]:
        """The seeds of its runs."""
        return [run.seed for run in self.runs if run.seed is not None]

    def mean(self, criterion: str) -> float:
        """The mean accuracy over all seeds."""
        return float(np.mean([run.accuracy(criterion) for run in self.runs]))

    def standard_deviation(self, criterion: str) -> float | None:
        """The standard deviation over all seeds, with n - 1; None for one seed."""
        accuracies = [run.accuracy(criterion) for run in self.runs]
        return float(np.std(accuracies, ddof=1)) if len(accuracies) > 1 else None

    def to_json(self) -> dict:
        """Returns everything as plain data."""
        accuracy = {
            name: {"mean": self.mean(name), "standard_deviation": self.standard_deviation(name)}
            for name in self.criteria
        }
        letters = [run.letter for run in self.runs]
        return {"name": self.name, "runs": letters, "seeds": self.seeds, "accuracy": accuracy}


@dataclasses.dataclass(frozen=True)
class PairedGroups:
    """Two groups, paired by the seeds that they share.

    Attributes:
        first: one group.
        second: the other.
        settings: how their configurations differ, as text.
        seeds: those that both have.
        differences: accuracy of the first minus that of the second, for each criterion; empty if
            the groups share fewer than two seeds.
    """

    first: SeedGroup
    second: SeedGroup
    settings: tuple[str, ...]
    seeds: tuple[int, ...]
    differences: dict[str, MeanDifference]

    def to_json(self) -> dict:
        """Returns everything as plain data."""
        return {
            "first": [run.letter for run in self.first.runs],
            "second": [run.letter for run in self.second.runs],
            "settings": list(self.settings),
            "seeds": list(self.seeds),
            "differences": {name: each._asdict() for name, each in self.differences.items()},
        }


def compared_runs(sources: Sequence[StoredReport]) -> tuple[ComparedRun, ...]:
    """Returns the runs that the reports are about; raises a ValueError if they cannot be compared.

    They must be about the same examples, and about the same threat model.
    """
    for source in sources[1:]:
        _check_same_examples(sources[0], source)
    return tuple(
        ComparedRun(_letter(number), source, _holds(source))
        for number, source in enumerate(sources)
    )


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


def paired_runs(runs: Sequence[ComparedRun]) -> tuple[tuple[PairedCounts, ...], tuple[str, ...]]:
    """Returns every two runs under every criterion that they share, and notes on the others."""
    pairs, notes = [], []
    for first, second in itertools.combinations(runs, 2):
        criteria, pair_notes = _shared_criteria(first, second)
        pairs += [_paired_counts(first, second, criterion) for criterion in criteria]
        notes += pair_notes
    if not all(_data_digest(run.source) for run in runs):
        notes.append(_UNKNOWN_DATA)
    return tuple(pairs), tuple(notes)


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


def seed_groups(
    runs: Sequence[ComparedRun], pairs: Sequence[PairedCounts]
) -> tuple[tuple[SeedGroup, ...], tuple[str, ...]]:
    """Returns the runs by configuration, and notes.

    There are no groups unless some runs differ in their seed only.
    """
    alike: dict[str, list[ComparedRun]] = collections.defaultdict(list)
    for run in runs:
        if run.seed is not None:
            alike[_configuration(run)].append(run)
    groups, notes = [], []
    for members in alike.values():
        if len({run.seed for run in members}) == len(members):
            groups.append(_group(members, pairs))
            continue
        letters = " and ".join(run.letter for run in members)
        notes.append(f"{letters}: configuration and seed are the same, so they form no group.")
    if all(len(group.runs) == 1 for group in groups):
        return (), tuple(notes)
    unknown = ", ".join(run.letter for run in runs if run.seed is None)
    if unknown:
        notes.append(f"{unknown}: no report says how the model was trained, so it is in no group.")
    return tuple(groups), tuple(notes)


def _configuration(run: ComparedRun) -> str:
    """What the runs of a group have in common."""
    model = (run.source.report.get("settings") or {}).get("model") or {}
    # Another network may have been evaluated in the run's folder.
    function = {key: model.get(key) for key in ("class", "config", "conversion")}
    return json.dumps([_settings(run), function], sort_keys=True)


def _group(members: Sequence[ComparedRun], pairs: Sequence[PairedCounts]) -> SeedGroup:
    shared = {(pair.first, pair.second, pair.criterion) for pair in pairs}
    two = list(itertools.combinations([run.letter for run in members], 2))
    criteria = [name for name in members[0].holds if all((*each, name) in shared for each in two)]
    name = str(members[0].training.get("name") or members[0].title)
    return SeedGroup(name, tuple(members), tuple(criteria))


def _settings(run: ComparedRun) -> dict:
    """The configuration of a training, flat, without what does not matter to the model."""
    return {
        key: value
        for key, value in flat_settings(run.training).items()
        if key not in _NEUTRAL_TRAINING and not key.startswith("evaluation.")
    }


def paired_groups(
    first: SeedGroup, second: SeedGroup, pairs: Sequence[PairedCounts]
) -> PairedGroups:
    """Returns how the accuracies of two groups differ, seed by seed."""
    settings = [_settings(group.runs[0]) for group in (first, second)]
    differing = [
        f"{key}: {settings[0].get(key)} -> {settings[1].get(key)}"
        for key in sorted(settings[0].keys() | settings[1].keys())
        if settings[0].get(key) != settings[1].get(key)
    ]
    letters = [
        {seed: run.letter for seed, run in zip(group.seeds, group.runs, strict=True)}
        for group in (first, second)
    ]
    seeds = sorted(letters[0].keys() & letters[1].keys())
    found = {(pair.first, pair.second, pair.criterion): pair.difference for pair in pairs}
    found |= {(second, first, name): -value for (first, second, name), value in found.items()}
    rows = {
        name: [found.get((letters[0][seed], letters[1][seed], name)) for seed in seeds]
        for name in first.criteria
    }
    differences = {
        name: MeanDifference.of(row)
        for name, row in rows.items()
        if len(row) > 1 and None not in row and name in second.criteria
    }
    return PairedGroups(first, second, tuple(differing), tuple(seeds), differences)
