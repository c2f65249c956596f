"""The result of a comparison as an object and as files: text, JSON and a page."""

import dataclasses
import itertools
import pathlib
from collections.abc import Iterator, Sequence

from he_keras.evaluation.comparison import (
    CLEAN,
    WORST_CASE,
    ComparedRun,
    PairedCounts,
    PairedGroups,
    SeedGroup,
    compared_runs,
    paired_groups,
    paired_runs,
    seed_groups,
)
from he_keras.evaluation.report.page import (
    Section,
    count,
    notebook_table,
    p_value,
    page,
    threat_text,
)
from he_keras.evaluation.report.robustness_report import read_report
from he_keras.files import replacing, write_json
from he_keras.threat import ThreatModel

#: Positions listed on the page; the JSON file next to it has all.
MAX_POSITIONS = 100
_SCHEMA_VERSION = 1
_CHANCE_LEVEL = 0.05
# The console shows so many runs, pairs and differing settings; the page has all.
_MOST_SHOWN = 10


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison:
    """The result of `compare`.

    Attributes:
        runs: the evaluations, in the order given.
        pairs: every two runs under every criterion that they share.
        notes: what a reader must know about the comparison.
        groups: the runs by configuration; empty unless some differ in their seed only.
        paired_groups: every two groups.
    """

    runs: tuple[ComparedRun, ...]
    pairs: tuple[PairedCounts, ...]
    notes: tuple[str, ...]
    groups: tuple[SeedGroup, ...] = ()
    paired_groups: tuple[PairedGroups, ...] = ()

    @property
    def main_pairs(self) -> list[PairedCounts]:
        """The pairs that compare two configurations; of groups with common seeds, at equal seeds.

        If all runs form one group, every two of them are compared.
        """
        group_of = {run.letter: group for group in self.groups for run in group.runs}
        seed_of = {run.letter: run.seed for run in self.runs}
        if len(self.groups) == 1 and len(group_of) == len(self.runs):
            return list(self.pairs)

        def is_main(pair: PairedCounts) -> bool:
            first, second = (group_of.get(letter) for letter in (pair.first, pair.second))
            if first is None or second is None:
                return True
            have_common = bool(set(first.seeds) & set(second.seeds))
            same_seed = seed_of[pair.first] == seed_of[pair.second]
            return first is not second and (same_seed or not have_common)

        return [pair for pair in self.pairs if is_main(pair)]

    def to_json(self) -> dict:
        """Returns everything as plain data, with the positions of all disagreements."""
        return {
            "schema_version": _SCHEMA_VERSION,
            "threat": self.runs[0].source.report["threat"],
            "num_examples": self.runs[0].source.report["num_examples"],
            "runs": [
                {
                    "letter": run.letter,
                    "folder": str(run.source.folder),
                    "title": run.source.report.get("title"),
                    "seed": run.seed,
                    "accuracy": {name: run.accuracy(name) for name in run.holds},
                }
                for run in self.runs
            ],
            "notes": list(self.notes),
            "groups": [group.to_json() for group in self.groups],
            "paired_groups": [each.to_json() for each in self.paired_groups],
            "pairs": [pair.to_json() for pair in self.pairs],
        }

    def table(self) -> str:
        """Returns the comparison as text."""
        width = max(len(run.title) for run in self.runs) + 5
        lines = [
            f"Accuracy; {self._subject()}",
            f"{'run':<{width}}{'seed':>6}{'clean':>10}{'worst case':>12}   95 % interval",
        ]
        for run in self.runs:
            low, high = run.source.report["worst_case_interval"]
            seed = "-" if run.seed is None else run.seed
            lines.append(
                f"{run.letter:<3}{run.title:<{width - 3}}{seed:>6}{run.accuracy(CLEAN):>10.2%}"
                f"{run.accuracy(WORST_CASE):>12.2%}   {low:.2%} to {high:.2%}"
            )
        return "\n".join([*lines, *self._seed_lines(), *self._example_lines(), *self._notes()])

    def _subject(self) -> str:
        report = self.runs[0].source.report
        threat = ThreatModel.from_config(report["threat"]).text()
        return f"{threat}; the same {report['num_examples']} examples"

    def _seed_lines(self) -> Iterator[str]:
        if not self.groups:
            return
        width = max(len(group.label) for group in self.groups) + 2
        yield "Mean and standard deviation over the runs that differ in their seed only:"
        yield f"{'configuration':<{width}}{'n':>3}{'clean':>18}{'worst case':>18}"
        for group in self.groups:
            cells = "".join(f"{_spread(group, name):>18}" for name in (CLEAN, WORST_CASE))
            yield f"{group.label:<{width}}{len(group.runs):>3}{cells}"
        if self.paired_groups:
            yield "Paired by seed (Student's t):"
        for each in self.paired_groups:
            yield f"  {each.first.label} minus {each.second.label}; {_differ(each.settings)}"
            if not each.differences:
                yield f"    common seeds: {len(each.seeds)}, too few to pair: see the examples"
            for name in (CLEAN, WORST_CASE) if each.differences else ():
                found = each.differences[name]
                text = difference_text(found.mean, found.interval, found.p_value)
                yield f"    {name:<12}{text}, n = {len(each.seeds)} seeds"

    def _example_lines(self) -> Iterator[str]:
        pairs = [pair for pair in self.main_pairs if pair.criterion == WORST_CASE]
        yield "Paired by example, worst case (McNemar's exact test):"
        for pair in pairs[:_MOST_SHOWN]:
            found = difference_text(pair.difference, pair.interval, pair.p_value)
            size = f"n = {pair.num_examples}, {pair.num_disagreements} disagree"
            yield f"  {pair.first} minus {pair.second}: {found}, {size}"
        if len(pairs) > _MOST_SHOWN:
            yield f"  and {len(pairs) - _MOST_SHOWN} more pairs, which the page shows"

    def _notes(self) -> Iterator[str]:
        return (f"note: {note}" for note in self.notes)

    def __repr__(self) -> str:
        worst = ", ".join(f"{run.letter} {run.accuracy(WORST_CASE):.2%}" for run in self.runs[:8])
        rest = f" and {len(self.runs) - 8} more" if len(self.runs) > 8 else ""
        groups = ", ".join(group.label for group in self.groups[:4])
        lines = [
            f"<Comparison of {len(self.runs)} runs; {self._subject()}",
            f" worst case: {worst}{rest}",
            *([f" seeds of {groups}"] if groups else []),
            " all of it: print(comparison.table())>",
        ]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = [
            (run.letter, run.title, *(f"{run.accuracy(name):.2%}" for name in (CLEAN, WORST_CASE)))
            for run in self.runs
        ]
        remarks = [*self._seed_lines(), *self._example_lines(), *self._notes()]
        columns = ("Run", "Title", "Clean", "Worst case")
        return notebook_table(f"Accuracy; {self._subject()}", columns, rows, remarks)


