"""CIFAR-10 experiments of the HE paper: --config=configs/he_cifar10.py:OBJECTIVE,HEAD.

OBJECTIVE is pgd_at, alp or trades (Tables 2 and 10), free_at or fast_at (Table 3), or standard (the
victim of Table 7). HEAD is linear, he or m_he.

Values, sources and deviations: he_keras/experiment/catalog/he_cifar10.py. `he-keras train --list`
shows every experiment with its published numbers.
"""

from he_keras.experiment.catalog import he_cifar10


def get_config(argument: str = "pgd_at,he"):
    """Returns the configuration; change values of it here, within `config.unlocked()`."""
    return he_cifar10.get_config(argument)
