"""CIFAR-10, TRADES + HE over scale and margin: the grid of the HE paper's Table 9.

The paper chooses by PGD-20 on raw cosines and on the test set. Here the margin decides, on the
validation split: an attack on the cross-entropy would favour large scales.
"""

from collections.abc import Iterator

from he_keras.experiment.catalog import he_cifar10, papers
from he_keras.experiment.catalog.experiment_entry import ExperimentEntry

# Scale and margin of Table 9, without the point that stands in it twice.
TABLE_9 = (
    *((15.0, margin) for margin in (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)),
    *((scale, 0.2) for scale in (1.0, 5.0, 10.0, 20.0)),
)


def get_config():
    """Returns the configuration of the experiment."""
    config = he_cifar10.get_config("trades,he")
    with config.unlocked():
        config.name = "cifar10_search_scale_margin"
    return config.lock()


def get_search() -> dict:
    """Returns the settings of the search."""
    return {
        "tuner": "grid",
        "space": [{"scale": scale, "margin": margin} for scale, margin in TABLE_9],
        "objective": "margin-pgd-20",
    }


def experiments() -> Iterator[ExperimentEntry]:
    """Yields what is known of the search."""
    numbers = papers.quoted("he_table_9", "s = 15, m = 0.2", "clean", "pgd20")
    yield ExperimentEntry(
        "cifar10_search_scale_margin",
        "cifar10_search_scale_margin",
        "",
        "CIFAR-10, TRADES + HE over scale and margin: the grid of the HE paper's Table 9.",
        f"the best of the ten is s = 15, m = 0.2 with {numbers}.",
        "ten times that of he_cifar10:trades,he; workers share it (docs/how-to/search.md).",
        (
            "The paper chooses by PGD-20 on raw cosines and on the test set. Here the margin",
            "decides, on the validation split: an attack on the cross-entropy would favour large",
            "scales.",
        ),
        "the experiment alone: he-keras train --config=cifar10_search_scale_margin",
        has_search=True,
    )
