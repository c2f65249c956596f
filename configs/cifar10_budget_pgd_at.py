"""CIFAR-10 under one small CPU budget: PGD-AT with a linear head, the baseline.

Command:  python tools/train.py --config=configs/cifar10_budget_pgd_at.py --config.seed=0
Time and numbers: docs/RESULTS.md.
"""

from he_keras_configs import budget_presets


def get_config():
    """Returns the configuration."""
    return budget_presets.cifar10_budget("pgd_at", head="linear")
