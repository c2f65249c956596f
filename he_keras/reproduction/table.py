"""A table with what was measured beside what was published: Markdown, CSV, JSON and a picture."""

import csv
import io
import math
import pathlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from he_keras.drawing import new_figure, save_figure
from he_keras.environment import environment
from he_keras.evaluation import protocols
from he_keras.experiment import catalog
from he_keras.files import replacing, write_json
from he_keras.reproduction import scales
from he_keras.reproduction.cells import Cell, describe
from he_keras.reproduction.measure import can_measure
from he_keras.reproduction.models import EVALUATED, FROM_CHECKPOINT, Run, Runs

_PERCENT = 100.0
_SHARES = ("clean", "attack", "corruption")
#: A picture has colours for differences of so many points; larger ones look like these.
_MOST_POINTS = 20.0
#: A statement about many cells or models names so many of them.
_SHOWN_NAMES = 6
_SCALE_NOTES = {
    "cpu": "A small network, few epochs and fewer test images: not the paper's experiment.",
    "smoke": "Two steps of training on synthetic images, half of which have the model's answer as "
    "label: these numbers mean nothing. They show that every cell can be computed.",
}


class Filled(NamedTuple):
    """A cell with what was measured.

    Attributes:
        cell: the cell.
        values: one number for each seed that is measured, in the units of the table.
        status: how far the cell is.
        examples: how many images each number comes from; None where it comes from none.
        scale_free: accuracy in % under an attack that no scale of the logits can weaken, of the
            first seed. None where the cell's own attack is one.
        remarks: what differs from the source, one statement each.
    """

    cell: Cell
    values: tuple[float, ...]
    status: str
    examples: int | None
    scale_free: float | None
    remarks: tuple[str, ...]

    @property
    def mean(self) -> float | None:
        """The mean over the seeds."""
        return float(np.mean(self.values)) if self.values else None

    @property
    def deviation(self) -> float | None:
        """The standard deviation over the seeds, of a sample; None for fewer than two."""
        return float(np.std(self.values, ddof=1)) if len(self.values) > 1 else None

    @property
    def is_share(self) -> bool:
        """Whether the cell is an accuracy or an error in percent."""
        kinds = [measurement.kind for measurement in self.cell.measurements]
        return bool(kinds) and kinds[0] in _SHARES

    @property
    def difference(self) -> float | None:
        """What was measured minus what was published."""
        if self.mean is None or self.cell.published is None:
            return None
        return self.mean - self.cell.published


def fill(cells: Sequence[Cell], runs: Runs, seeds: Sequence[int]) -> list[Filled]:
    """Returns the cells with all that is recorded; nothing is trained or measured."""
    known: dict[tuple, tuple[Run, dict[str, dict]]] = {}
    for cell in cells:
        for seed in seeds:
            place = cell.row, cell.model, seed
            run = runs.of_cell(cell, seed) if place not in known else None
            if run is not None:
                known[place] = run, run.results()
    return [
        _filled(cell, [known[cell.row, cell.model, seed] for seed in seeds] if cell.model else [])
        for cell in cells
    ]


def _filled(cell: Cell, found: Sequence[tuple[Run, dict[str, dict]]]) -> Filled:
    if not found:
        return Filled(cell, (), "not reproduced", None, None, (cell.why_not,))
    if not all(can_measure(each, found[0][0]) for each in cell.measurements):
        why = "A public checkpoint has neither settings nor times of its training."
        return Filled(cell, (), "not reproduced", None, None, (why,))
    keys = [each.key() for each in cell.measurements]
    whole = [(run, results) for run, results in found if all(key in results for key in keys)]
    values = [_value(cell, [results[key] for key in keys]) for _, results in whole]
    status = _status(found, len(whole))
    if not whole:
        remarks = [cell.note] if cell.note else []
        return Filled(cell, (), status, None, None, tuple(remarks))
    first = [whole[0][1][key] for key in keys]
    free = first[0].get("scale_free")
    return Filled(
        cell,
        tuple(values),
        status,
        first[0].get("examples"),
        None if free is None else _PERCENT * free,
        tuple(_remarks(cell, first)),
    )


