"""What an experiment's configuration contains, and how it becomes objects.

A configuration is an `ml_collections.ConfigDict` of plain data. `default_config()` holds every key
that exists. The experiments of `catalog` and the files in `configs/` change values. Sizes such as
epsilon are strings ("8/255", "0.031"), so that a command-line override may use either form. An
unknown key is an error that lists the valid ones.
"""

import json
import math
import pathlib
import sys

import keras
import numpy as np

from he_keras import networks, objectives, optimizers, schedules
from he_keras.adversarial_model import HEAdversarialModel
from he_keras.arguments import (
    check_choice,
    check_number,
    check_positive_integer,
    check_seed,
    parse_epsilon,
)
from he_keras.attacks import Attack
from he_keras.callbacks.weight_averaging import KINDS
from he_keras.distribution import replicas
from he_keras.evaluation.robustness import DEFAULT_ATTACKS, DEFAULT_MODE, resolve_attacks
from he_keras.evaluation.run.attack_runs import MODES
from he_keras.files import read_json
from he_keras.layers import CosineHead
from he_keras.networks.network import find
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
    "test_fraction": 0.0,
    "synthetic": False,
}
_WEIGHT_AVERAGING = {
    "kind": "",
    "decay": 0.9995,
    "start_epoch": 0,
    "warm_up": True,
    "batch_norm_batches": 20,
}
_TRAIN = {
    "epochs": 1,
    "batch_size": 128,
    "dtype": "float32",
    "checkpoint_every_batches": 0,
    "checkpoint_every_seconds": 300.0,
    "overfitting_guard": False,
    "guard_on_collapse": "stop",
    "guard_max_drop": 0.2,
    "guard_every_batches": 0,
    "cycle_ends": (),
    "snapshots": False,
}
# The object that such a section configures knows its keys and checks them.
_OWN_KEYS = ("objective", "schedule", "epsilon_schedule", "network.options", "smoke.options")
OPTIMIZERS = ("sgd", "adam")
_ADAM_EPSILON = 1e-8
# What the learning rate is called in the options of a schedule, where not "initial".
_HEIGHTS = {"triangular": "peak", "warm_up": "target"}
#: How many steps of a run a schedule is tried at, and how far rounding may take it.
_PROBED_STEPS = 101
_ROUNDING = 1e-6
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
    config.imports = ()
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
    config.optimizer = {
        "name": "sgd",
        "learning_rate": 0.1,
        "momentum": 0.9,
        "weight_decay": 2e-4,
    }
    config.schedule = {"name": "constant"}
    config.epsilon_schedule = {"name": ""}
    config.train = {**_TRAIN, "weight_averaging": dict(_WEIGHT_AVERAGING)}
    config.evaluation = {
        "validation_attack": "default",
        "attacks": DEFAULT_ATTACKS,
        "step_size": "",
        "mode": DEFAULT_MODE,
        "batch_size": 250,
    }
    config.smoke = {"network": "", "options": {}, "input_shape": (32, 32, 3)}
    return config.lock()


def check_config(config) -> None:
    """Raises a ValueError for unknown keys, and for values that nothing else checks."""
    _check_keys(config, default_config())
    check_seed(config.seed)
    check_positive_integer("train.epochs", config.train.epochs)
    check_positive_integer("train.batch_size", config.train.batch_size)
    check_choice("evaluation.mode", config.evaluation.mode, MODES)
    check_positive_integer("evaluation.batch_size", config.evaluation.batch_size)
    check_positive_integer("head.num_classes", config.head.num_classes)
    check_choice("optimizer.name", config.optimizer.name, OPTIMIZERS)
    check_number("optimizer.learning_rate", config.optimizer.learning_rate, 0.0)
    check_number("train.checkpoint_every_batches", config.train.checkpoint_every_batches, 0)
    check_number("train.checkpoint_every_seconds", config.train.checkpoint_every_seconds, 0.0)
    _check_weight_averaging(config)
    _check_cycles(config)
    _check_names(config)


def _check_names(config) -> None:
    """Raises an error for a part that there is not; it takes no time, and reading data may."""
    build_attacks(config)
    build_objective(config)
    find(config.network.name, config.network.options)
    check_choice("head.kind", config.head.kind, HEADS)
    check_choice("schedule.name", config.schedule.name, tuple(schedules.SCHEDULES))


def _check_weight_averaging(config) -> None:
    settings = config.train.weight_averaging
    check_choice("train.weight_averaging.kind", settings.kind, ("", *KINDS))
    check_number("batch_norm_batches", settings.batch_norm_batches, 0)
    if settings.kind and not settings.start_epoch < config.train.epochs:
        raise ValueError(
            "Averaging would never begin; expected train.weight_averaging.start_epoch below "
            f"train.epochs={config.train.epochs}; received {settings.start_epoch}"
        )


