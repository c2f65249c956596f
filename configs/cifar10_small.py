"""CIFAR-10 on a CPU, on a small network: --config=configs/cifar10_small.py:METHOD.

METHOD is fast_at (the default), standard, pgd_at, rat, awp or llr. The network is a pre-activation
ResNet with a hypersphere head; `--config.head.kind=linear` is the baseline.

Values, sources and deviations: he_keras/experiment/catalog/cifar10_small.py. `he-keras train
--list` shows every experiment with its published numbers.
"""

from he_keras.experiment.catalog import cifar10_small


def get_config(argument: str = "fast_at"):
    """Returns the configuration; change values of it here, within `config.unlocked()`."""
    return cifar10_small.get_config(argument)
