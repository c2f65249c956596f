"""CIFAR-10, FastAT + HE: Table 3 of the HE paper.

Command:  python tools/train.py --config=configs/cifar10_fast_at_he.py
Paper:    clean 82.58, PGD-50 52.55 (scale-1 logits, no adaptive attack).
Time:     11 minutes on the paper's GPU (mixed precision).

The HE authors released no FastAT code: settings of FastAT's own release (PreActResNet-18, 30
epochs, learning rate and momentum cycles, attack in training mode, overfitting guard).
Head: scale and margin are not stated: s = 15, m = 0.2 assumed.
"""

from he_keras_configs import presets


def get_config():
    """Returns the configuration."""
    return presets.cifar10("fast_at", "he")
