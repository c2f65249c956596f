"""An experiment at three scales: as the paper has it, for a day on a CPU, and for seconds.

* "paper" changes nothing.
* "cpu" trains the small network of `cifar10_budget` on real CIFAR-10, also for papers that used
  ImageNet, or that of `mnist_pas_small` on real MNIST. All get about the time of six epochs of
  PGD-AT with five steps. Attacks keep their settings and get fewer test images.
* "smoke" trains two steps on synthetic images, and its attacks take two steps.

`differences` names everything that a scale changes.
"""

import functools
import hashlib
import json

from he_keras import schedules
from he_keras.arguments import check_choice
from he_keras.attacks import Attack
from he_keras.benchmarks import cost
from he_keras.configurable import flat_settings
from he_keras.experiment import catalog, default_config, smoke_variant, to_plain
from he_keras.experiment.catalog import cifar10_budget
from he_keras.reproduction.cells import Model

SCALES = ("paper", "cpu", "smoke")
#: What a run's identity does not depend on.
_NOT_TRAINED = ("name", "evaluation", "smoke")
# At a small scale, these changes of a cell give way to the scale's own settings.
_OF_THE_SCALE = ("train.", "network.")
#: The most passes of one attack at the scale "cpu", over all its images.
_CPU_PASSES = 2_000_000
_CPU_IMAGES = (50, 1000)
#: Settings that make an attack expensive, and what remains of them in "smoke".
_SMOKE_LIMITS = {
    "num_steps": 2,
    "num_queries": 8,
    "num_restarts": 2,
    "num_targets": 2,
    "num_samples": 2,
}
_PGD_STEPS, _PGD_STEP_SIZE = 5, "4/255"


def configuration(model: Model, scale: str, seed: int = 0):
    """Returns the configuration of a model at a scale.

    Args:
        model: experiment and changes.
        scale: one of `SCALES`.
        seed: seed of the run.

    Example:
        >>> from he_keras.reproduction import scales
        >>> model = Model("cifar10_trades_he", (("head.scale", 5.0),))
        >>> config = scales.configuration(model, "cpu")
        >>> config.network.name, config.head.scale, config.objective.num_steps
        ('preact-resnet', 5.0, 5)
    """
    check_choice("scale", scale, SCALES)
    config = catalog.get_config(model.experiment)
    if scale == "cpu":
        config = _cpu_variant(config, catalog.find(model.experiment).file)
    elif scale == "smoke":
        config = _smaller_still(smoke_variant(config))
    defaults = default_config()
    with config.unlocked():
        config.seed = seed
        for key, value in model.changes:
            if scale == "paper" or not key.startswith(_OF_THE_SCALE):
                section, _, name = key.rpartition(".")
                config[section][name] = value
        # Cells say how to evaluate. Runs that differ in nothing else are one run.
        attack = config.evaluation.validation_attack
        config.evaluation = {**defaults.evaluation.to_dict(), "validation_attack": attack}
        config.smoke = defaults.smoke
        config.name = model.experiment
    return config.lock()


def identity(config) -> str:
    """Returns eight hexadecimal digits that are equal for equal runs, whatever their name."""
    plain = {key: value for key, value in to_plain(config).items() if key not in _NOT_TRAINED}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:8]


def _smaller_still(config):
    """A smoke variant without validation, and with one block: most of its time is compilation."""
    with config.unlocked():
        config.data.validation_examples = 0
        config.evaluation.validation_attack = ""
        if "stage_widths" in config.network.options:
            config.network.options.update({"stage_widths": (4,), "blocks_per_stage": (1,)})
    return config.lock()


def _cpu_variant(config, file: str):
    """The experiment with a small network, few epochs and, for PGD, five steps."""
    small = config.copy_and_resolve_references()
    with small.unlocked():
        if config.data.name == "mnist":
            _as_small_mnist(small)
        else:
            _as_small_cifar10(small, config)
            _shorten(small, config, file)
    return small.lock()


