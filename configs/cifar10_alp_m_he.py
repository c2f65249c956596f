"""CIFAR-10, ALP + m-HE: Table 2 of the HE paper.

Command:  python tools/train.py --config=configs/cifar10_alp_m_he.py
Paper:    clean 89.23, PGD-20 57.09 (scale-1 logits, no adaptive attack).
Time:     about 35 hours on the paper's four GPUs (its rebuttal's minutes an epoch, times 100).

Paper and code disagree: text pairs logits by the l2 norm; released code (followed) by the mean
square of unscaled cosines, weight 0.5 as in its README.
Head: s = 15, m = 0.1.
"""

from he_keras_configs import presets


def get_config():
    """Returns the configuration."""
    return presets.cifar10("alp", "m_he")
