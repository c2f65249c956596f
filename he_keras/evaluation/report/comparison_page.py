"""The page that compares runs: accuracies side by side, then every two of them in detail."""

import itertools
import pathlib

from he_keras.evaluation.comparison import (
    CLEAN,
    WORST_CASE,
    ComparedRun,
    Comparison,
    PairedCounts,
    compare,
)
from he_keras.evaluation.report import formatting
from he_keras.evaluation.report.page import Section, page
from he_keras.files import replacing, write_json

#: Positions listed on the page; the JSON file next to it has all.
MAX_POSITIONS = 100
_CHANCE_LEVEL = 0.05


def write_comparison_html(folders, path) -> pathlib.Path:
    """Compares evaluations, and writes the result as a page and as JSON.

    Args:
        folders: as for `compare`.
        path: the page; the JSON file has the same name with the suffix .json.

    Returns:
        The path of the page.
    """
    path = pathlib.Path(path)
    if path.suffix not in (".html", ".htm"):
        raise ValueError(
            f"Invalid name of a page; expected one that ends in .html; received path={str(path)!r}"
        )
    comparison = compare(folders)
    data_path = path.with_suffix(".json")
    content = _comparison_page(comparison, data_path.name)
    write_json(data_path, comparison.to_json())
    with replacing(path) as temporary:
        temporary.write_text(content, encoding="utf-8")
    return path


def _comparison_page(comparison: Comparison, data_name: str) -> str:
    """Returns the document.

    Args:
        comparison: what to show.
        data_name: name of the file with all positions.
    """
    runs = [_run(run) for run in comparison.runs]
    first = comparison.runs[0].source.report
    shared = {"threat": first["threat"], "runs": runs}
    verdicts = [_verdict(pair) for pair in comparison.pairs if pair.criterion == WORST_CASE]
    sections = [
        Section(
            "runs",
            "Runs",
            "compared_runs.html.jinja",
            {**shared, "verdicts": verdicts, "notes": comparison.notes},
        ),
        Section(
            "accuracies",
            "Accuracies",
            "compared_accuracies.html.jinja",
            {**shared, "rows": _accuracies(comparison)},
        ),
    ]
    for a, b in itertools.combinations(runs, 2):
        values = {**shared, "data_name": data_name, **_two_runs(comparison, a, b)}
        letters = a["letter"], b["letter"]
        sections.append(
            Section("-".join(letters), " and ".join(letters), "compared_pair.html.jinja", values)
        )
    remarks = [
        formatting.threat_text(first["threat"]),
        f"n = {formatting.count(first['num_examples'])}, the same for every run",
    ]
    title = " and ".join(run["title"] for run in runs[:2])
    title += f" and {len(runs) - 2} more" if len(runs) > 2 else ""
    return page("Comparison of robustness", title, remarks, sections)


def _run(run: ComparedRun) -> dict:
    report = run.source.report
    verdicts = [check.get("verdict") for check in report.get("checks") or []]
    return {
        "letter": run.letter,
        "title": str(report.get("title") or run.source.folder.name),
        "folder": run.source.folder,
        "report": report,
        "num_failed": verdicts.count("fail"),
        "num_warned": verdicts.count("warn"),
    }


def _verdict(pair: PairedCounts) -> dict:
    """What the paired test says about the worst case of two runs."""
    is_first_better = pair.difference >= 0
    p_value = formatting.p_value(pair.p_value)
    return {
        "first": pair.first,
        "second": pair.second,
        "better": pair.first if is_first_better else pair.second,
        "worse": pair.second if is_first_better else pair.first,
        "gap": f"{100 * abs(pair.difference):.2f}",
        "is_significant": pair.p_value < _CHANCE_LEVEL,
        "p_value": p_value if p_value.startswith("<") else f"= {p_value}",
    }


def _accuracies(comparison: Comparison) -> list[dict]:
    criteria = dict.fromkeys(name for run in comparison.runs for name in run.holds)
    return [
        {"criterion": name, "cells": [_accuracy(run, name) for run in comparison.runs]}
        for name in criteria
    ]


def _accuracy(run: ComparedRun, criterion: str) -> dict | None:
    """Share and interval of one run under one criterion; None if it did not run."""
    if criterion not in run.holds:
        return None
    report = run.source.report
    intervals = {attack["name"]: attack.get("interval") for attack in report["attacks"]}
    intervals |= {CLEAN: report["clean_interval"], WORST_CASE: report["worst_case_interval"]}
    return {"share": float(run.holds[criterion].mean()), "interval": intervals.get(criterion)}


def _two_runs(comparison: Comparison, a: dict, b: dict) -> dict:
    """How often two runs differ under each criterion, and on which examples."""
    letters = a["letter"], b["letter"]
    return {
        "a": a["letter"],
        "b": b["letter"],
        "title_of_a": a["title"],
        "title_of_b": b["title"],
        "pairs": [_pair(pair) for pair in comparison.pairs if (pair.first, pair.second) == letters],
        "worst_case": WORST_CASE,
        "max_positions": MAX_POSITIONS,
    }


def _pair(pair: PairedCounts) -> dict:
    return {
        "criterion": pair.criterion,
        "both_hold": pair.both_hold,
        "only_first": pair.only_first.tolist(),
        "only_second": pair.only_second.tolist(),
        "both_broken": pair.both_broken,
        "difference": pair.difference,
        "p_value": pair.p_value,
    }
