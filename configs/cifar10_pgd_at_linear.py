"""CIFAR-10, PGD-AT: Table 2 of the HE paper.

Command:  python tools/train.py --config=configs/cifar10_pgd_at_linear.py
Paper:    clean 86.75, PGD-20 53.97 (scale-1 logits, no adaptive attack).
Time:     about 32 hours on the paper's four GPUs (its rebuttal's minutes an epoch, times 100).

Paper and code disagree: text 8/255, step 2/255, uniform start; released code (followed) 0.031,
0.007, start 0.001 * N(0, I).
"""

from he_keras_configs import presets


def get_config():
    """Returns the configuration."""
    return presets.cifar10("pgd_at", "linear")
