"""CIFAR-10 on a CPU without adversary: a small victim for FN in the attack (docs/analysis.md).

Command:  python tools/train.py --config=configs/cifar10_small_standard.py
Time:     one forward and backward pass an image, of cifar10_small's two.
Number:   78.8 % of the first 1000 test images after 4 epochs (--config.train.epochs=4), one seed.
"""

from he_keras_configs import analysis_presets


def get_config():
    """Returns the configuration."""
    return analysis_presets.cifar10_small_standard()
