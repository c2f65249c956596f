"""CIFAR-10 on a CPU without adversary: a small victim for FN in the attack (docs/analysis.md).

Command:  python tools/train.py --config=configs/cifar10_small_standard.py
Time and numbers: docs/analysis.md, measured on two cores.
"""

from he_keras_configs import analysis_presets


def get_config():
    """Returns the configuration."""
    return analysis_presets.cifar10_small_standard()
