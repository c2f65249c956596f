"""CIFAR-10, TRADES + HE: Table 2 of the HE paper.

Command:  python tools/train.py --config=configs/cifar10_trades_he.py
Paper:    clean 84.88, PGD-20 62.02 (scale-1 logits, no adaptive attack).
Time:     about 43 hours on the paper's four GPUs (its rebuttal's minutes an epoch, times 100).

Paper and code disagree: text prints a cross-entropy between predictions; released code (followed)
uses the KL divergence, beta 6.
Head: s = 15, m = 0.2.
"""

from he_keras_configs import presets


def get_config():
    """Returns the configuration."""
    return presets.cifar10("trades", "he")
