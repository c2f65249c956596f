"""CIFAR-10, VGG-16, TRADES: a network that RAT's supplement names, baseline.

Command:  python tools/train.py --config=configs/cifar10_rat_vgg_16_trades.py
Paper:    no numbers in the supplement.
Time:     not stated in the paper.
"""

from he_keras_configs import rat_presets


def get_config():
    """Returns the configuration."""
    return rat_presets.experiment("vgg-16-bn", "trades", terms=False)
