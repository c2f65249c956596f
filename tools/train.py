"""Trains a configuration into a run folder; the same command resumes an interrupted run.

python tools/train.py --config=configs/cifar10_small.py --config.head.kind=linear
"""

from absl import flags
from ml_collections import config_flags

from he_keras_tools import cli

_CONFIG = config_flags.DEFINE_config_file("config", None, "Configuration file.", lock_config=True)
_OUTPUT_DIR = flags.DEFINE_string("output_dir", None, "Run folder; default runs/<name>.")
_SMOKE = flags.DEFINE_bool("smoke", False, "Synthetic data and two batches: checks that it runs.")


def main(_argv) -> None:
    """Prepares (errors here exit with code 2), trains, and says where the result is."""
    from he_keras import experiment

    with cli.one_line_errors():
        if _CONFIG.value is None:
            raise ValueError("No configuration; expected --config=configs/NAME.py; received none")
        config = experiment.smoke_variant(_CONFIG.value) if _SMOKE.value else _CONFIG.value
        training = experiment.prepare_training(config, _OUTPUT_DIR.value or f"runs/{config.name}")
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
    except FloatingPointError as error:
        cli.fail(error, exit_code=1)
    print(f"Saved {training.folder / 'model.keras'}")


if __name__ == "__main__":
    cli.run(main)
