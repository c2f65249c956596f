"""CIFAR-10 on a CPU: LLR with two search steps on the network of cifar10_small, with softplus.

Command:  python tools/train.py --config=configs/cifar10_small_llr.py
          (--config.head.kind=linear for the baseline)
Time and numbers: docs/RESULTS.md. By its passes a step costs three of cifar10_small.
"""

from he_keras_configs import llr_presets


def get_config():
    """Returns the configuration."""
    return llr_presets.cifar10_small_llr()
