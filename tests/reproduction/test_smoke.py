"""Cells from end to end at the scale "smoke": every kind of model, and every measurement."""

import math
import re

import keras
import pytest
from forked_programs import Program, run_script

from he_keras.files import read_json
from he_keras.reproduction import cells, scales, table
from he_keras.reproduction.measure import Measuring
from he_keras.reproduction.models import Runs
from he_keras.reproduction.reproduce import Request, reproduce

TABLES = [name for name in cells.names() if cells.figure_of(name) is None]
#: Tables whose attacks on the cross-entropy work on raw cosines.
UNIT_SCALE = ("he_table_2", "he_table_3", "he_table_4", "he_table_10")
pytestmark = pytest.mark.slow


def kinds_of(cell):
    """What a cell shows to work: its kind of training, of head, of data, and its measurements."""
    config = scales.configuration(cell.model, "smoke")
    head = config.head
    found = {
        (config.objective.name, config.objective.get("base")),
        (head.kind, head.feature_norm, head.weight_norm),
        (tuple(config.network.input_shape), bool(config.train.cycle_ends)),
    }
    for each in cell.measurements:
        # Numbers of steps, queries and severities are one kind.
        name = re.sub(r"\d+", "K", each.name)
        found |= {(each.kind, each.protocol, name), (each.kind, head.kind)}
    return found


def chosen():
    """Cells of all kinds: whatever another cell does, one of these does too."""
    seen, found = set(), {name: [] for name in TABLES}
    for name in TABLES:
        for cell in cells.cells_of(name):
            if cell.model is not None and not kinds_of(cell) <= seen:
                seen |= kinds_of(cell)
                found[name].append(cell)
    return found


CHOSEN = chosen()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("reproduce")


@pytest.mark.parametrize("name", [name for name in TABLES if CHOSEN[name]])
def test_cells_of_every_kind_are_filled(folder, name):
    runs = Runs(folder, "smoke")
    wanted: dict = {}
    for cell in CHOSEN[name]:
        run = runs.of_cell(cell, 0)
        wanted.setdefault(run.folder, (run, []))[1].extend(cell.measurements)
        crafted = [
            runs.crafting(each.crafted_for, 0) for each in cell.measurements if each.crafted_for
        ]
        for each in (run, *crafted):
            each.train()
    for run, measurements in wanted.values():
        measuring = Measuring(run, "smoke", crafting=lambda name: runs.crafting(name, 0))
        measuring.measure(measurements)
        keras.backend.clear_session()
    for each in table.fill(CHOSEN[name], runs, (0,)):
        assert each.status == "evaluated" and math.isfinite(each.mean), each
        assert not each.is_share or 0.0 <= each.mean <= 100.0
        if each.cell.column == "clean":
            assert each.mean == 50.0
        if each.cell.column in ("pgd10", "pgd20", "pgd50", "fgsm") and name in UNIT_SCALE:
            assert each.scale_free is not None
        if each.cell.column in ("clean", "deepfool", "autoattack"):
            assert each.scale_free is None
    paths = table.write(table.fill(cells.cells_of(name), runs, (0,)), "smoke", (0,), [], folder)
    assert all(path.stat().st_size > 100 for path in paths)


@pytest.mark.parametrize("name", ["he_figure_2_left", "he_figure_3", "he_figure_4"])
def test_a_figure_is_drawn_once(folder, name, monkeypatch):
    whole = cells.figure_of(name)
    few = ("PGD-AT", "PGD-AT+HE", "PGD-AT, K = 1", "PGD-AT, K = 2")
    figure = whole._replace(models={key: whole.models[key] for key in few if key in whole.models})
    assert len(figure.models) == 2
    monkeypatch.setattr(cells, "figure_of", lambda table: figure)
    request = Request(name, Runs(folder, "smoke"))
    paths = reproduce(request, lambda text: None)
    assert {".png", ".json"} == {path.suffix for path in paths}
    written = [path.stat().st_mtime_ns for path in paths]
    assert reproduce(request, lambda text: None) == paths
    assert [path.stat().st_mtime_ns for path in paths] == written


def test_an_interrupted_table_goes_on(tmp_path):
    rows = ["--rows=s = 1, m = 0.2", "--rows=s = 5, m = 0.2"]
    arguments = ["tools/reproduce.py", "he_table_9", "--scale=smoke", *rows]

    def numbers(folder):
        content = read_json(folder / "smoke" / "tables" / "he_table_9.json")
        return {(each["row"], each["column"]): each["mean"] for each in content["cells"]}

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    program = Program(run_script, *arguments, f"--output_dir={whole}")
    assert program.wait() == 0, program.texts()
    program = Program(run_script, *arguments, f"--output_dir={parts}")
    program.wait_for(lambda: list(parts.rglob("model.keras")))
    program.send_signal(2)
    assert program.wait() == 130, program.texts()
    out, _ = program.communicate()
    assert "Interrupted. To go on: python tools/reproduce.py he_table_9" in out
    program = Program(run_script, *arguments, f"--output_dir={parts}")
    assert program.wait() == 0, program.texts()
    assert numbers(parts) == numbers(whole)
    assert sum(value is not None for value in numbers(parts).values()) == 4
