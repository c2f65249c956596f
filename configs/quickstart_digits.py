"""scikit-learn's digits (8x8, embedded): the experiment of `make quickstart`.

Nothing is held out: the last epoch counts.

Values, sources and deviations: he_keras/experiment/catalog/quickstart_digits.py. `he-keras train
--list` shows every experiment with its published numbers.
"""

from he_keras.experiment.catalog import quickstart_digits


def get_config():
    """Returns the configuration; change values of it here, within `config.unlocked()`."""
    return quickstart_digits.get_config()
