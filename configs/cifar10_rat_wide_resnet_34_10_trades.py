"""CIFAR-10, WRN-34-10, TRADES: a network that RAT's supplement names, baseline.

Command:  python tools/train.py --config=configs/cifar10_rat_wide_resnet_34_10_trades.py
Paper:    no numbers in the supplement.
Time:     not stated in the paper.
"""

from he_keras_configs import rat_presets


def get_config():
    """Returns the configuration."""
    return rat_presets.experiment("wide-resnet-34-10", "trades", terms=False)
