"""CIFAR-10, TRADES + HE over scale and margin: the grid of the HE paper's Table 9.

Command:  python tools/search.py --config=configs/cifar10_search_scale_margin.py
          (the experiment alone: tools/train.py --config=configs/cifar10_search_scale_margin.py)
Paper:    the best of the ten is s = 15, m = 0.2 with clean 84.88, PGD-20 62.02.
Time:     ten times that of configs/cifar10_trades_he.py; workers share it (docs/search.md).

The paper chooses by PGD-20 on raw cosines and on the test set. Here the margin decides, on the
validation split: an attack on the cross-entropy would favour large scales.
"""

from he_keras_configs import presets

# Scale and margin of Table 9, without the point that stands in it twice.
TABLE_9 = (
    *((15.0, margin) for margin in (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)),
    *((scale, 0.2) for scale in (1.0, 5.0, 10.0, 20.0)),
)


def get_config():
    """Returns the configuration of the experiment."""
    config = presets.cifar10("trades", "he")
    with config.unlocked():
        config.name = "cifar10_search_scale_margin"
    return config.lock()


def get_search():
    """Returns the settings of the search."""
    return {
        "tuner": "grid",
        "space": [{"scale": scale, "margin": margin} for scale, margin in TABLE_9],
        "objective": "margin-pgd-20",
    }
