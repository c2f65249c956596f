"""CIFAR-10, PreActResNet-18, TRADES + AWP + 1st + 2nd: the AWP variant of RAT's released code.

Command:  python tools/train.py --config=configs/cifar10_rat_preact_resnet_18_trades_awp_1st_2nd.py
Paper:    no numbers in the supplement.
Time:     not stated in the paper.

Perturbed from the eleventh epoch on; the number of steps assumes batches of 128.
"""

from he_keras_configs import rat_presets


def get_config():
    """Returns the configuration."""
    return rat_presets.experiment("preact-resnet-18", "trades", terms=True, awp=True)
