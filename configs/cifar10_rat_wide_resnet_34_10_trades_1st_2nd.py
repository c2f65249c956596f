"""CIFAR-10, WRN-34-10, TRADES + 1st + 2nd: a network that RAT's supplement names.

Command:  python tools/train.py --config=configs/cifar10_rat_wide_resnet_34_10_trades_1st_2nd.py
Paper:    no numbers in the supplement.
Time:     not stated in the paper.
"""

from he_keras_configs import rat_presets


def get_config():
    """Returns the configuration."""
    return rat_presets.experiment("wide-resnet-34-10", "trades", terms=True)
