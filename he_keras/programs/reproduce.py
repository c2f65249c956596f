"""The papers' tables and figures: train what is missing, evaluate, write beside the published one.

he-keras reproduce --list                                     (every table, cell, status and cost)
he-keras reproduce he_table_2 --list --scale=cpu
he-keras reproduce he_table_2 --scale=cpu --dry_run           (prints the cost and stops)
he-keras reproduce he_table_2 --scale=cpu --rows=TRADES --rows=TRADES+HE --seeds=3
he-keras reproduce he_table_6 --checkpoint="PGD-AT+HE WRN-34-20:checkpoints/model.pt"
he-keras reproduce all --scale=smoke                          (every cell of every table, quickly)

--scale=paper is the paper's experiment. --scale=cpu is a small one on real data. --scale=smoke only
shows that everything runs. The same command goes on where an interrupted one stopped. The manual is
docs/research/reproduce.md.
"""

import pathlib

from absl import flags

from he_keras.arguments import unknown_name
from he_keras.programs import cli

POSITIONAL = 1
_ALL = "all"
_LIST = flags.DEFINE_bool("list", False, "Show tables with cells, status and cost; run nothing.")
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Print what is left to do and its cost; stop.")
_SCALE = flags.DEFINE_enum(
    "scale", "paper", ["paper", "cpu", "smoke"], "The paper's experiment, or a smaller one."
)
_ROWS = flags.DEFINE_multi_string("rows", [], "A row of the table, once for each; default: all.")
_SEEDS = flags.DEFINE_integer("seeds", 1, "So many seeds, from 0 on.", lower_bound=1)
_CHECKPOINT = flags.DEFINE_multi_string(
    "checkpoint", [], "ROW:FILE fills a row from a public checkpoint; a .keras file fits any row."
)
_CORRUPTIONS = flags.DEFINE_string(
    "corruptions", "generated", "generated, tfds, or the folder of published .npy files."
)
_TFLOPS = flags.DEFINE_float("tflops", 50.0, "Assumed speed of one modern GPU, in 10^12/s.")
_OUTPUT_DIR = flags.DEFINE_string("output_dir", "runs/reproduce", "Where everything is written.")


def main(argv) -> None:
    """Lists, estimates or reproduces."""
    with cli.one_line_errors():
        _run(argv[1] if len(argv) > 1 else "")


def check_flags(arguments: list[str]) -> None:
    """Raises a ValueError unless there is the table, and the rows in it."""
    from he_keras.experiment.catalog import papers

    name = arguments[1] if len(arguments) > 1 else ""
    if not name and not _LIST.value:
        raise ValueError("No table; expected he-keras reproduce TABLE, or --list; received neither")
    if name not in ("", _ALL, *papers.tables()):
        raise unknown_name("table", name, papers.tables())
    if name in ("", _ALL) and (_ROWS.value or _CHECKPOINT.value):
        raise ValueError(
            "Rows belong to one table; expected he-keras reproduce TABLE with --rows or "
            f"--checkpoint; received {name or '--list'}"
        )
    rows = papers.tables()[name]["rows"] if name not in ("", _ALL) else ()
    for row in set(_ROWS.value) - set(rows):
        raise unknown_name(f"row of {name}", row, rows)


def _run(name: str) -> None:
    from he_keras.reproduction import cells
    from he_keras.reproduction.models import Runs

    tables = cells.names() if name in ("", _ALL) else [name]
    runs = Runs(_OUTPUT_DIR.value, _SCALE.value)
    for assignment in _CHECKPOINT.value:
        runs.take_checkpoint(cells.cells_of(tables[0]), assignment)
    seeds = range(_SEEDS.value)
    if _LIST.value or _DRY_RUN.value:
        print(_planned(tables, runs, seeds))
        return
    for table in tables:
        _reproduce(table, runs, seeds)


def _request(table: str, runs, seeds):
    from he_keras.reproduction.reproduce import Request

    bars = _SCALE.value != "smoke"
    return Request(table, runs, tuple(_ROWS.value), tuple(seeds), _CORRUPTIONS.value, bars)


def _planned(tables: list[str], runs, seeds) -> str:
    """The text of --list or --dry_run."""
    from he_keras.reproduction import costs, listing

    counted = costs.Costs(_OUTPUT_DIR.value, _SCALE.value)
    speeds = listing.Speeds(_TFLOPS.value * 1e12)
    if _LIST.value:
        return listing.listing(tables, runs, seeds, counted, speeds)
    texts = [listing.dry_run(_request(table, runs, seeds), counted, speeds) for table in tables]
    return "\n\n".join(texts)


def _reproduce(table: str, runs, seeds) -> None:
    from he_keras import experiment
    from he_keras.reproduction.reproduce import reproduce

    print(f"{table}, scale {_SCALE.value}", flush=True)
    try:
        paths = reproduce(_request(table, runs, seeds), lambda text: print(text, flush=True))
    except (experiment.Interrupted, KeyboardInterrupt):
        cli.interrupted(f"Interrupted. To go on: {cli.command_line()}")
    except FloatingPointError as error:
        cli.fail(error, exit_code=1)
    for path in paths:
        print(f"Written: {path}")
    markdown = next((path for path in paths if path.suffix == ".md"), None)
    if markdown and len(paths) == 4:
        print(pathlib.Path(markdown).read_text(encoding="utf-8").partition("## Deviations")[0])
