"""One small CPU budget for every method: --config=configs/cifar10_budget.py:NAME.

NAME is pgd_at (linear head, the baseline), he, ema, pas, rat, awp or llr.

Values, sources and deviations: he_keras/experiment/catalog/cifar10_budget.py. `he-keras train
--list` shows every experiment with its published numbers.
"""

from he_keras.experiment.catalog import cifar10_budget


def get_config(argument: str = "he"):
    """Returns the configuration; change values of it here, within `config.unlocked()`."""
    return cifar10_budget.get_config(argument)
