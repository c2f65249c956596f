"""Schedules by name, with what a configuration counts in epochs turned into steps."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from keras.optimizers.schedules import LearningRateSchedule

from he_keras.schedules import by_epoch, by_step, cycles
from he_keras.schedules.by_step import check_positive
from he_keras.threat import parse_epsilon


def constant(initial: float) -> float:
    """Returns the number itself: unlike a schedule it can still be changed by callbacks."""
    return float(initial)


SCHEDULES: dict[str, Callable[..., Any]] = {
    "constant": constant,
    "step": by_step.step_decay,
    "triangular": by_step.triangular,
    "cyclic": by_step.triangular,
    "cosine": by_step.cosine,
    "piecewise": by_step.PiecewiseLinear,
    "cyclic_momentum": by_step.cyclic_momentum,
    "warm_up": by_epoch.warm_up,
    "linear": by_epoch.Linear,
    "exp": by_epoch.Exponential,
    "jump": by_epoch.Jump,
    "cos_cycle_jump": by_epoch.CosineJump,
    "cycle_linear": cycles.CycleLinear,
    "cycle_cos": cycles.CycleCosine,
    "cycle_exp": cycles.CycleExponential,
    "cycle_jump": cycles.CycleJump,
}
# What a schedule counts in steps, a configuration may count in epochs.
_IN_EPOCHS = {"boundaries": "drop_epochs", "warmup_steps": "warmup_epochs", "steps": "epochs"}
# These follow from the run.
_OF_THE_RUN = ("total_steps", "steps_per_epoch")
_LENGTHS = ("checkpoints", "interval", "first_jump", "jump_every", "num_epochs")


class Restarts(NamedTuple):
    """A learning rate and a radius that restart at the same epochs."""

    learning_rate: LearningRateSchedule | float
    epsilon: LearningRateSchedule | float


def get(
    name: str, total_steps: int, steps_per_epoch: int, **options: Any
) -> LearningRateSchedule | float:
    """Returns the schedule of that name, with what is counted in epochs turned into steps.

    The names, with the options of each:

    * constant: `initial`; a plain number comes back;
    * step: `initial`, `drop_epochs` (or `boundaries` in steps), `drop_factor` = 0.1;
    * triangular, also called cyclic: `peak`, `peak_fraction` = 0.5, `start` = 0, `end` = 0;
    * cosine: `initial`, `warmup_epochs` = 0 (or `warmup_steps`), `final` = 0;
    * piecewise, straight lines between points: `epochs` (or `steps`), `values`;
    * cyclic_momentum: `peak_fraction` = 0.5, `low` = 0.8, `high` = 0.9;
    * warm_up: `target`, `num_epochs`, `unit`.

    Those of `he_keras.schedules.cycles`, each with `unit` = "epoch" (or "batch"), `minimum` and
    `maximum`:

    * linear: `initial`, `slope`;
    * cycle_linear and cycle_cos: `initial`, `final`, `checkpoints`;
    * exp: `initial`, `power`, `interval` = 1;
    * cycle_exp: `initial`, `power`, `checkpoints`;
    * jump: `initial`, `power`, `first_jump`, `jump_every`;
    * cycle_jump: `initial`, `power`, `drop_points`, `checkpoints`;
    * cos_cycle_jump: `initial`, `final`, `first_jump`, `jump_every`.

    Without `checkpoints` the whole run is one cycle.

    Args:
        name: One of these names.
        total_steps: Number of training steps of the whole run.
        steps_per_epoch: Number of training steps of an epoch; epochs may be fractions.
        **options: The options of that schedule.
    """
    parameters = parameters_of(name)
    check_positive("total_steps", total_steps)
    check_positive("steps_per_epoch", steps_per_epoch)
    run = {"total_steps": total_steps, "steps_per_epoch": steps_per_epoch}
    arguments: dict[str, Any] = {key: run[key] for key in _OF_THE_RUN if key in parameters}
    if "checkpoints" in parameters and "checkpoints" not in options:
        options["checkpoints"] = [total_steps / steps_per_epoch]
    for parameter in parameters:
        in_epochs = _IN_EPOCHS.get(parameter)
        if in_epochs in options and parameter not in options:
            options[parameter] = _to_steps(options.pop(in_epochs), steps_per_epoch)
    _check_options(name, parameters, set(arguments), set(options))
    return SCHEDULES[name](**arguments, **options)


def _check_options(name: str, parameters: dict[str, bool], of_the_run: set, given: set) -> None:
    unknown = sorted(given - set(parameters) | given & of_the_run)
    accepted = [parameter for parameter in parameters if parameter not in of_the_run]
    missing = [each for each in accepted if parameters[each] and each not in given]
    if unknown or missing:
        accepted += [_IN_EPOCHS[parameter] for parameter in accepted if parameter in _IN_EPOCHS]
        raise ValueError(
            f"Unknown, repeated or missing option of the schedule {name!r}; expected some of "
            f"{', '.join(accepted)}; received {', '.join(unknown) or 'no ' + ', '.join(missing)}"
        )


def parameters_of(name: str) -> dict[str, bool]:
    """Returns the options of the schedule of that name, and whether it needs each."""
    if name not in SCHEDULES:
        raise ValueError(
            f"Unknown schedule; expected one of {', '.join(SCHEDULES)}; received name={name!r}"
        )
    schedule = SCHEDULES[name]
    parameters = dict(inspect.signature(schedule).parameters)
    if "kwargs" in parameters:
        parameters |= inspect.signature(by_epoch.EpochSchedule).parameters
        del parameters["kwargs"]
    return {key: value.default is value.empty for key, value in parameters.items()}


def restarts(
    checkpoints: Sequence[float], steps_per_epoch: int, learning_rate: dict, epsilon: dict
) -> Restarts:
    """Returns a learning rate and a radius that restart at the same checkpoints.

    Args:
        checkpoints: Epochs at which cycles end; the last one ends the run.
        steps_per_epoch: Number of training steps of an epoch.
        learning_rate: Name of the schedule (`name`) and its options; no `checkpoints`.
        epsilon: The same for the radius.

    Example:
        >>> import he_keras as he
        >>> rate = {"name": "cycle_jump", "initial": 0.1, "power": 0.1, "drop_points": [0.5]}
        >>> radius = {"name": "cycle_cos", "initial": 0, "final": "12/255", "maximum": "8/255"}
        >>> both = he.schedules.restarts((10, 20), 100, rate, radius)
        >>> [round(float(both.learning_rate(step)), 4) for step in (0, 500, 1000, 1500)]
        [0.1, 0.01, 0.1, 0.01]
        >>> [round(255 * float(both.epsilon(step)), 1) for step in (0, 500, 900, 1000)]
        [0.0, 6.0, 8.0, 0.0]
    """
    if not len(checkpoints):
        raise ValueError("No checkpoints; expected at least one epoch > 0; received none")
    total_steps = round(checkpoints[-1] * steps_per_epoch)
    built = []
    for description in (learning_rate, epsilon):
        options = with_checkpoints(description, checkpoints)
        built.append(get(options.pop("name"), total_steps, steps_per_epoch, **options))
    return Restarts(*built)


def with_checkpoints(description: dict, checkpoints: Sequence[float]) -> dict:
    """Returns a schedule's name and options with shared checkpoints, where it takes any."""
    if "checkpoints" in description and len(checkpoints):
        raise ValueError(
            "Two lists of checkpoints; expected a schedule without its own beside shared ones; "
            f"received checkpoints={list(description['checkpoints'])} and {list(checkpoints)}"
        )
    takes_them = "checkpoints" in parameters_of(description["name"])
    shared = {"checkpoints": tuple(checkpoints)} if takes_them and len(checkpoints) else {}
    return {**description, **shared}


def scaled(description: dict, factor: float) -> dict:
    """Returns a schedule's name and options for a run of `factor` times the length.

    Schedules that count in epochs are scaled; others keep their options.
    """
    options = dict(description)
    for name in _LENGTHS:
        if name in options:
            options[name] = _times(options[name], factor)
    if "slope" in options:
        options["slope"] = parse_epsilon(options["slope"]) / factor
    return options


def _times(value: Any, factor: float) -> Any:
    return tuple(each * factor for each in value) if _is_list(value) else value * factor


def _to_steps(epochs: Any, steps_per_epoch: int) -> Any:
    if _is_list(epochs):
        return [round(epoch * steps_per_epoch) for epoch in epochs]
    return round(epochs * steps_per_epoch)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
