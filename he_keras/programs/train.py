"""Trains a configuration into a run folder; the same command resumes an interrupted run.

he-keras train --list                                      (shows every experiment)
he-keras train --list --config=he_cifar10:trades,m_he      (shows all about this one)
he-keras train --config=he_cifar10:trades,m_he
he-keras train --config=configs/cifar10_small.py --config.head.kind=linear
he-keras train --config=configs/cifar10_small.py --strategy=mirrored
he-keras train --config=configs/cifar10_small.py --dry_run (shows what it will cost, and stops)

A configuration is a file, or the name of an experiment's file with its argument.

--strategy=multi_worker runs in every worker that the environment variable TF_CONFIG lists, with one
--output_dir that all of them see. The first worker writes there.
docs/how-to/devices.md has the commands.
"""

import os
import sys

from absl import flags
from ml_collections import config_flags

from he_keras.programs import cli

_CONFIG = config_flags.DEFINE_config_file("config", None, "Configuration file.", lock_config=True)
_OUTPUT_DIR = flags.DEFINE_string("output_dir", None, "Run folder; default runs/<name>.")
_SMOKE = flags.DEFINE_bool("smoke", False, "Synthetic data and two batches: checks that it runs.")
_DRY_RUN = flags.DEFINE_bool(
    "dry_run", False, "Train a few batches, print what all will cost, and write nothing."
)
_STRATEGY = flags.DEFINE_enum(
    "strategy",
    "none",
    ["none", "mirrored", "multi_worker", "tpu"],
    "One device; all GPUs of this machine; all workers of TF_CONFIG; a TPU.",
)
_LIST = flags.DEFINE_bool(
    "list", False, "Show every experiment with its numbers, or all about --config."
)
_TPU = flags.DEFINE_string("tpu", "", "Name or address of the TPU; default: the machine's own.")
_LOGICAL_DEVICES = flags.DEFINE_integer(
    "logical_devices", 0, "Splits the CPU into so many devices, to try out --strategy=mirrored."
)


def main(_argv) -> None:
    """Prepares (errors here exit with code 2), trains, and says where the result is."""
    from he_keras import distribution, experiment

    if _LIST.value:
        with cli.one_line_errors():
            cli.print_experiments(_CONFIG.value)
        return
    with cli.one_line_errors():
        config = cli.chosen_config(_CONFIG.value, _SMOKE.value)
        strategy = _strategy()
        if _DRY_RUN.value:
            print(experiment.cost_of_training(config, strategy).text())
            return
    try:
        with cli.one_line_errors():
            folder = _OUTPUT_DIR.value or f"runs/{config.name}"
            training = experiment.prepare_training(config, folder, strategy)
        _train(training)
    except distribution.WorkerLostError as error:
        # A normal exit of TensorFlow would wait for the lost worker.
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def check_flags(_arguments: list[str]) -> None:
    """Raises a ValueError where there is nothing to train."""
    if not _LIST.value:
        cli.check_config_is_given()


def _strategy():
    """The strategy, before anything else uses a device."""
    from he_keras import distribution

    if _LOGICAL_DEVICES.value:
        distribution.split_cpu(_LOGICAL_DEVICES.value)
    strategy = distribution.strategy(_STRATEGY.value, _TPU.value)
    if _STRATEGY.value != "none":
        print(distribution.describe(strategy), flush=True)
    return strategy


def _train(training) -> None:
    from he_keras import experiment

    epoch, batch = training.place
    if training.is_complete:
        print(f"Nothing left to train in {training.folder}")
    elif epoch or batch:
        print(f"Resuming at epoch {epoch + 1}, batch {batch + 1} of {training.steps}")
    try:
        training.run()
    except (experiment.Interrupted, KeyboardInterrupt):
        cli.interrupted(
            f"Interrupted; the checkpoint is in {training.folder}. To resume: {cli.command_line()}"
        )
    except (ValueError, TypeError, FloatingPointError) as error:
        cli.fail(error, exit_code=1)
    except OSError as error:
        cli.fail(f"{error}; {_left(training)}: {cli.command_line()}", exit_code=1)
    print(f"Saved {training.folder / 'model.keras'}")


def _left(training) -> str:
    """Says which checkpoint there is after a failed write, and what the same command does."""
    checkpoint = training.resume.path
    if checkpoint.exists():
        return f"the last checkpoint is {checkpoint}. To resume"
    return f"no checkpoint was written into {checkpoint.parent}. To start again"
