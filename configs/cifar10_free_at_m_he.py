"""CIFAR-10, FreeAT + m-HE: Table 3 of the HE paper.

Command:  python tools/train.py --config=configs/cifar10_free_at_m_he.py
Paper:    clean 77.59, PGD-50 51.85 (scale-1 logits, no adaptive attack).
Time:     16 minutes on the paper's GPU (mixed precision).

The HE authors released no FreeAT code for CIFAR-10: settings of FastAT's release (PreActResNet-18,
10 epochs of 8 replays, learning rate and momentum cycles).
Head: s = 15, m = 0.1.
"""

from he_keras_configs import presets


def get_config():
    """Returns the configuration."""
    return presets.cifar10("free_at", "m_he")
