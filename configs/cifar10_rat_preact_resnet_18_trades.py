"""CIFAR-10, PreActResNet-18, TRADES: Table 7 of RAT's supplement, its baseline.

Command:  python tools/train.py --config=configs/cifar10_rat_preact_resnet_18_trades.py
Paper:    clean 82.89, RayS 56.06, mean distance of RayS 0.0412.
Time:     not stated in the paper.
"""

from he_keras_configs import rat_presets


def get_config():
    """Returns the configuration."""
    return rat_presets.experiment("preact-resnet-18", "trades", terms=False)
