"""The page of one evaluation: what each of its sections needs, as plain values for its template."""

import collections
import math
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from he_keras.data import corruptions as corruption_set
from he_keras.evaluation.report.page import (
    Section,
    can_show,
    is_number,
    make_album,
    moment,
    page,
)
from he_keras.evaluation.report.robustness_report import StoredReport, check_belongs, read_report
from he_keras.files import read_json, replacing, write_json

#: More classes than this do not fit a matrix that anyone can read.
MAX_MATRIX_CLASSES = 20
_LIST_LENGTH = 20
# Bad news first. A verdict that this page does not know may be worse: it comes before all others.
_VERDICTS = ("fail", "warn", "pass", "skipped")
# They give no reason to doubt.
_FOLDED = ("pass", "skipped")
# Smaller images are enlarged on the page, and would blur.
_CRISP_BELOW = 96

# The chart of accuracy over epsilon, in pixels.
_WIDTH, _HEIGHT = 560, 300
# Room for the larger words of a phone.
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 16, 16, 56
_ROUND_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_GRID = (0.0, 0.25, 0.5, 0.75, 1.0)


def write_html(folder) -> pathlib.Path:
    """Writes `report.html` next to the `report.json` of an evaluation.

    The page reads `report.json`, `per_example.npz` and, if the report has a gallery, `gallery.npz`;
    docs/reference/report.md describes them. It opens offline: style, script and pictures are
    inside.

    Args:
        folder: the evaluation's `output_dir`.

    Returns:
        The path of the page.

    Example:
        >>> from he_keras.evaluation import report
        >>> report.write_html("no/such/folder")
        Traceback (most recent call last):
        ValueError: Cannot read report.json; expected a report that an evaluation wrote; ...
    """
    stored = read_report(folder)
    path = stored.folder / "report.html"
    content = _report_page(stored)
    with replacing(path) as temporary:
        temporary.write_text(content, encoding="utf-8")
    return path


def add_to_report(folder: pathlib.Path, **sections) -> pathlib.Path:
    """Adds sections of `docs/reference/report.md` to a report; returns the path of the page."""
    path = folder / "report.json"
    for section in sections.values():
        check_belongs(folder, section)
    write_json(path, {**read_json(path), **sections})
    return write_html(folder)


def _report_page(stored: StoredReport) -> str:
    report = stored.report
    facts = {
        "evaluated": moment(report.get("created")),
        "commit": (report.get("environment") or {}).get("commit"),
    }
    built = (
        ("result", "Result", _result(stored)),
        ("attacks", "Attacks", _attacks(stored)),
        ("cosine-head", "Cosine head: which loss attacks it", _cosine_head(stored)),
        ("epsilon-curve", "Accuracy over epsilon", _epsilon_curve(stored)),
        ("checks", "Checks", _checks(stored)),
        ("classes", "Classes", _classes(stored)),
        ("gallery", "Examples", _gallery(stored)),
        ("corruptions", "Common corruptions", _corruptions(stored)),
        ("transfer", "Transfer between models", _transfer(stored)),
        ("provenance", "Environment and settings", _provenance(stored)),
    )
    shared = {"report": report, "threat": report["threat"], "num_classes": stored.num_classes}
    sections = [
        Section(anchor, title, f"{anchor.replace('-', '_')}.html.jinja", {**shared, **values})
        for anchor, title, values in built
        if values is not None
    ]
    title = str(report.get("title") or "Untitled evaluation")
    remarks = [f"{name} {value}" for name, value in facts.items() if value]
    return page("Robustness report", title, remarks, sections)


def _result(stored: StoredReport) -> dict:
    checks = stored.report.get("checks") or []
    failed, warned, passed = (
        [check for check in checks if check.get("verdict") == verdict]
        for verdict in ("fail", "warn", "pass")
    )
    return {"checks": checks, "failed": failed, "warned": warned, "passed": passed}


def _attacks(stored: StoredReport) -> dict:
    """Leaves out the column "Left over" if the accuracy under each attack already says the same."""
    attacks = stored.report["attacks"]
    rows = [row for attack in attacks for row in [attack, *(attack.get("stages") or [])]]
    same = all(row.get("remaining") == row.get("robust_accuracy") for row in rows)
    return {"shows_left_over": not same}


def _cosine_head(stored: StoredReport) -> dict | None:
    """The panel that cosine heads must have; nothing for others."""
    panel = stored.report.get("he_panel") or {}
    rows = panel.get("rows") or []
    if not rows:
        return None
    known = list(filter(is_number, (row.get("robust_accuracy") for row in rows)))
    # Cosines of 1 for one class and -1 for all others: what softmax makes of them at scale 1.
    likeliest = math.exp(2.0) / (math.exp(2.0) + max(stored.num_classes - 1, 1))
    return {"panel": panel, "lowest": min(known, default=math.nan), "likeliest": likeliest}


