"""PAS on CIFAR-10: --config=configs/pas_cifar10.py:NETWORK,SCHEDULE,CYCLES.

NETWORK is vgg16 or resnet18, both of half the usual width. SCHEDULE of the radius is constant,
cosine or linear. CYCLES is whole or restarts.

Values, sources and deviations: he_keras/experiment/catalog/pas_cifar10.py. `he-keras train --list`
shows every experiment with its published numbers.
"""

from he_keras.experiment.catalog import pas_cifar10


def get_config(argument: str = "resnet18,cosine,whole"):
    """Returns the configuration; change values of it here, within `config.unlocked()`."""
    return pas_cifar10.get_config(argument)