def _check_cycles(config) -> None:
    ends, epochs = list(config.train.cycle_ends), config.train.epochs
    are_epochs = all(isinstance(end, int) and 0 < end <= epochs for end in ends)
    if not are_epochs or ends != sorted(set(ends)):
        raise ValueError(
            f"Invalid cycles; expected increasing numbers of epochs up to train.epochs={epochs}; "
            f"received train.cycle_ends={tuple(ends)}"
        )
    if config.train.snapshots and not ends:
        raise ValueError(
            "Snapshots are taken where cycles end; expected train.cycle_ends such as "
            f"({epochs},); received none"
        )


def _check_keys(config, reference, prefix: str = "") -> None:
    unknown, missing = (set(config) - set(reference)), (set(reference) - set(config))
    if unknown or missing:
        raise ValueError(
            f"Unknown or missing configuration keys; expected {prefix}[{', '.join(reference)}]; "
            f"received unknown={sorted(unknown)}, missing={sorted(missing)}"
        )
    for key, value in reference.items():
        if f"{prefix}{key}" in _OWN_KEYS or not hasattr(value, "keys"):
            continue
        if not hasattr(config[key], "keys"):
            raise ValueError(
                f"Not a section; expected {prefix}{key}.[{', '.join(value)}]; "
                f"received {prefix}{key}={config[key]!r}"
            )
        _check_keys(config[key], value, f"{prefix}{key}.")


def smoke_variant(config):
    """Returns a copy that finishes in seconds: synthetic data, two batches, a small network.

    It has one epoch, and one cycle if there are any. Whatever schedules count in epochs shrinks.
    """
    small = config.copy_and_resolve_references()
    with small.unlocked():
        small.name = f"{config.name}_smoke"
        small.data.update({"synthetic": True, "train_examples": 16, "validation_examples": 8})
        small.data.test_examples = 8
        if config.smoke.network:
            small.network = {
                "name": config.smoke.network,
                "input_shape": tuple(config.smoke.input_shape),
                "options": dict(config.smoke.options),
            }
        ends = (1,) if config.train.cycle_ends else ()
        small.train.update({"epochs": 1, "batch_size": 8, "cycle_ends": ends})
        for name in ("schedule", "epsilon_schedule"):
            small[name] = schedules.scaled(dict(config[name]), 1 / config.train.epochs)
        small.train.weight_averaging.start_epoch = 0
        small.evaluation.update({"attacks": ("fgsm", "pgd-2"), "batch_size": 8})
        small.evaluation.validation_attack = "pgd-2"
        for repetitions in ("num_steps", "num_replays"):
            if repetitions in small.objective:
                small.objective[repetitions] = 2
        if "warm_up_steps" in small.objective:
            small.objective.warm_up_steps = 0
    return small.lock()


def to_plain(config) -> dict:
    """Returns the configuration as JSON-compatible data (tuples become lists)."""
    return json.loads(config.to_json())


def read_config(run_folder):
    """Reads the configuration of a run folder; lists become the tuples that they were.

    Keys that were introduced after the run have their default values.
    """
    from ml_collections import ConfigDict

    stored = read_json(pathlib.Path(run_folder) / "config.json")
    given = stored.get("imports", ())
    modules = [pathlib.Path(name).stem if name.endswith(".py") else name for name in given]
    missing = [name for name in modules if name not in sys.modules]
    if missing:
        raise ValueError(
            f"The run has parts of its own; expected --import={','.join(given)}, or in "
            f"Python an import of {', '.join(missing)} before; received {run_folder} alone"
        )
    return ConfigDict(_completed(stored, default_config())).lock()


def _completed(stored: dict, reference, prefix: str = "") -> dict:
    """Adds the keys that a section lacks, and makes tuples where the reference has tuples."""
    complete = dict(stored)
    for key, default in reference.items():
        if key not in stored:
            complete[key] = default
        elif hasattr(default, "keys") and f"{prefix}{key}" not in _OWN_KEYS:
            if isinstance(stored[key], dict):
                complete[key] = _completed(stored[key], default, f"{prefix}{key}.")
        elif isinstance(default, tuple) and isinstance(stored[key], list):
            complete[key] = tuple(stored[key])
    return complete


def build_threat(config) -> ThreatModel:
    """Builds the threat model."""
    return ThreatModel(config.threat.norm, config.threat.epsilon)


def build_attacks(config, threat: ThreatModel | None = None, **options) -> list[Attack]:
    """Builds the attacks of the evaluation, by default against the configured threat model."""
    settings = config.evaluation
    if settings.step_size != "":
        options = {"step_size": settings.step_size, **options}
    return resolve_attacks(settings.attacks, threat or build_threat(config), **options)


def build_objective(config, steps_per_epoch: int | None = None) -> Objective:
    """Builds the training objective; every key except `name` is one of its arguments.

    Without `steps_per_epoch` it has the nominal radius, whatever schedule is configured.
    """
    options = dict(config.objective)
    name = options.pop("name")
    if "random_start" in options:
        options["random_start"] = _parse_start(options["random_start"])
    if options.get("step_size") == "":
        del options["step_size"]
    if steps_per_epoch is not None and config.epsilon_schedule.name:
        options["epsilon_schedule"] = _epsilon_schedule(config, steps_per_epoch)
    try:
        return objectives.get(name, build_threat(config), **options)
    except TypeError as error:
        if "; expected" in str(error):
            raise
        raise ValueError(
            f"Unknown option of objective {name!r}; expected its arguments; received {options}: "
            f"{error}"
        ) from error