def _spread(group: SeedGroup, criterion: str) -> str:
    deviation = group.standard_deviation(criterion)
    spread = "" if deviation is None else f" +- {100 * deviation:.2f}"
    return f"{100 * group.mean(criterion):.2f}{spread} %"


def _differ(settings: Sequence[str]) -> str:
    rest = f" and {len(settings) - _MOST_SHOWN} more" if len(settings) > _MOST_SHOWN else ""
    return f"they differ in {', '.join(settings[:_MOST_SHOWN])}{rest}"


def difference_text(mean: float, interval: Sequence[float] | None, chance: float | None) -> str:
    """A difference of accuracies, its interval and its p-value, as text.

    Example:
        >>> from he_keras.evaluation.report.comparison_report import difference_text
        >>> difference_text(0.02, (-0.01, 0.05), 0.21)
        '+2.00 points, 95 % interval -1.00 to +5.00, p = 0.21'
    """
    if interval is None or chance is None:
        return f"{100 * mean:+.2f} points for every seed, so no interval"
    low, high = (f"{100 * end:+.2f}" for end in interval)
    probability = p_value(chance)
    equals = "" if probability.startswith("<") else "= "
    return f"{100 * mean:+.2f} points, 95 % interval {low} to {high}, p {equals}{probability}"


