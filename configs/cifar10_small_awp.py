"""CIFAR-10 on a CPU: AWP around FastAT on the network of cifar10_small.

Command:  python tools/train.py --config=configs/cifar10_small_awp.py
          (--config.head.kind=linear for the baseline)
Time and numbers: docs/RESULTS.md. A step costs about 1.6 times that of cifar10_small.
"""

from he_keras_configs import rat_presets


def get_config():
    """Returns the configuration."""
    return rat_presets.cifar10_small_awp()
