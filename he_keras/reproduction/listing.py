"""What `--list` and `--dry_run` print: tables, cells, experiments, status and costs."""

from collections.abc import Iterable, Sequence

from he_keras.reproduction import cells, figures
from he_keras.reproduction.cells import Cell
from he_keras.reproduction.costs import Costs, Left
from he_keras.reproduction.models import EVALUATED, Runs
from he_keras.reproduction.reproduce import Request, Work, cost_of
from he_keras.reproduction.table import digits_of, fill, number

_WIDTH = 44


class Speeds:
    """The two speeds that hours are given at: what each network reaches here, and a device's.

    Args:
        device: operations per second that are assumed of a device that is not here.
    """

    def __init__(self, device: float) -> None:
        self.device = device

    def heading(self) -> str:
        """Returns where the speeds come from."""
        return (
            "Hours are counted operations over a speed. Here it is measured now, on a training "
            "pass of the network, or of PreActResNet-18 where the network is larger; one modern "
            f"GPU: {self.device / 1e12:g} TFLOP/s, assumed (--tflops). "
            "What is done costs nothing. A row costs what it takes alone; rows share trainings. "
            "Of analyses and figures, only the trainings are counted. Nothing counts compilation, "
            "which is most of what --scale=smoke takes."
        )

    def hours(self, parts: Iterable[Left]) -> str:
        """Returns the hours of some work at both speeds."""
        lefts = list(parts)
        here = sum(left.hours() for left in lefts)
        there = sum(left.hours(self.device) for left in lefts)
        return f"{here:,.2f} h here, {there:,.3f} h on a GPU"


def listing(tables: Sequence[str], runs: Runs, seeds, costs: Costs, speeds: Speeds) -> str:
    """Returns every table with its cells, experiments, published numbers, status and cost."""
    requests = [Request(table, runs, seeds=tuple(seeds)) for table in tables]
    counted = [len(request.cells()) for request in requests]
    num_figures = sum(cells.figure_of(table) is not None for table in tables)
    what = (
        f"{len(requests) - num_figures} tables with {sum(counted)} cells and {num_figures} figures"
    )
    lines = [
        f"{what if len(requests) > 1 else tables[0]}, scale {runs.scale}, "
        f"seeds {', '.join(map(str, seeds))}",
        speeds.heading(),
    ]
    for request in requests:
        lines += ["", *_section(request, costs, speeds)]
    return "\n".join(lines)


def _section(request: Request, costs: Costs, speeds: Speeds) -> list[str]:
    about = cells.describe(request.table)
    work = cost_of(request, costs)
    lines = [
        f"{request.table}: {about['source']}",
        f"    {about['metric']}",
        f"    left: {speeds.hours(left for _, left in work)}",
    ]
    figure = cells.figure_of(request.table)
    if figure:
        return [*lines, *_lines_of_figure(request, figure, work, speeds)]
    filled = fill(request.cells(), request.runs, request.seeds)
    for row in dict.fromkeys(each.cell.row for each in filled):
        of_row = [each for each in filled if each.cell.row == row]
        hours = speeds.hours(left for _, left in cost_of(request._replace(rows=(row,)), costs))
        states = _states(of_row)
        public = next((each.cell.checkpoint for each in of_row if each.cell.checkpoint), "")
        lines.append(f"  {row} [{_experiments(of_row)}]: {states}; {hours}")
        if public:
            lines.append(f"      public checkpoint: {public} (--checkpoint='{row}:FILE')")
        lines += [f"      {_line(each)}" for each in of_row]
    return lines


def _states(filled) -> str:
    """The states of the cells that something stands for."""
    found = [each.status for each in filled if each.cell.model] or [filled[0].status]
    return ", ".join(dict.fromkeys(found))


def _experiments(filled) -> str:
    models = dict.fromkeys(each.cell.model.text() for each in filled if each.cell.model)
    return next(iter(models), "none") if len(models) < 2 else "a model a column"


def _line(each) -> str:
    cell: Cell = each.cell
    digits = digits_of(cell)
    published = number(cell.published, cell.spread, digits)
    published = "illegible" if cell.published is None else published
    if cell.model is None:
        return f"{cell.column:<18}{published:>16}  not reproduced: {cell.why_not}"
    here = number(each.mean, each.deviation, digits) if each.mean is not None else each.status
    first, *others = cell.measurements
    what = first.key() + (f" and {len(others)} more" if others else "")
    return f"{cell.column:<18}{published:>16}  here {here}; {what} of {cell.model.text()}"


def _lines_of_figure(request: Request, figure: cells.Figure, work, speeds: Speeds) -> list[str]:
    labels = figures.subjects_of(figure, request.seeds)
    runs = {
        label: request.runs.of(figure.models[name], seed) for (name, seed), label in labels.items()
    }
    folder = request.runs.folder / "figures" / request.table
    drawn = EVALUATED if figures.is_drawn(folder, runs, figure) else "not drawn"
    kind = figure.analysis or f"transfer matrix of {', '.join(figure.transfer)}"
    lines = [f"  {kind} over {len(runs)} models: {drawn}"]
    by_folder = {each.run.folder: left for each, left in work}
    for (name, _), label in labels.items():
        run = runs[label]
        hours = speeds.hours([by_folder[run.folder]])
        lines.append(f"      {label:<24}{figure.models[name].text()}: {run.status()}; {hours}")
    return [
        *lines,
        *(f"      note: {note}" for note in cells.describe(request.table).get("notes", ())),
    ]


def dry_run(request: Request, costs: Costs, speeds: Speeds) -> str:
    """Returns what one table will cost, run by run."""
    work: list[tuple[Work, Left]] = cost_of(request, costs)
    lines = [f"{request.table}, scale {request.runs.scale}: {len(work)} runs", speeds.heading()]
    lines.append(
        f"{'run':<{_WIDTH}}{'seed':>5}{'to measure':>12}{'train, PFLOP':>14}"
        f"{'measure, PFLOP':>16}{'h here':>12}{'h GPU':>10}"
    )
    for each, left in work:
        known = each.run.results()
        missing = sum(wanted.key() not in known for wanted in each.measurements)
        lines.append(
            f"{each.run.folder.name:<{_WIDTH}}{each.seed:>5}{missing:>12}"
            f"{left.training / 1e15:>14.4f}{left.evaluation / 1e15:>16.4f}"
            f"{left.hours():>12.2f}{left.hours(speeds.device):>10.3f}"
        )
    return "\n".join([*lines, f"all: {speeds.hours(left for _, left in work)}"])
