"""CIFAR-10, TRADES + HE over scale and margin: the grid of the HE paper's Table 9.

Values, sources and deviations: he_keras/experiment/catalog/cifar10_search_scale_margin.py. `he-
keras search --list` shows every experiment with its published numbers.
"""

from he_keras.experiment.catalog import cifar10_search_scale_margin


def get_config():
    """Returns the configuration; change values of it here, within `config.unlocked()`."""
    return cifar10_search_scale_margin.get_config()


def get_search() -> dict:
    """Returns the settings of the search."""
    return cifar10_search_scale_margin.get_search()
