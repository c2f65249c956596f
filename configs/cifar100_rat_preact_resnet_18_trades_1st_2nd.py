"""CIFAR-100, PreActResNet-18, TRADES + 1st + 2nd: RAT's setting for 100 classes.

Command:  python tools/train.py --config=configs/cifar100_rat_preact_resnet_18_trades_1st_2nd.py
Paper:    no numbers in the supplement.
Time:     not stated in the paper.

The wrong classes share 0.98 of a soft label: `1 - 2 / classes`, as for every number of classes.
"""

from he_keras_configs import rat_presets


def get_config():
    """Returns the configuration."""
    return rat_presets.experiment("preact-resnet-18", "trades", terms=True, data="cifar100")
