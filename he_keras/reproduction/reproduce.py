"""Trains, measures and writes a table or a figure; what is done already stays."""

import gc
import pathlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import keras

from he_keras.reproduction import cells, figures, table
from he_keras.reproduction.cells import Cell, Measurement
from he_keras.reproduction.costs import Costs, Left
from he_keras.reproduction.measure import Measuring, can_measure
from he_keras.reproduction.models import Run, Runs


class Work(NamedTuple):
    """What one run has to do for a table: train, then measure.

    Attributes:
        run: the run.
        seed: its seed.
        measurements: what cells need of it.
    """

    run: Run
    seed: int
    measurements: tuple[Measurement, ...]


class Request(NamedTuple):
    """What to reproduce.

    Attributes:
        table: name of a table or figure.
        runs: the runs of a scale.
        rows: some rows of a table; empty for all.
        seeds: the seeds of the runs.
        corruptions: where corrupted images come from.
        show_progress: show progress bars.
    """

    table: str
    runs: Runs
    rows: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0,)
    corruptions: str = "generated"
    show_progress: bool = False

    def cells(self) -> list[Cell]:
        """Returns the cells of the rows."""
        return cells.cells_of(self.table, self.rows)


def work_of(request: Request) -> list[Work]:
    """Returns the runs that a table or figure needs, each once."""
    found: dict[pathlib.Path, tuple[Run, int, dict[Measurement, None]]] = {}

    def need(run: Run, seed: int, measurements: Sequence[Measurement] = ()) -> None:
        _, _, known = found.setdefault(run.folder, (run, seed, {}))
        known.update(dict.fromkeys(measurements))

    figure = cells.figure_of(request.table)
    for seed in request.seeds:
        for model in figure.models.values() if figure else ():
            need(request.runs.of(model, seed), seed)
        for cell in () if figure else request.cells():
            run = request.runs.of_cell(cell, seed)
            if run is None:
                continue
            for each in cell.measurements:
                if each.crafted_for:
                    need(request.runs.crafting(each.crafted_for, seed), seed)
            need(run, seed, [each for each in cell.measurements if can_measure(each, run)])
    return [Work(run, seed, tuple(known)) for run, seed, known in found.values()]


def cost_of(request: Request, costs: Costs) -> list[tuple[Work, Left]]:
    """Returns the runs that a table needs, each with what is left to do."""
    return [(each, costs.left(each.run, each.measurements)) for each in work_of(request)]


def reproduce(request: Request, say: Callable[[str], None]) -> list[pathlib.Path]:
    """Trains what is missing, measures what is missing, writes the table, and returns its files.

    Args:
        request: what to reproduce.
        say: is told what begins.
    """
    work = work_of(request)
    for each in work:
        if not each.run.is_ready:
            say(f"Training {each.run.folder.name}, seed {each.seed}")
            each.run.train()
            _forget_models()
    for each in work:
        known = each.run.results()
        missing = [wanted for wanted in each.measurements if wanted.key() not in known]
        if missing:
            numbers = "1 number" if len(missing) == 1 else f"{len(missing)} numbers"
            say(f"Measuring {numbers} of {each.run.folder.name}, seed {each.seed}")
            _measure(request, each)
            _forget_models()
    figure = cells.figure_of(request.table)
    return _figure(request, figure) if figure else _table(request)


def _measure(request: Request, work: Work) -> None:
    Measuring(
        work.run,
        request.runs.scale,
        request.corruptions,
        lambda experiment: request.runs.crafting(experiment, work.seed),
        request.show_progress,
    ).measure(work.measurements)


def _table(request: Request) -> list[pathlib.Path]:
    # Rows that were not asked for now may have been reproduced before.
    filled = table.fill(cells.cells_of(request.table), request.runs, request.seeds)
    remarks = request.runs.remarks_on(request.table)
    folder = request.runs.folder / "tables"
    return table.write(filled, request.runs.scale, request.seeds, remarks, folder)


def _figure(request: Request, figure: cells.Figure) -> list[pathlib.Path]:
    labels = figures.subjects_of(figure, request.seeds)
    runs = {
        label: request.runs.of(figure.models[name], seed) for (name, seed), label in labels.items()
    }
    folder = request.runs.folder / "figures" / request.table
    return figures.draw(folder, runs, figure, request.runs.scale)


def _forget_models() -> None:
    """A table has many models, and Keras keeps what it has built."""
    keras.backend.clear_session()
    gc.collect()