def build_head(config) -> keras.layers.Layer:
    """Builds the head: "linear", "he" (scaled cosines) or "m_he" (scaled angles)."""
    head = config.head
    check_choice("head.kind", head.kind, HEADS)
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
    """Builds the optimizer with the configured schedule.

    "sgd" is PyTorch's form with coupled weight decay; "adam" has PyTorch's defaults, `momentum` as
    its beta_1, and no weight decay.
    """
    settings, name = config.optimizer, config.schedule.name
    options = schedules.with_checkpoints(dict(config.schedule), config.train.cycle_ends)
    total_steps, updates = _length(config, steps_per_epoch)
    momentum = settings.momentum
    if options.pop("cycle_momentum", False):
        momentum = schedules.get(
            "cyclic_momentum",
            total_steps,
            updates,
            peak_fraction=options.get("peak_fraction", 0.5),
        )
    if name != "piecewise":
        options[_HEIGHTS.get(name, "initial")] = settings.learning_rate
    learning_rate = schedules.get(options.pop("name"), total_steps, updates, **options)
    _check_values("schedule", "learning rate", learning_rate, total_steps, math.inf)
    if settings.name == "sgd":
        return optimizers.SGD(learning_rate, momentum=momentum, weight_decay=settings.weight_decay)
    if settings.weight_decay or not isinstance(momentum, float):
        raise ValueError(
            "Adam has neither weight decay nor cyclic momentum here; expected "
            "optimizer.weight_decay=0 and no schedule.cycle_momentum; received "
            f"optimizer.weight_decay={settings.weight_decay} and momentum={momentum!r}"
        )
    return keras.optimizers.Adam(learning_rate, beta_1=momentum, epsilon=_ADAM_EPSILON)


def _epsilon_schedule(config, steps_per_epoch: int):
    """The schedule of the radius, at most that of the threat model unless it says otherwise."""
    options = schedules.with_checkpoints(dict(config.epsilon_schedule), config.train.cycle_ends)
    name = options.pop("name")
    if "maximum" in schedules.parameters_of(name):
        options.setdefault("maximum", config.threat.epsilon)
    total_steps, updates = _length(config, steps_per_epoch)
    schedule = schedules.get(name, total_steps, updates, **options)
    most = options.get("maximum", config.threat.epsilon)
    _check_values("epsilon_schedule", "radius", schedule, total_steps, parse_epsilon(most))
    is_number = isinstance(schedule, float)
    return schedules.Linear(schedule, 0.0, steps_per_epoch=updates) if is_number else schedule


def _check_values(section: str, what: str, schedule, total_steps: int, most: float) -> None:
    """Raises a ValueError if a schedule leaves the range from 0 to `most` during the run."""
    if isinstance(schedule, float):
        values = [schedule]
    else:
        steps = np.linspace(0, total_steps - 1, _PROBED_STEPS).round().astype(int)
        values = [_value(section, schedule(step)) for step in np.unique(steps)]
    wrong = [value for value in values if not -_ROUNDING <= value <= most * (1 + _ROUNDING)]
    if wrong:
        limit = f"0 to {most:g} (threat.epsilon)" if math.isfinite(most) else "0 or more"
        raise ValueError(
            f"A {what} that leaves its range during the run; expected {limit}: change {section}; "
            f"received {wrong[0]:g}"
        )


def _value(section: str, value) -> float:
    if np.size(value) != 1:
        raise ValueError(
            f"A schedule gives a number for each step; expected one: change {section}; received "
            f"shape {np.shape(value)}"
        )
    return float(value)


def _length(config, steps_per_epoch: int) -> tuple[int, int]:
    """The updates of the whole run, and those of an epoch."""
    updates = steps_per_epoch * build_objective(config).updates_per_batch
    return updates * config.train.epochs, updates


def build_model(config, steps_per_epoch: int) -> HEAdversarialModel:
    """Builds and compiles the model; weights are drawn from the configured seed."""
    check_choice("train.dtype", config.train.dtype, DTYPES)
    objective = build_objective(config, steps_per_epoch)
    keras.utils.set_random_seed(config.seed)
    policy_before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(config.train.dtype)
    try:
        network = networks.get(
            config.network.name, tuple(config.network.input_shape), **_network_options(config)
        )
        model = HEAdversarialModel(
            network,
            build_head(config),
            objective,
            evaluation_attack=config.evaluation.validation_attack or None,
            seed=config.seed,
        )
        if not model.built:
            model.build((None, *config.network.input_shape))
        model.compile(optimizer=build_optimizer(config, steps_per_epoch))
    finally:
        keras.config.set_dtype_policy(policy_before)
    return model


def _network_options(config) -> dict:
    """Batch norm is synchronised on several replicas: their number must change no result."""
    options = dict(config.network.options)
    return {"synchronized": True, **options} if replicas.count() > 1 else options


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
