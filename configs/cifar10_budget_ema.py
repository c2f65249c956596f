"""CIFAR-10 under one small CPU budget: PGD-AT, hypersphere head, exponential moving average.

The average has the decay 0.99: at 382 steps an epoch, 0.9995 would mostly average a run's start.
Command:  python tools/train.py --config=configs/cifar10_budget_ema.py --config.seed=0
Time and numbers: docs/RESULTS.md.
"""

from he_keras_configs import budget_presets


def get_config():
    """Returns the configuration."""
    config = budget_presets.cifar10_budget("ema")
    with config.unlocked():
        config.train.weight_averaging.update({"kind": "ema", "decay": 0.99})
    return config.lock()
