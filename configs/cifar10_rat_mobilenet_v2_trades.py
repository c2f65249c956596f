"""CIFAR-10, MobileNetV2, TRADES: a network that RAT's supplement names, baseline.

Command:  python tools/train.py --config=configs/cifar10_rat_mobilenet_v2_trades.py
Paper:    no numbers in the supplement.
Time:     not stated in the paper.
"""

from he_keras_configs import rat_presets


def get_config():
    """Returns the configuration."""
    return rat_presets.experiment("mobilenet-v2", "trades", terms=False)
