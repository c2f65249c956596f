"""FastAT at large epsilon on a CPU, and what keeps it from collapsing.

--config=configs/cifar10_large_epsilon.py:EPSILON,GUARD, where EPSILON is 12 or 16 (in 1/255) and
GUARD is none, random_start, n_fgsm, grad_align, elle, elle_a or fast_adv_plus.

Values, sources and deviations: he_keras/experiment/catalog/cifar10_large_epsilon.py. `he-keras
train --list` shows every experiment with its published numbers.
"""

from he_keras.experiment.catalog import cifar10_large_epsilon


def get_config(argument: str = "12,none"):
    """Returns the configuration; change values of it here, within `config.unlocked()`."""
    return cifar10_large_epsilon.get_config(argument)
