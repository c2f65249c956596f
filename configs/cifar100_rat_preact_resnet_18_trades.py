"""CIFAR-100, PreActResNet-18, TRADES: RAT's setting for 100 classes, baseline.

Command:  python tools/train.py --config=configs/cifar100_rat_preact_resnet_18_trades.py
Paper:    no numbers in the supplement.
Time:     not stated in the paper.
"""

from he_keras_configs import rat_presets


def get_config():
    """Returns the configuration."""
    return rat_presets.experiment("preact-resnet-18", "trades", terms=False, data="cifar100")
