"""Every registered attack with a small budget, for the tests that run over all of them."""

import functools
import pathlib
import tempfile

import keras
import numpy as np

from he_keras import attacks

BUDGET = 5
#: What has no budget in its name, or needs more than that to be cheap.
OPTIONS = {
    "apgd-t": {"num_targets": 2},
    "autoattack": {"num_steps": 4, "num_queries": 8},
    "autoattack-fast-first": {"num_steps": 4, "num_queries": 8},
    "autoattack-plus": {"num_steps": 4, "num_queries": 8},
    "autoattack-rand": {"num_steps": 4},
    "cw-l2": {"binary_search_steps": 2},
    "fab-t": {"num_targets": 2},
    "feature": {"num_targets": 3},
    "multi-targeted": {"num_targets": 2},
    "nes": {"num_samples": 8},
    "rays": {"num_queries": 40},
    "spsa": {"num_samples": 8},
    "square": {"num_queries": 20},
    "zoo": {"num_queries": 60, "coordinates_per_step": 4, "binary_search_steps": 2},
}
#: Ensembles and bridges: several attacks in one, or no single graph.
SLOW = (
    "autoattack",
    "autoattack-fast-first",
    "autoattack-plus",
    "autoattack-rand",
    "cleverhans",
    "fast",
    "screen",
)


def base_name(name):
    """The registered name without "-K" or ":ARGUMENT"."""
    return name.removesuffix("-K").partition(":")[0]


def build(name, threat, **options):
    """Builds the attack registered as `name`, an entry of `attacks.names()`."""
    base = base_name(name)
    options = {**OPTIONS.get(base, {}), **options}
    if base == "transfer":
        options = {"num_steps": BUDGET, "step_size": 0.001, **options}
        return attacks.get(f"transfer:{substitute()}", threat, **options)
    if base == "cleverhans":
        return attacks.get("cleverhans:pgd", threat, num_steps=BUDGET, **options)
    budgeted = {"num_queries", "num_steps"} & set(options)
    full = f"{base}-{BUDGET}" if name.endswith("-K") and not budgeted else base
    return attacks.get(full, threat, **options)


@functools.cache
def substitute():
    """A file with a linear classifier of images 8 x 8 x 3 with 5 classes."""
    model = keras.Sequential(
        [keras.Input((8, 8, 3)), keras.layers.Flatten(), keras.layers.Dense(5)]
    )
    random = np.random.default_rng(3)
    model.set_weights([random.normal(size=weight.shape) for weight in model.get_weights()])
    path = pathlib.Path(tempfile.mkdtemp()) / "substitute.keras"
    model.save(path)
    return path
