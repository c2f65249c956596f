"""CIFAR-10 under one small CPU budget: PGD-AT, hypersphere head, radius on PAS's cosine schedule.

The radius heads for 12/255 and stays at 8/255 from about 60 % of the run on.
Command:  python tools/train.py --config=configs/cifar10_budget_pas.py --config.seed=0
Time and numbers: docs/RESULTS.md.
"""

from he_keras_configs import budget_presets


def get_config():
    """Returns the configuration."""
    config = budget_presets.cifar10_budget("pas")
    with config.unlocked():
        config.epsilon_schedule = {
            "name": "cycle_cos",
            "initial": "0",
            "final": "12/255",
            "unit": "batch",
        }
    return config.lock()