def _epsilon_curve(stored: StoredReport) -> dict | None:
    curve = stored.report.get("epsilon_curve") or {}
    measured = [
        (point.get("epsilon"), point.get("accuracy")) for point in curve.get("points") or []
    ]
    known = [point for point in measured if all(map(is_number, point))]
    if not known:
        return None
    chart, points = _places_on_chart(sorted(known), stored.report["threat"], stored.num_classes)
    return {"curve": curve, "chart": chart, "points": points}


def _checks(stored: StoredReport) -> dict:
    checks = stored.report.get("checks") or []
    ranked = sorted(checks, key=lambda check: _rank(check.get("verdict")))
    counts = collections.Counter(str(check.get("verdict")) for check in checks)
    known = {verdict: counts.pop(verdict) for verdict in _VERDICTS if verdict in counts}
    folded = {
        verdict: [check for check in ranked if check.get("verdict") == verdict]
        for verdict in _FOLDED
    }
    return {
        "checks": checks,
        "open_checks": [each for each in ranked if each.get("verdict") not in folded],
        "folded_checks": {verdict: found for verdict, found in folded.items() if found},
        "verdict_counts": {**known, **counts},
    }


def _rank(verdict) -> int:
    return _VERDICTS.index(verdict) if verdict in _VERDICTS else -1


def _classes(stored: StoredReport) -> dict:
    """Accuracy by class, and the confusions that attacks caused."""
    labels = stored.per_example["labels"]
    clean = stored.per_example["clean"].astype(bool)
    robust = stored.per_example["broken_by"] == -1
    classes: list[dict[str, Any]] = []
    for label in np.unique(labels).tolist():
        chosen = labels == label
        classes.append(
            {
                "name": stored.class_name(label),
                "size": int(chosen.sum()),
                "clean": float(clean[chosen].mean()),
                "robust": float(robust[chosen].mean()),
            }
        )
    num_measured = len(classes)
    if num_measured > MAX_MATRIX_CLASSES:
        classes = sorted(classes, key=lambda each: each["robust"])[:_LIST_LENGTH]
    return {"classes": classes, "num_measured": num_measured, **_confusions(stored)}


def _confusions(stored: StoredReport) -> dict:
    """A matrix for a few classes, a list of the most frequent confusions for many."""
    counts = np.array(stored.report.get("confusion") or [], dtype=np.int64)
    if counts.ndim != 2 or not counts.any():
        return {"confusions": []}
    order = np.argsort(-counts, axis=None, kind="stable")[:_LIST_LENGTH]
    confusions = [
        {
            "name": stored.class_name(int(label)),
            "taken_for": stored.class_name(int(taken_for)),
            "count": int(counts[label, taken_for]),
            "share": float(counts[label, taken_for] / counts.sum()),
        }
        for label, taken_for in zip(*np.unravel_index(order, counts.shape), strict=True)
        if counts[label, taken_for]
    ]
    matrix = [
        {"name": stored.class_name(label), "counts": row}
        for label, row in enumerate(counts.tolist())
    ]
    return {
        "confusions": confusions,
        "confusion_matrix": matrix if len(counts) <= MAX_MATRIX_CLASSES else [],
        "largest_confusion": int(counts.max()),
        "num_classes": len(counts),
    }


def _gallery(stored: StoredReport) -> dict | None:
    """Clean image, adversarial image and magnified change of some examples."""
    examples = stored.report.get("gallery") or []
    if not examples:
        return None
    clean, adversarial = stored.gallery["clean"], stored.gallery["adversarial"]
    if clean.shape != adversarial.shape or not can_show(clean):
        return {"album": None, "shape": clean.shape[1:]}
    album = make_album(clean, adversarial, stored.report["threat"].get("bounds") or (0, 1))
    groups: dict[str, list[dict]] = {}
    for example, triple in zip(examples, album.triples, strict=True):
        shown = {
            **example,
            "pictures": triple,
            "label": stored.class_name(example.get("label")),
            "before": stored.class_name(example.get("clean_prediction")),
            "after": stored.class_name(example.get("adversarial_prediction")),
        }
        groups.setdefault(str(example.get("kind")), []).append(shown)
    is_crisp = album.side < _CRISP_BELOW
    return {"album": album, "groups": list(groups.items()), "is_crisp": is_crisp}


