"""scikit-learn's digits (8x8, embedded): the experiment of `make quickstart`.

Nothing is held out: the last epoch counts.
"""

from collections.abc import Iterator

from he_keras.experiment.catalog.experiment_entry import ExperimentEntry
from he_keras.experiment.configuration import default_config


def get_config():
    """Returns the configuration."""
    config = default_config()
    with config.unlocked():
        config.name = "quickstart_digits"
        config.data.update({"name": "digits", "validation_examples": 0})
        config.network = {
            "name": "preact-resnet",
            "input_shape": (8, 8, 1),
            "options": {
                "stage_widths": (16, 32),
                "blocks_per_stage": (1, 1),
                "standardize": False,
            },
        }
        config.head.update({"scale": 10.0, "margin": 0.2})
        config.threat.epsilon = "0.15"
        config.objective = {
            "name": "pgd_at",
            "num_steps": 7,
            "step_size": "0.04",
            "random_start": "uniform",
        }
        config.optimizer.update({"learning_rate": 0.1, "weight_decay": 5e-4})
        config.schedule = {"name": "triangular"}
        config.train.update({"epochs": 20, "batch_size": 64})
        config.evaluation.attacks = ("pgd-20", "adaptive-pgd-20", "cw-linf-20")
    return config.lock()


def experiments() -> Iterator[ExperimentEntry]:
    """Yields what is known of the experiment."""
    yield ExperimentEntry(
        "quickstart_digits",
        "quickstart_digits",
        "",
        "scikit-learn's digits (8x8, embedded): the experiment of `make quickstart`.",
        time="printed by `make quickstart`, with the numbers; README.md has those measured last.",
        notes=("Nothing is held out: the last epoch counts.",),
        options="--output_dir=runs/digits for another folder",
    )