def _as_small_mnist(small) -> None:
    template = catalog.get_config("mnist_pas_small")
    small.data, small.train, small.objective = template.data, template.train, template.objective


def _as_small_cifar10(small, config) -> None:
    template = catalog.get_config("cifar10_budget_he")
    kept = {
        key: value
        for key, value in config.network.options.items()
        if key in ("activation", "standardize")
    }
    small.data = template.data
    small.network = template.network
    small.network.options = {**template.network.options.to_dict(), **kept}
    small.head.num_classes = template.head.num_classes
    if "num_steps" in config.objective:
        small.objective.num_steps = min(config.objective.num_steps, _PGD_STEPS)
        if config.objective.name == "llr":
            small.objective.num_steps = 2
        elif "step_size" in config.objective:
            small.objective.step_size = _PGD_STEP_SIZE


def _shorten(small, config, file: str) -> None:
    """Few epochs, and schedules that fit them; PAS keeps its schedules, which it is about."""
    template = catalog.get_config("cifar10_budget_llr" if file == "llr" else "cifar10_budget_he")
    epochs = _equal_time(dict(small.objective))
    shorter = epochs / config.train.epochs
    ends = sorted({max(1, round(end * shorter)) for end in config.train.cycle_ends})
    small.train = template.train
    small.train.update({"epochs": epochs, "cycle_ends": tuple(ends)})
    for name in ("overfitting_guard", "snapshots"):
        small.train[name] = config.train[name]
    small.epsilon_schedule = schedules.scaled(dict(config.epsilon_schedule), shorter)
    if file == "pas_cifar10":
        small.schedule = schedules.scaled(dict(config.schedule), shorter)
    else:
        small.optimizer, small.schedule = template.optimizer, template.schedule
    if "warm_up_steps" in small.objective:
        small.objective.warm_up_steps = 0


def _equal_time(objective: dict) -> int:
    """Epochs that take about the time of the budget's PGD-AT."""
    measured = cifar10_budget.EPOCHS
    if objective["name"] in measured:
        return measured[objective["name"]]
    budget = sum(cost.passes_of({"name": "pgd_at", "num_steps": _PGD_STEPS})) * measured["pgd_at"]
    return max(1, round(budget / sum(cost.passes_of(objective))))


def sized(attack: Attack, scale: str) -> Attack:
    """Returns an attack as a scale runs it: smaller for "smoke", unchanged otherwise.

    Example:
        >>> import he_keras as he
        >>> attack = he.attacks.get("pgd-500", he.ThreatModel())
        >>> sized(attack, "smoke").num_steps, sized(attack, "cpu").num_steps
        (2, 500)
    """
    if scale != "smoke":
        return attack
    settings = attack.get_config()
    smaller = {
        key: min(value, _SMOKE_LIMITS[key])
        for key, value in settings.items()
        if key in _SMOKE_LIMITS and value is not None
    }
    return type(attack).from_config({**settings, **smaller})


def images_for(attack: Attack, scale: str, num_classes: int, limit: int) -> int:
    """Returns how many test images an attack runs on; 0 for all.

    Args:
        attack: the attack.
        scale: one of `SCALES`.
        num_classes: of the model.
        limit: the paper's own number, or 0.
    """
    if scale != "cpu":
        return limit
    fewest, most = _CPU_IMAGES
    count = _CPU_PASSES // attack.most_passes(num_classes)
    return min(max(count // fewest * fewest, fewest), most, limit or most)


@functools.cache
def differences(model: Model, scale: str) -> tuple[str, ...]:
    """Returns what a scale changes of a model's configuration, one setting a line."""
    before = flat_settings(to_plain(configuration(model, "paper")))
    after = flat_settings(to_plain(configuration(model, scale)))
    keys = [key for key in before | after if before.get(key) != after.get(key)]
    return tuple(f"{key}: {before.get(key, 'none')} -> {after.get(key, 'none')}" for key in keys)