def _value(cell: Cell, parts: list[dict]) -> float:
    mean = float(np.mean([part["value"] for part in parts]))
    if cell.measurements[0].kind not in _SHARES:
        return mean
    return _PERCENT * ((1.0 - mean) if cell.as_error else mean)


def _status(found: Sequence[tuple[Run, dict]], num_whole: int) -> str:
    stages = [run.status() for run, _ in found]
    if num_whole == len(found):
        return FROM_CHECKPOINT if FROM_CHECKPOINT in stages else EVALUATED
    return ", ".join(dict.fromkeys(stages))


def _remarks(cell: Cell, parts: list[dict]) -> list[str]:
    """What differs from the source in how this cell was measured."""
    changed = parts[0].get("changed")
    sources = dict.fromkeys(part["source"] for part in parts if "source" in part)
    return [
        *([cell.note] if cell.note else []),
        *([f"attack: {', '.join(changed)}"] if changed else []),
        *([f"corruptions: {source}" for source in sources]),
    ]


def deviations(filled: Sequence[Filled], scale: str, remarks: Sequence[str]) -> list[str]:
    """Returns everything in which a table differs from the published one."""
    about: dict[str, list[str]] = {}
    models = dict.fromkeys(each.cell.model for each in filled if each.cell.model is not None)
    for model in models:
        about.setdefault("; ".join(scales.differences(model, scale)), []).append(model.text())
    for name in dict.fromkeys(model.experiment for model in models):
        about.setdefault(" ".join(catalog.find(name).notes), []).append(name)
    used = [measurement.protocol for each in filled for measurement in each.cell.measurements]
    for protocol in filter(None, dict.fromkeys(used)):
        about[protocols.get(protocol).note] = [protocol]
    for each in filled:
        for remark in each.remarks:
            about.setdefault(remark, []).append(f"{each.cell.row} / {each.cell.column}")
    counts = sorted({each.examples for each in filled if each.examples is not None})
    return [
        *([_SCALE_NOTES[scale]] if scale in _SCALE_NOTES else []),
        *([f"Test images of a cell: {', '.join(map(str, counts))}."] if counts else []),
        *remarks,
        *describe(filled[0].cell.table).get("notes", []),
        *(f"{_few(names)}: {text}" for text, names in about.items() if text),
    ]


def _few(names: list[str]) -> str:
    """The first names, and how many more there are."""
    shown = "; ".join(names[:_SHOWN_NAMES])
    return f"{shown}; and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else shown


def write(
    filled: Sequence[Filled], scale: str, seeds: Sequence[int], remarks: Sequence[str], folder
) -> list[pathlib.Path]:
    """Writes the table as .md, .csv, .json and .png, and returns the files.

    Args:
        filled: the cells, row by row.
        scale: one of `scales.SCALES`.
        seeds: the seeds of the runs.
        remarks: what else has to be said.
        folder: where the files go.
    """
    table = filled[0].cell.table
    paths = [pathlib.Path(folder) / f"{table}.{kind}" for kind in ("md", "csv", "json", "png")]
    differs = deviations(filled, scale, remarks)
    texts = markdown(filled, scale, seeds, differs), _csv(filled, scale)
    for path, text in zip(paths, texts, strict=False):
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    about = describe(table)
    write_json(
        paths[2],
        {
            "table": table,
            "source": about["source"],
            "metric": about["metric"],
            "scale": scale,
            "seeds": list(seeds),
            "command": " ".join(sys.argv),
            "environment": environment(),
            "deviations": differs,
            "cells": [_plain(each, scale) for each in filled],
        },
    )
    draw(filled, scale, paths[3])
    return paths


def _plain(each: Filled, scale: str) -> dict:
    cell = each.cell
    return {
        "scale": scale,
        "row": cell.row,
        "column": cell.column,
        "published": cell.published,
        "published_deviation": cell.spread,
        "mean": each.mean,
        "deviation": each.deviation,
        "values": list(each.values),
        "difference": each.difference,
        "scale_free": each.scale_free,
        "examples": each.examples,
        "status": each.status,
        "experiment": cell.model.text() if cell.model else None,
        "measurement": [measurement.key() for measurement in cell.measurements],
        "changed_by_scale": list(scales.differences(cell.model, scale)) if cell.model else [],
        "remarks": list(each.remarks),
    }


