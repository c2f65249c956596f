"""CIFAR-10, PreActResNet-18, TRADES + 1st + 2nd: Table 7 of RAT's supplement.

Command:  python tools/train.py --config=configs/cifar10_rat_preact_resnet_18_trades_1st_2nd.py
Paper:    clean 84.13, RayS 57.03, mean distance of RayS 0.0435.
Time:     not stated in the paper.
"""

from he_keras_configs import rat_presets


def get_config():
    """Returns the configuration."""
    return rat_presets.experiment("preact-resnet-18", "trades", terms=True)
