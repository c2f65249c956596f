"""ImageNet experiments of the HE paper's Table 4: --config=configs/he_imagenet.py:NETWORK,HEAD.

NETWORK is resnet-50, resnet-152, wide-resnet-50-2 or wide-resnet-101-2. HEAD is linear or he. The
training is FreeAT at 4/255. Nothing is held out: no best epoch is chosen, the last one counts.

Values, sources and deviations: he_keras/experiment/catalog/he_imagenet.py. `he-keras train --list`
shows every experiment with its published numbers.
"""

from he_keras.experiment.catalog import he_imagenet


def get_config(argument: str = "resnet-50,he"):
    """Returns the configuration; change values of it here, within `config.unlocked()`."""
    return he_imagenet.get_config(argument)
