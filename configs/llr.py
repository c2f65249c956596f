"""LLR (Qin et al. 2019) at the paper's scale: --config=configs/llr.py:EXPERIMENT.

EXPERIMENT is cifar10_paper (the weights of the paper), cifar10_released (those of the released
code) or imagenet.

Values, sources and deviations: he_keras/experiment/catalog/llr.py. `he-keras train --list` shows
every experiment with its published numbers.
"""

from he_keras.experiment.catalog import llr


def get_config(argument: str = "cifar10_paper"):
    """Returns the configuration; change values of it here, within `config.unlocked()`."""
    return llr.get_config(argument)
