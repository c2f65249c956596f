"""scikit-learn's digits: a search for scale and margin that finishes in minutes."""

from collections.abc import Iterator

from he_keras.experiment.catalog import quickstart_digits
from he_keras.experiment.catalog.experiment_entry import ExperimentEntry


def get_config():
    """Returns the configuration of the experiment."""
    config = quickstart_digits.get_config()
    with config.unlocked():
        config.name = "digits_search_scale_margin"
        config.data.validation_examples = 200
        config.train.epochs = 6
    return config.lock()


def get_search() -> dict:
    """Returns the settings of the search."""
    return {
        "tuner": "random",
        "space": {"scale": "1:64:log", "margin": "0:0.4"},
        "max_trials": 8,
        "objective": "margin-pgd-20",
    }


def experiments() -> Iterator[ExperimentEntry]:
    """Yields what is known of the search."""
    yield ExperimentEntry(
        "digits_search_scale_margin",
        "digits_search_scale_margin",
        "",
        "scikit-learn's digits: a search for scale and margin that finishes in minutes.",
        time="docs/reference/search.md, with the numbers, measured on two cores.",
        options="the experiment alone: he-keras train --config=digits_search_scale_margin",
        has_search=True,
    )
