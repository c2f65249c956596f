"""CIFAR-10, ALP: Table 2 of the HE paper.

Command:  python tools/train.py --config=configs/cifar10_alp_linear.py
Paper:    clean 87.18, PGD-20 52.29 (scale-1 logits, no adaptive attack).
Time:     about 35 hours on the paper's four GPUs (its rebuttal's minutes an epoch, times 100).

Paper and code disagree: text pairs logits by the l2 norm; released code (followed) by the mean
square of unscaled cosines, weight 0.5 as in its README.
"""

from he_keras_configs import presets


def get_config():
    """Returns the configuration."""
    return presets.cifar10("alp", "linear")
