"""What an experiment's configuration contains, and how it becomes objects.

A configuration is an `ml_collections.ConfigDict` of plain data. `default_config()` holds every key
that exists; files in `configs/` change values. Sizes such as epsilon are strings ("8/255",
"0.031"), so that a command-line override may use either form. An unknown key is an error that
lists the valid ones.
"""

import json
import pathlib

import keras

from he_keras import networks, objectives, optimizers, schedules
from he_keras.adversarial_model import HEAdversarialModel
from he_keras.layers import CosineHead
from he_keras.objectives import Objective
from he_keras.threat import ThreatModel

HEADS = ("linear", "he", "m_he")
DTYPES = ("float32", "mixed_bfloat16", "mixed_float16")
_DATA = {
    "name": "cifar10",
    "data_dir": "",
    "augmentation": "default",
    "train_examples": 0,
    "validation_examples": 1000,
    "test_examples": 0,
    "synthetic": False,
}
_STARTS = {"uniform": True, "none": False, "gaussian": "gaussian"}


def default_config():
    """Returns a locked configuration with every key of an experiment.

    Example:
        >>> from he_keras.experiment import default_config
        >>> default_config().head.kind
        'he'
    """
    from ml_collections import ConfigDict

    config = ConfigDict()
    config.name = "experiment"
    config.seed = 0
    config.data = dict(_DATA)
    config.network = {"name": "preact-resnet-18", "input_shape": (32, 32, 3), "options": {}}
    config.head = {
        "kind": "he",
        "num_classes": 10,
        "scale": 15.0,
        "margin": 0.2,
        "feature_norm": True,
        "weight_norm": True,
    }
    config.threat = {"norm": "linf", "epsilon": "8/255"}
    config.objective = {"name": "pgd_at"}
    config.optimizer = {"learning_rate": 0.1, "momentum": 0.9, "weight_decay": 2e-4}
    config.schedule = {"name": "constant"}
    config.train = {
        "epochs": 1,
        "batch_size": 128,
        "dtype": "float32",
        "checkpoint_every_batches": 0,
        "checkpoint_every_seconds": 300.0,
        "overfitting_guard": False,
    }
    config.evaluation = {
        "validation_attack": "default",
        "attacks": ("pgd-20", "adaptive-pgd-20", "cw-linf-20"),
        "step_size": "",
        "batch_size": 250,
    }
    config.smoke = {"network": "", "input_shape": (32, 32, 3)}
    return config.lock()


def smoke_variant(config):
    """Returns a copy that finishes in seconds: synthetic data, two batches, a small network."""
    from ml_collections import ConfigDict

    small = ConfigDict(config)
    with small.unlocked():
        small.name = f"{config.name}_smoke"
        small.data.update({"synthetic": True, "train_examples": 16, "validation_examples": 8})
        small.data.test_examples = 8
        if config.smoke.network:
            small.network.update({"name": config.smoke.network, "options": {}})
            small.network.input_shape = tuple(config.smoke.input_shape)
        small.train.update({"epochs": 1, "batch_size": 8})
        small.evaluation.update({"attacks": ("fgsm", "pgd-2"), "batch_size": 8})
        small.evaluation.validation_attack = "pgd-2"
        if "num_steps" in small.objective:
            small.objective.num_steps = 2
    return small.lock()


def to_plain(config) -> dict:
    """Returns the configuration as JSON-compatible data (tuples become lists)."""
    return json.loads(config.to_json())


def build_threat(config) -> ThreatModel:
    """Builds the threat model."""
    return ThreatModel(config.threat.norm, config.threat.epsilon)


def build_objective(config) -> Objective:
    """Builds the training objective; every key but `name` is an argument of it."""
    options = dict(config.objective)
    name = options.pop("name")
    if "random_start" in options:
        options["random_start"] = _parse_start(options["random_start"])
    if options.get("step_size") == "":
        del options["step_size"]
    try:
        return objectives.get(name, build_threat(config), **options)
    except TypeError as error:
        raise ValueError(
            f"Unknown option of objective {name!r}; expected its arguments; received {options}: "
            f"{error}"
        ) from error


def build_head(config) -> keras.layers.Layer:
    """Builds the head: "linear", "he" (scaled cosines) or "m_he" (scaled angles)."""
    head = config.head
    if head.kind not in HEADS:
        raise ValueError(f"Unknown head; expected one of {HEADS}; received head.kind={head.kind!r}")
    if head.kind == "linear":
        bound = keras.initializers.VarianceScaling(1 / 3, "fan_in", "uniform")
        return keras.layers.Dense(head.num_classes, kernel_initializer=bound, dtype="float32")
    return CosineHead(
        head.num_classes,
        scale=head.scale,
        margin=head.margin,
        feature_norm=head.feature_norm,
        weight_norm=head.weight_norm,
        angle="cosine" if head.kind == "he" else "arc",
    )


def build_optimizer(config, steps_per_epoch: int) -> keras.optimizers.Optimizer:
    """Builds SGD in PyTorch's form with coupled weight decay and the configured schedule."""
    options = dict(config.schedule)
    name = options.pop("name")
    # FreeAT updates the weights once for each replay of a batch.
    updates = steps_per_epoch * int(config.objective.get("num_replays", 1))
    total_steps = updates * config.train.epochs
    momentum = config.optimizer.momentum
    if options.pop("cycle_momentum", False):
        momentum = schedules.get(
            "cyclic_momentum",
            total_steps,
            updates,
            peak_fraction=options.get("peak_fraction", 0.5),
        )
    height = "peak" if name in ("triangular", "cyclic") else "initial"
    if name != "piecewise":
        options[height] = config.optimizer.learning_rate
    learning_rate = schedules.get(name, total_steps, updates, **options)
    return optimizers.SGD(
        learning_rate, momentum=momentum, weight_decay=config.optimizer.weight_decay
    )


def build_model(config, steps_per_epoch: int) -> HEAdversarialModel:
    """Builds and compiles the model; weights are drawn from the configured seed."""
    if config.train.dtype not in DTYPES:
        raise ValueError(
            f"Unknown dtype; expected one of {DTYPES}; received train.dtype={config.train.dtype!r}"
        )
    objective = build_objective(config)
    keras.utils.set_random_seed(config.seed)
    policy_before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(config.train.dtype)
    try:
        network = networks.get(
            config.network.name, tuple(config.network.input_shape), **dict(config.network.options)
        )
        model = HEAdversarialModel(
            network,
            build_head(config),
            objective,
            evaluation_attack=config.evaluation.validation_attack or None,
            seed=config.seed,
        )
        model.compile(optimizer=build_optimizer(config, steps_per_epoch))
    finally:
        keras.config.set_dtype_policy(policy_before)
    return model


def read_config(path: pathlib.Path) -> dict:
    """Reads the resolved configuration of a run folder."""
    return json.loads(path.read_text())


def _parse_start(value):
    if isinstance(value, bool) or value in _STARTS:
        return _STARTS.get(value, value)
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(
            f"Unknown random start; expected one of {tuple(_STARTS)} or a radius; "
            f"received random_start={value!r}"
        ) from None