def _corruptions(stored: StoredReport) -> dict | None:
    """Accuracy for each corruption and severity, if that was measured."""
    measured = stored.report.get("corruptions") or {}
    accuracies = measured.get("accuracy") or {}
    if not accuracies:
        return None
    # Reports that do not name the severities have all five.
    severities = list(measured.get("severities") or corruption_set.SEVERITIES)
    for name, shares in accuracies.items():
        if len(shares) != len(severities):
            raise ValueError(
                "Damaged report; expected one accuracy for each of the severities "
                f"{severities}; received {len(shares)} for {name}"
            )
    names = [name.replace("_", " ") for name in accuracies]
    heat_map = _heat_map(names, accuracies.values())
    return {"measured": measured, "severities": severities, **heat_map}


def _transfer(stored: StoredReport) -> dict | None:
    """How many images survive what was crafted for another model, if that was measured."""
    measured = stored.report.get("transfer") or {}
    names = measured.get("names") or []
    if not names:
        return None
    return {"measured": measured, **_heat_map(names, measured.get("robust_accuracy") or [])}


def _heat_map(names: Iterable[str], rows: Iterable[list]) -> dict:
    """Rows of accuracies: no shade for the highest of all, the strongest for the lowest."""
    rows = list(rows)
    known = [share for shares in rows for share in shares if is_number(share)]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)

    def strength(share) -> float:
        is_shaded = is_number(share) and high > low
        return (high - share) / (high - low) if is_shaded else 0.0

    shown = []
    for name, shares in zip(names, rows, strict=False):
        own = [share for share in shares if is_number(share)]
        shown.append(
            {
                "name": name,
                "cells": [{"share": share, "strength": strength(share)} for share in shares],
                "mean": sum(own) / len(own) if own else None,
            }
        )
    return {"rows": shown, "lowest": low, "highest": high}


def _provenance(stored: StoredReport) -> dict:
    """Everything that is needed to run this evaluation again."""
    attacks = []
    for attack in stored.report["attacks"]:
        shown = {"settings": attack.get("settings") or {}}
        stages = attack.get("stages") or []
        if stages:
            shown["stages"] = {stage.get("name"): stage.get("settings") or {} for stage in stages}
        attacks.append({"name": attack.get("name"), "shown": shown})
    return {"attack_settings": attacks}


def _places_on_chart(
    points: Sequence[tuple[float, float]], threat: dict, num_classes: int
) -> tuple[dict, list[dict]]:
    """Returns the places of all lines and words on the chart in pixels, and those of the points.

    Args:
        points: pairs of epsilon and accuracy, the smallest epsilon first.
        threat: the report's threat model.
        num_classes: how many there are; their inverse is the accuracy of guessing.
    """
    # A single point at 0 is a curve also.
    highest = max(points[-1][0], 1e-12)
    stored = threat.get("epsilon")
    epsilon: float = stored if stored is not None and is_number(stored) else math.inf
    is_255 = threat.get("norm") == "linf" and list(threat.get("bounds") or ()) == [0, 1]
    unit = 1.0 / 255.0 if is_255 else 1.0

    def across(value: float) -> float:
        return round(_LEFT + (_WIDTH - _LEFT - _RIGHT) * value / highest, 1)

    def down(accuracy: float) -> float:
        return round(_TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - accuracy), 1)

    shows_epsilon = epsilon <= highest
    chart = {
        "width": _WIDTH,
        "height": _HEIGHT,
        "left": across(0.0),
        "middle": across(highest / 2),
        "right": across(highest),
        "top": down(1.0),
        "bottom": down(0.0),
        "in_units_of_255": is_255,
        "grid": [{"accuracy": accuracy, "y": down(accuracy)} for accuracy in _GRID],
        "ticks": [
            {"label": f"{tick:g}", "x": across(tick * unit)} for tick in _ticks(highest / unit)
        ],
        "epsilon_x": across(epsilon) if shows_epsilon else None,
        "epsilon_is_near_right": shows_epsilon and epsilon > 0.7 * highest,
        "guessing_y": down(1.0 / num_classes) if num_classes > 1 else None,
    }
    shown = [
        {"epsilon": value, "accuracy": accuracy, "x": across(value), "y": down(accuracy)}
        for value, accuracy in points
    ]
    return chart, shown


def _ticks(highest: float) -> list[float]:
    """Round numbers from 0 to `highest`, at most seven."""
    rough = highest / 6.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(size * power for size in _ROUND_STEPS if size * power >= rough * (1 - 1e-9))
    return [round(k * step, 12) for k in range(int(highest / step * (1 + 1e-9)) + 1)]
