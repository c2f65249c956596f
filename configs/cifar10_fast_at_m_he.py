"""CIFAR-10, FastAT + m-HE: Table 3 of the HE paper.

Command:  python tools/train.py --config=configs/cifar10_fast_at_m_he.py
Paper:    clean 83.14, PGD-50 53.49 (scale-1 logits, no adaptive attack).
Time:     11 minutes on the paper's GPU (mixed precision).

The HE authors released no FastAT code: settings of FastAT's own release (PreActResNet-18, 30
epochs, learning rate and momentum cycles, attack in training mode, overfitting guard).
Head: s = 15, m = 0.1.
"""

from he_keras_configs import presets


def get_config():
    """Returns the configuration."""
    return presets.cifar10("fast_at", "m_he")
