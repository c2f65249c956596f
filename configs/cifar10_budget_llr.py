"""CIFAR-10 under one small CPU budget: LLR with the hypersphere head.

Command:  python tools/train.py --config=configs/cifar10_budget_llr.py --config.seed=0
Time and numbers: docs/RESULTS.md.
"""

from he_keras_configs import llr_presets


def get_config():
    """Returns the configuration."""
    return llr_presets.cifar10_budget_llr()
