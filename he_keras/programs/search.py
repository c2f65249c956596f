"""Searches for scale and margin (and other numbers) of a configuration; the same command resumes.

he-keras search --list                                     (shows every search of a paper)
he-keras search --config=digits_search_scale_margin
he-keras search --config=configs/cifar10_small.py --tuner=bayesian --max_trials=20 \
    --space=scale=5:30:log --space=margin=0:0.4

A trial's value is its robust accuracy on the validation split under an attack that no scale can
fool. --dry_run shows what all trials will cost, and stops. docs/how-to/search.md explains the
tuners, and searches on several machines.
"""

import dataclasses
import runpy

from absl import flags
from ml_collections import config_flags

from he_keras.programs import cli

_CONFIG = config_flags.DEFINE_config_file("config", None, "Configuration file.", lock_config=True)
_TUNER = flags.DEFINE_string("tuner", None, "random, bayesian, hyperband or grid.")
_SPACE = flags.DEFINE_multi_string(
    "space", [], "NAME=LOW:HIGH, NAME=LOW:HIGH:log or NAME=VALUE,VALUE; replaces the preset."
)
_MAX_TRIALS = flags.DEFINE_integer("max_trials", None, "Number of trials; 0 for the tuner's own.")
_OBJECTIVE = flags.DEFINE_string("objective", None, "margin-pgd-K, dlr-pgd-K or apgd-dlr-K.")
_OUTPUT_DIR = flags.DEFINE_string("output_dir", None, "Folder; default runs/<name>_search.")
_SMOKE = flags.DEFINE_bool("smoke", False, "Synthetic data, at most two trials: does it run?")
_DRY_RUN = flags.DEFINE_bool(
    "dry_run", False, "Train a few batches, print what all trials will cost, and write nothing."
)
_LIST = flags.DEFINE_bool(
    "list", False, "Show every search with its numbers, or all about --config."
)
_SMOKE_TRIALS = 2


def main(_argv) -> None:
    """Prepares (errors here exit with code 2), searches, and says where the result is."""
    from he_keras import experiment

    if _LIST.value:
        with cli.one_line_errors():
            cli.print_experiments(_CONFIG.value, searches_only=True)
        return
    with cli.one_line_errors():
        config = cli.chosen_config(_CONFIG.value, _SMOKE.value)
        settings = _settings()
        if _DRY_RUN.value:
            print(experiment.cost_of_search(config, settings).text())
            return
        folder = _OUTPUT_DIR.value or f"runs/{config.name}_search"
        search = experiment.prepare_search(config, settings, folder, announce=_print)
    if search.is_complete:
        print(f"Nothing left to search in {search.folder}")
    elif search.num_ended:
        print(f"Resuming after {_trials(search.num_ended)}")
    try:
        found = search.run()
    except KeyboardInterrupt:
        cli.interrupted(
            f"Interrupted; finished trials and checkpoints are in {search.folder}. "
            f"To resume: {cli.command_line()}"
        )
    except (RuntimeError, OSError, ValueError) as error:
        cli.fail(error, exit_code=1)
    print(_summary(found, search.folder))
    if search.is_complete and found.get("best") is None:
        raise SystemExit(1)


def check_flags(_arguments: list[str]) -> None:
    """Raises a ValueError where there is nothing to search."""
    if not _LIST.value:
        cli.check_config_is_given()


def _settings():
    """The settings of the configuration file's `get_search`, if it has one, under the flags."""
    from he_keras.search import SearchSettings

    file, _, _ = config_flags.get_config_filename(flags.FLAGS["config"]).partition(":")
    preset = runpy.run_path(file)
    given = {
        "tuner": _TUNER.value,
        "space": _space(),
        "max_trials": _MAX_TRIALS.value,
        "objective": _OBJECTIVE.value,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    asked = {**preset.get("get_search", dict)(), **changes}
    known = [field.name for field in dataclasses.fields(SearchSettings)]
    if unknown := sorted(set(asked) - set(known)):
        raise ValueError(
            f"Unknown settings of a search; expected some of {known} from get_search() of the "
            f"configuration; received {unknown}"
        )
    settings = SearchSettings(**asked)
    if _SMOKE.value:
        few = min(settings.num_trials or _SMOKE_TRIALS, _SMOKE_TRIALS)
        settings = dataclasses.replace(settings, max_trials=few)
    return settings


def _space() -> dict[str, str] | None:
    space: dict[str, str] = {}
    for text in _SPACE.value:
        name, equals, setting = text.partition("=")
        if not (name and equals and setting) or name in space:
            raise ValueError(
                "Invalid space; expected --space=NAME=LOW:HIGH or --space=NAME=VALUE,VALUE, each "
                f"name once; received --space={text}"
            )
        space[name] = setting
    return space or None


def _summary(found: dict, folder) -> str:
    rows = {row["trial"]: row for row in found.get("trials", [])}
    if found.get("best") not in rows:
        return f"No trial has completed; see {folder}"
    winner = rows[found["best"]]
    return "\n".join(
        [
            f"Best of {_trials(len(rows))}: {winner['trial']}, "
            f"clean {winner['clean_accuracy']:.2%}, "
            f"robust {winner['robust_accuracy']:.2%} ({winner['objective']}; "
            f"{found.get('threat', 'threat model unknown')})",
            f"Trials:  {folder / 'trials.csv'}",
            f"Picture: {folder / 'pareto.png'}",
            f"Config:  {folder / 'best_config.py'}",
        ]
    )


def _trials(count: int) -> str:
    return f"{count} trial{'s' * (count != 1)}"


def _print(line: str) -> None:
    """Prints at once, into a pipe or a file too."""
    print(line, flush=True)
