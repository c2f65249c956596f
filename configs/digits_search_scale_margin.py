"""scikit-learn's digits: a search for scale and margin that finishes in minutes.

Values, sources and deviations: he_keras/experiment/catalog/digits_search_scale_margin.py. `he-keras
search --list` shows every experiment with its published numbers.
"""

from he_keras.experiment.catalog import digits_search_scale_margin


def get_config():
    """Returns the configuration; change values of it here, within `config.unlocked()`."""
    return digits_search_scale_margin.get_config()


def get_search() -> dict:
    """Returns the settings of the search."""
    return digits_search_scale_margin.get_search()