def _csv(filled: Sequence[Filled], scale: str) -> str:
    rows = [_plain(each, scale) for each in filled]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        lists = {
            key: "; ".join(map(str, value)) for key, value in row.items() if isinstance(value, list)
        }
        writer.writerow({**row, **lists})
    return text.getvalue()


def number(value: float | None, deviation: float | None = None, digits: int = 2) -> str:
    """Writes a number as tables have it, with the deviation over runs.

    Example:
        >>> number(53.974), number(12.0, 0.5), number(30, digits=0), number(None)
        ('53.97', '12.00 ± 0.50', '30', '-')
    """
    if value is None:
        return "-"
    spread = f" ± {deviation:.{digits}f}" if deviation is not None else ""
    return f"{value:.{digits}f}{spread}"


def digits_of(cell: Cell) -> int:
    """Returns how many digits after the point the numbers of a cell have."""
    if any(measurement.kind == "setting" for measurement in cell.measurements):
        return 0
    return 4 if 0 < abs(cell.published or 1) < 1 else 2


def markdown(
    filled: Sequence[Filled], scale: str, seeds: Sequence[int], differs: Sequence[str]
) -> str:
    """Returns the table as Markdown: in each cell what was published, then what was measured."""
    table = filled[0].cell.table
    about = describe(table)
    columns = list(dict.fromkeys(each.cell.column for each in filled))
    by_place = {(each.cell.row, each.cell.column): each for each in filled}
    lines = [
        f"# {table}, scale {scale}",
        "",
        f"{about['source']}. {about['metric']}.",
        "",
        f"Each cell: published / here, seeds {', '.join(map(str, seeds))}. In brackets: accuracy "
        "under an attack on the margin, where the cell's own attack depends on the scale of the "
        "logits. `*`: not the published setting, see below.",
        "",
        f"| | {' | '.join(columns)} |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for row in dict.fromkeys(each.cell.row for each in filled):
        texts = [_text(by_place.get((row, column)), scale) for column in columns]
        lines.append(f"| {row} | {' | '.join(texts)} |")
    return "\n".join([*lines, "", "## Deviations", "", *(f"* {line}" for line in differs), ""])


def _text(each: Filled | None, scale: str) -> str:
    if each is None:
        return ""
    cell = each.cell
    digits = digits_of(cell)
    published = number(cell.published, cell.spread, digits)
    if each.mean is None:
        return f"{published} / {each.status}"
    free = f" ({each.scale_free:.2f})" if each.scale_free is not None else ""
    mark = " *" if scale != "paper" or each.remarks else ""
    return f"{published} / {number(each.mean, each.deviation, digits)}{free}{mark}"


def draw(filled: Sequence[Filled], scale: str, path) -> pathlib.Path:
    """Draws the table: published above, measured below, coloured by their difference."""
    columns = list(dict.fromkeys(each.cell.column for each in filled))
    rows = list(dict.fromkeys(each.cell.row for each in filled))
    differences = np.full((len(rows), len(columns)), math.nan)
    figure = new_figure(3.2 + 1.05 * len(columns), 1.6 + 0.44 * len(rows))
    axes = figure.subplots()
    for each in filled:
        place = rows.index(each.cell.row), columns.index(each.cell.column)
        if each.is_share and each.difference is not None:
            differences[place] = each.difference
        star = "*" if each.mean is not None and (scale != "paper" or each.remarks) else ""
        digits = digits_of(each.cell)
        published = number(each.cell.published, digits=digits)
        text = f"{published}\n{number(each.mean, digits=digits)}{star}"
        axes.text(place[1], place[0], text, ha="center", va="center", fontsize=7)
    limits = {"vmin": -_MOST_POINTS, "vmax": _MOST_POINTS}
    axes.imshow(differences, "PuOr", alpha=0.6, aspect="auto", **limits)
    axes.set_xticks(range(len(columns)), columns, rotation=30, ha="left", fontsize=8)
    axes.xaxis.tick_top()
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    title = f"{filled[0].cell.table}, scale {scale}: published above, here below"
    stars = "* not the published setting; orange: lower than published, violet: higher"
    axes.set_title(f"{title}\n{stars}", fontsize=9, loc="left")
    return save_figure(figure, path)
