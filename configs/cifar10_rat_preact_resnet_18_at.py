"""CIFAR-10, PreActResNet-18, AT: Table 8 of RAT's supplement, its baseline.

Command:  python tools/train.py --config=configs/cifar10_rat_preact_resnet_18_at.py
Paper:    clean 82.41, PGD-20 52.77, C&W-20 50.43, AutoAttack 47.1.
Time:     not stated in the paper.

Settings of the released TRADES variant; the code of this baseline is not among it.
"""

from he_keras_configs import rat_presets


def get_config():
    """Returns the configuration."""
    return rat_presets.experiment("preact-resnet-18", "at", terms=False)
