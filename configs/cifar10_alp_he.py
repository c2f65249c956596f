"""CIFAR-10, ALP + HE: Table 2 of the HE paper.

Command:  python tools/train.py --config=configs/cifar10_alp_he.py
Paper:    clean 89.91, PGD-20 57.69 (scale-1 logits, no adaptive attack).
Time:     about 35 hours on the paper's four GPUs (its rebuttal's minutes an epoch, times 100).

Paper and code disagree: text pairs logits by the l2 norm; released code (followed) by the mean
square of unscaled cosines, weight 0.5 as in its README.
Head: text s = 15, m = 0.2; released command (followed) s = 20, m = 0.3.
"""

from he_keras_configs import presets


def get_config():
    """Returns the configuration."""
    return presets.cifar10("alp", "he")
