"""The cells of the papers' tables: each has a published number, and says how to measure its own.

A table has a section "cells". What stands there under "all" holds for every cell. Under "columns"
and "rows" it holds for the cells of one column or row. The later of the three counts where they
disagree.
"""

from collections.abc import Sequence
from typing import NamedTuple

from he_keras.arguments import unknown_name
from he_keras.data.corruptions import CORRUPTIONS, SEVERITIES
from he_keras.experiment.catalog import papers

_OF_TRAINING = ("setting", "minutes", "minutes of an epoch")


class Measurement(NamedTuple):
    """One number of one model.

    Attributes:
        kind: "clean", "attack", "corruption", "setting", "minutes" or "minutes of an epoch".
        name: the attack, the corruption, or the key of the setting.
        protocol: the protocol that has the attack's settings; "" if the cell has them.
        epsilon: the radius, where the cell has it.
        options: arguments of the attack, where the cell has them.
        examples: so many test images; 0 for all.
        severity: of the corruption.
        crafted_for: the experiment whose model images are crafted for; "" for the model itself.
    """

    kind: str
    name: str = ""
    protocol: str = ""
    epsilon: str = ""
    options: tuple[tuple[str, float | bool | str], ...] = ()
    examples: int = 0
    severity: int = 0
    crafted_for: str = ""

    @property
    def is_of_training(self) -> bool:
        """Whether it is a setting or a time of the training, which no file of weights has."""
        return self.kind in _OF_TRAINING

    def key(self) -> str:
        """Returns the name of the number in a file of results."""
        settings = [f"{name}={value}" for name, value in self.options]
        places = [f"severity {self.severity}"] if self.severity else []
        limits = [f"first {self.examples}"] if self.examples else []
        around = [f"epsilon {self.epsilon}"] if self.epsilon else []
        parts = [self.kind, self.protocol, self.name, *around, *settings, *limits, *places]
        return "/".join(filter(None, [*parts, self.crafted_for]))


class Model(NamedTuple):
    """What a cell's number is measured on: an experiment of the catalog, and what is changed."""

    experiment: str
    changes: tuple[tuple[str, float | int | bool | str], ...] = ()

    def text(self) -> str:
        """Returns the experiment and its changes in words.

        Example:
            >>> Model("cifar10_trades_he", (("head.scale", 5.0),)).text()
            'cifar10_trades_he, head.scale=5.0'
        """
        return ", ".join([self.experiment, *(f"{key}={value}" for key, value in self.changes)])


class Cell(NamedTuple):
    """One cell of a table.

    Attributes:
        table: the table's name in papers.json.
        row: the cell's row.
        column: the cell's column.
        published: the printed number; None where the source is illegible.
        spread: the printed standard deviation over runs, or None.
        model: what is trained for it; None where nothing is.
        measurements: the numbers whose mean the cell is.
        as_error: the cell is 100 % minus the accuracy.
        note: what the source does not state, and what is taken.
        why_not: why nothing stands for the cell; "" if something does.
        checkpoint: the public file of the row in the zoo, or "".
    """

    table: str
    row: str
    column: str
    published: float | None
    spread: float | None
    model: Model | None
    measurements: tuple[Measurement, ...]
    as_error: bool = False
    note: str = ""
    why_not: str = ""
    checkpoint: str = ""


class Figure(NamedTuple):
    """A figure: the models it compares, by their names in it, and the analysis that draws it."""

    table: str
    models: dict[str, Model]
    examples: int
    analysis: str = ""
    transfer: tuple[str, ...] = ()
    epsilon: str = ""
    options: tuple[tuple[str, float | bool | str], ...] = ()


def names() -> list[str]:
    """Returns the names of all tables and figures."""
    return list(papers.tables())


def describe(table: str) -> dict:
    """Returns what papers.json says of a table: "source", "metric", and maybe "notes"."""
    if table not in papers.tables():
        raise unknown_name("table", table, names())
    return papers.tables()[table]


def figure_of(table: str) -> Figure | None:
    """Returns the figure, or None for a table."""
    found = describe(table).get("figure")
    if found is None:
        return None
    return Figure(
        table,
        {name: _model(subject) for name, subject in found["subjects"].items()},
        found["examples"],
        found.get("analysis", ""),
        tuple(found.get("transfer", ())),
        found.get("epsilon", ""),
        tuple(found.get("options", {}).items()),
    )


def cells_of(table: str, rows: Sequence[str] = ()) -> list[Cell]:
    """Returns the cells of a table, row by row; of some rows only if they are given.

    Example:
        >>> from he_keras.reproduction import cells
        >>> cell = cells.cells_of("he_table_9", ["s = 5, m = 0.2"])[1]
        >>> cell.published, cell.model.text()
        (58.75, 'cifar10_trades_he, head.scale=5.0, head.margin=0.2')
        >>> [each.key() for each in cell.measurements]
        ['attack/he-table-2/pgd-20']
    """
    content = describe(table)
    unknown = [row for row in rows if row not in content["rows"]]
    if unknown:
        raise unknown_name(f"row of {table}", unknown[0], list(content["rows"]))
    return [
        _cell(table, content, row, column)
        for row, columns in content["rows"].items()
        for column in columns
        if not rows or row in rows
    ]


def _cell(table: str, content: dict, row: str, column: str) -> Cell:
    told = content["cells"]
    parts = [
        told.get("all", {}),
        *(told[kind].get(name, {}) for kind, name in (("columns", column), ("rows", row))),
    ]
    about = {key: value for part in parts for key, value in part.items()}
    notes = dict.fromkeys(part["note"] for part in parts if "note" in part)
    why_not = about.get("why_not", "")
    return Cell(
        table,
        row,
        column,
        content["rows"][row][column],
        content.get("deviations", {}).get(row, {}).get(column),
        None if why_not else _model(about),
        () if why_not else _measurements(about),
        about.get("as_error", False),
        " ".join(notes),
        why_not,
        about.get("checkpoint", ""),
    )


def _model(about: dict) -> Model:
    return Model(about["experiment"], tuple(about.get("changes", {}).items()))


def _measurements(about: dict) -> tuple[Measurement, ...]:
    kind = about.get("measure", "attack")
    if kind == "corruption":
        wanted = about["corruptions"]
        chosen = CORRUPTIONS if wanted == ["all"] else wanted
        severities = about.get("severities", SEVERITIES)
        return tuple(
            Measurement(kind, name, severity=severity) for name in chosen for severity in severities
        )
    if kind != "attack":
        return (Measurement(kind, about.get("setting", "")),)
    has_own = "epsilon" in about
    return (
        Measurement(
            kind,
            about["attack"].format(**about),
            "" if has_own else about["protocol"],
            about.get("epsilon", ""),
            tuple(about.get("options", {}).items()),
            about.get("examples", 0),
            crafted_for=about.get("crafted_for", ""),
        ),
    )
