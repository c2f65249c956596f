"""The trials of a search as a table, the best of them, and the front that none of them beats."""

import pathlib
from collections.abc import Sequence
from typing import Any

from he_keras.callbacks.history_file import write_rows
from he_keras.files import read_json, write_json
from he_keras.search.pareto import draw_pareto, on_front
from he_keras.search.settings import FAILURE, METRIC, RESULT

TABLE, PICTURE = "trials.json", "pareto.png"
_CLEAN = "clean_accuracy"


def collect(oracle, project: pathlib.Path) -> list[dict]:
    """Returns a row for each trial, in the order in which they began."""
    names = oracle.settings.parsed_space().entries
    rows = [_row(oracle, names, project, oracle.trials[each]) for each in oracle.start_order]
    done = [row for row in rows if row["status"] == "completed"]
    front = on_front([(row[_CLEAN], row[METRIC]) for row in done])
    for row, is_on_front in zip(done, front, strict=True):
        row["pareto"] = is_on_front
    return rows


def best(rows: Sequence[dict]) -> dict | None:
    """Returns the completed trial with the highest robust accuracy, or None.

    Only those that were trained longest count: hyperband ends others early. Among equals the one
    with the higher clean accuracy, then the earlier one, is taken.
    """
    done = [row for row in rows if row["status"] == "completed"]
    longest = max((row["epochs"] for row in done), default=0)
    done = [row for row in done if row["epochs"] == longest]
    return max(done, key=lambda row: (row[METRIC], row[_CLEAN]), default=None)


def write_tables(folder: pathlib.Path, rows: list[dict], about: dict[str, Any]) -> None:
    """Writes trials.csv, trials.json (with `about` in front) and pareto.png."""
    winner = best(rows)
    heading = {**about, "best": None if winner is None else winner["trial"]}
    write_json(folder / TABLE, {**heading, "trials": rows})
    threat = about["threat"]
    write_rows(folder / "trials.csv", [{**row, "threat": threat} for row in rows])
    if winner is not None:
        draw_pareto(rows, winner, folder / PICTURE, f"{about['objective']}, {threat}")


def read_tables(folder: pathlib.Path) -> dict:
    """Returns what trials.json holds; an empty dictionary if there is none that can be read."""
    try:
        return read_json(folder / TABLE)
    except ValueError:
        return {}


def _row(oracle, names, project: pathlib.Path, trial) -> dict:
    folder = project / f"trial_{trial.trial_id}"
    result = read_json(folder / RESULT) if trial.status == "COMPLETED" else {}
    # A trial that the chief gave up has no file.
    has_failure = trial.status == "FAILED" and (folder / FAILURE).exists()
    failure = read_json(folder / FAILURE) if has_failure else {}
    values = oracle.settings.parsed_space().values(trial.hyperparameters.values)
    return {
        "trial": trial.trial_id,
        "status": trial.status.lower(),
        **{name: values[name] for name in names},
        "epochs": result.get("epochs"),
        _CLEAN: result.get(_CLEAN),
        METRIC: result.get(METRIC),
        "objective": oracle.settings.objective,
        "seconds": result.get("seconds"),
        "pareto": None,
        "run": result.get("run"),
        "error": failure.get("error", ""),
    }