def compare(folders) -> Comparison:
    """Compares evaluations that share examples and threat model.

    Args:
        folders: two or more folders that evaluations wrote, with `report.json` and
            `per_example.npz`, or run folders, whose `evaluation` is meant.

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
    folders = [_evaluation_in(pathlib.Path(folder)) for folder in folders]
    if len(folders) < 2 or len({folder.resolve() for folder in folders}) < len(folders):
        raise ValueError(
            "Nothing to compare; expected two or more different folders; received "
            f"{[str(folder) for folder in folders]}"
        )
    sources = [read_report(folder, with_gallery=False) for folder in folders]
    runs = compared_runs(sources)
    pairs, notes = paired_runs(runs)
    groups, group_notes = seed_groups(runs, pairs)
    paired = tuple(paired_groups(*two, pairs) for two in itertools.combinations(groups, 2))
    return Comparison(runs, pairs, (*notes, *group_notes), groups, paired)


def _evaluation_in(folder: pathlib.Path) -> pathlib.Path:
    inner = folder / "evaluation"
    is_run = not (folder / "report.json").exists() and (inner / "report.json").exists()
    return inner if is_run else folder


def write_comparison_html(folders, path) -> pathlib.Path:
    """Compares evaluations, and writes the result as a page and as JSON.

    Args:
        folders: as for `compare`, or what it returned.
        path: the page; the JSON file has the same name with the suffix .json.

    Returns:
        The path of the page.
    """
    path = pathlib.Path(path)
    if path.suffix not in (".html", ".htm"):
        raise ValueError(
            f"Invalid name of a page; expected one that ends in .html; received path={str(path)!r}"
        )
    comparison = folders if isinstance(folders, Comparison) else compare(folders)
    data_path = path.with_suffix(".json")
    content = _comparison_page(comparison, data_path.name)
    write_json(data_path, comparison.to_json())
    with replacing(path) as temporary:
        temporary.write_text(content, encoding="utf-8")
    return path


def _comparison_page(comparison: Comparison, data_name: str) -> str:
    """Returns the document; the file of that name has all positions."""
    runs, threat = comparison.runs, comparison.runs[0].source.report["threat"]
    shared = {
        "comparison": comparison,
        "data_name": data_name,
        "max_positions": MAX_POSITIONS,
        "runs": runs,
        "threat": threat,
        "worst_case": WORST_CASE,
    }
    main = [pair for pair in comparison.main_pairs if pair.criterion == WORST_CASE]
    found = {"by_seed": _verdicts_by_seed(comparison), "by_example": list(map(_verdict, main))}
    sections = [Section("runs", "Runs", "compared_runs.html.jinja", {**shared, **found})]
    if comparison.groups:
        sections.append(Section("seeds", "Seeds", "compared_seeds.html.jinja", shared))
    rows = {"rows": _accuracies(runs)}
    template = "compared_accuracies.html.jinja"
    sections.append(Section("accuracies", "Accuracies", template, {**shared, **rows}))
    by_letter = {run.letter: run for run in runs}
    for pair in main:
        letters = pair.first, pair.second
        values: dict = {"a": by_letter[pair.first], "b": by_letter[pair.second]}
        values["pairs"] = [
            each for each in comparison.pairs if (each.first, each.second) == letters
        ]
        title, anchor = " and ".join(letters), "-".join(letters)
        sections.append(Section(anchor, title, "compared_pair.html.jinja", {**shared, **values}))
    size = count(runs[0].source.report["num_examples"])
    remarks = [threat_text(threat), f"n = {size}, the same for every run"]
    return page("Comparison of robustness", _title(comparison), remarks, sections)


def _title(comparison: Comparison) -> str:
    """The names of what is compared: a group of seeds has the name of its configuration."""
    name_of = {run.letter: group.name for group in comparison.groups for run in group.runs}
    names = list(dict.fromkeys(name_of.get(run.letter, run.title) for run in comparison.runs))
    title = " and ".join(names[:2])
    return title + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def _verdicts_by_seed(comparison: Comparison) -> list[dict]:
    """What Student's t says about the worst case of two groups."""
    return [
        _better(each.first.label, each.second.label, found.mean, found.p_value)
        | {"num_seeds": len(each.seeds)}
        for each in comparison.paired_groups
        if (found := each.differences.get(WORST_CASE)) is not None
    ]


def _verdict(pair: PairedCounts) -> dict:
    """What McNemar's test says about the worst case of two runs."""
    return _better(pair.first, pair.second, pair.difference, pair.p_value)


def _better(first: str, second: str, difference: float, chance: float | None) -> dict:
    return {
        "first": first,
        "second": second,
        "better": first if difference >= 0 else second,
        "worse": second if difference >= 0 else first,
        "gap": abs(difference),
        "p_value": chance,
        "is_significant": chance is not None and chance < _CHANCE_LEVEL,
    }


def _accuracies(runs: Sequence[ComparedRun]) -> list[dict]:
    criteria = dict.fromkeys(name for run in runs for name in run.holds)
    return [
        {"criterion": name, "cells": [_accuracy(run, name) for run in runs]} for name in criteria
    ]


def _accuracy(run: ComparedRun, criterion: str) -> dict | None:
    """Share and interval of one run under one criterion; None if it did not run."""
    if criterion not in run.holds:
        return None
    report = run.source.report
    intervals = {attack["name"]: attack.get("interval") for attack in report["attacks"]}
    intervals |= {CLEAN: report["clean_interval"], WORST_CASE: report["worst_case_interval"]}
    return {"share": run.accuracy(criterion), "interval": intervals.get(criterion)}
