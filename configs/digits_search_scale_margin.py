"""scikit-learn's digits: a search for scale and margin that finishes in minutes.

Command:  python tools/search.py --config=configs/digits_search_scale_margin.py
          (the experiment alone: tools/train.py --config=configs/digits_search_scale_margin.py)
Time and numbers: docs/search.md, measured on two cores.
"""

from he_keras_configs import quickstart_digits


def get_config():
    """Returns the configuration of the experiment."""
    config = quickstart_digits.get_config()
    with config.unlocked():
        config.name = "digits_search_scale_margin"
        config.data.validation_examples = 200
        config.train.epochs = 6
    return config.lock()


def get_search():
    """Returns the settings of the search."""
    return {
        "tuner": "random",
        "space": {"scale": "1:64:log", "margin": "0:0.4"},
        "max_trials": 8,
        "objective": "margin-pgd-20",
    }
