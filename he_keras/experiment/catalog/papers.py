"""The papers' numbers, from papers.json, as headers quote them."""

import functools
import json
import pathlib

_LABELS = {
    "clean": "clean",
    "pgd10": "PGD-10",
    "pgd20": "PGD-20",
    "pgd50": "PGD-50",
    "pgd100": "PGD-100",
    "cw20": "C&W-20",
    "autoattack": "AutoAttack",
    "rays_acc": "RayS",
    "adbd": "mean distance of RayS",
    "apgd100_ce": "APGD-CE",
    "apgd100_dlr": "APGD-DLR",
    "square5k": "Square",
}
#: Columns that are printed as the paper prints them, not with two digits.
_FORMATS = {"adbd": "{}", "autoattack": "{}"}


@functools.cache
def tables() -> dict:
    """Returns every table: {name: {"source", "metric", "rows": {row: {column: number}}}}."""
    path = pathlib.Path(__file__).with_name("papers.json")
    return json.loads(path.read_text(encoding="utf-8"))


def row(table: str, name: str) -> dict[str, float]:
    """Returns a row of a table as numbers by their columns."""
    return tables()[table]["rows"][name]


def quoted(table: str, name: str, *columns: str) -> str:
    """Returns numbers of a row in words.

    Example:
        >>> from he_keras.experiment.catalog import papers
        >>> papers.quoted("he_table_2", "TRADES+HE", "clean", "pgd20")
        'clean 84.88, PGD-20 62.02'
    """
    numbers = row(table, name)
    texts = [
        f"{_LABELS[column]} {_FORMATS.get(column, '{:.2f}').format(numbers[column])}"
        for column in columns
    ]
    return ", ".join(texts)
