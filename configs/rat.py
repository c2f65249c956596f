"""RAT ("+1st+2nd") of its supplement's tables: --config=configs/rat.py:DATA,NETWORK,BASE,TERMS.

DATA is cifar10 or cifar100. NETWORK is preact-resnet-18, wide-resnet-34-10, vgg-16 or mobilenet-v2.
BASE is at, trades or trades_awp. TERMS is none (the baseline) or 1st_2nd.

Values, sources and deviations: he_keras/experiment/catalog/rat.py. `he-keras train --list` shows
every experiment with its published numbers.
"""

from he_keras.experiment.catalog import rat


def get_config(argument: str = "cifar10,preact-resnet-18,trades,1st_2nd"):
    """Returns the configuration; change values of it here, within `config.unlocked()`."""
    return rat.get_config(argument)
