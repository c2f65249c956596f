"""CIFAR-10, PreActResNet-18, AT + 1st + 2nd: Table 8 of RAT's supplement.

Command:  python tools/train.py --config=configs/cifar10_rat_preact_resnet_18_at_1st_2nd.py
Paper:    clean 83.56, PGD-20 54.23, C&W-20 52.19, AutoAttack 48.7.
Time:     not stated in the paper.

The released code has no variant of adversarial training: settings of its TRADES variant.
"""

from he_keras_configs import rat_presets


def get_config():
    """Returns the configuration."""
    return rat_presets.experiment("preact-resnet-18", "at", terms=True)
