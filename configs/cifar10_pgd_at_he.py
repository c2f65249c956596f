"""CIFAR-10, PGD-AT + HE: Table 2 of the HE paper.

Command:  python tools/train.py --config=configs/cifar10_pgd_at_he.py
Paper:    clean 86.19, PGD-20 59.36 (scale-1 logits, no adaptive attack).
Time:     about 32 hours on the paper's four GPUs (its rebuttal's minutes an epoch, times 100).

Paper and code disagree: text 8/255, step 2/255, uniform start; released code (followed) 0.031,
0.007, start 0.001 * N(0, I).
Head: text s = 15, m = 0.2, weight decay 2e-4; released command (followed) s = 10, m = 0.2, 5e-4.
"""

from he_keras_configs import presets


def get_config():
    """Returns the configuration."""
    return presets.cifar10("pgd_at", "he")
