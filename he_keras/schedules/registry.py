"""Schedules by name, with what a configuration counts in epochs turned into steps."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras.optimizers.schedules import LearningRateSchedule

from he_keras.arguments import check_positive, parse_epsilon, reason_of
from he_keras.registry import Registry
from he_keras.schedules import by_epoch, by_step


def constant(initial: float | str) -> float:
    """Returns the number itself: unlike a schedule it can still be changed by callbacks.

    Args:
        initial: the value.
    """
    return parse_epsilon(initial)


SCHEDULES: Registry[Callable[..., Any]] = Registry(
    "schedule",
    {
        "constant": constant,
        "step": by_step.step_decay,
        "triangular": by_step.triangular,
        "cosine": by_step.cosine,
        "piecewise": by_step.PiecewiseLinear,
        "cyclic_momentum": by_step.cyclic_momentum,
        "warm_up": by_epoch.warm_up,
        "linear": by_epoch.Linear,
        "cycle_linear": by_epoch.CycleLinear,
        "cycle_cos": by_epoch.CycleCosine,
        "cycle_jump": by_epoch.CycleJump,
    },
)
# What a schedule counts in steps, a configuration may count in epochs.
_IN_EPOCHS = {"boundaries": "drop_epochs", "warmup_steps": "warmup_epochs", "steps": "epochs"}
# These follow from the run.
_OF_THE_RUN = ("total_steps", "steps_per_epoch")
_LENGTHS = ("checkpoints", "num_epochs")


def register(name: str):
    """Makes a function or class that returns a schedule known under a name.

    What it takes as `total_steps` and `steps_per_epoch` follows from the run; everything else are
    options of a configuration.
    """
    return SCHEDULES.register(name)


def get(
    name: str, total_steps: int, steps_per_epoch: int, **options: Any
) -> LearningRateSchedule | float:
    """Returns the schedule of that name, with what is counted in epochs turned into steps.

    The names, with the options of each:

    * constant: `initial`; a plain number comes back;
    * step: `initial`, `drop_epochs` (or `boundaries` in steps), `drop_factor` = 0.1;
    * triangular: `peak`, `peak_fraction` = 0.5, `start` = 0, `end` = 0;
    * cosine: `initial`, `warmup_epochs` = 0 (or `warmup_steps`), `final` = 0;
    * piecewise, straight lines between points: `epochs` (or `steps`), `values`;
    * cyclic_momentum: `peak_fraction` = 0.5;
    * warm_up: `target`, `num_epochs`, `unit`.

    Those of `he_keras.schedules.by_epoch`, each with `unit` = "epoch" (or "batch"), `minimum` and
    `maximum`:

    * linear: `initial`, `slope`;
    * cycle_linear and cycle_cos: `initial`, `final`, `checkpoints`;
    * cycle_jump: `initial`, `power`, `drop_points`, `checkpoints`.

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
    schedule = SCHEDULES[name](**arguments, **options)
    if not isinstance(schedule, (float, int, LearningRateSchedule)):
        raise TypeError(
            f"The schedule {name!r} returned none; expected a LearningRateSchedule of Keras, or a "
            f"number; received {type(schedule).__name__}"
        )
    _check_saved(name, schedule)
    return schedule


def _check_saved(name: str, schedule) -> None:
    """Raises a TypeError for a schedule that no model file could hold."""
    try:
        keras.saving.serialize_keras_object(schedule)
    # Its code may be anybody's.
    except Exception as error:
        raise TypeError(
            f"The schedule {name!r} cannot be saved; expected get_config() that returns the "
            f"arguments of its __init__; received {type(error).__name__}: {reason_of(error)}"
        ) from error


def _check_options(name: str, parameters: dict[str, bool], of_the_run: set, given: set) -> None:
    unknown = sorted(given - set(parameters) | given & of_the_run)
    accepted = [parameter for parameter in parameters if parameter not in of_the_run]
    missing = [each for each in accepted if parameters[each] and each not in given]
    if unknown or missing:
        accepted += [_IN_EPOCHS[parameter] for parameter in accepted if parameter in _IN_EPOCHS]
        raise ValueError(
            f"Unknown, repeated or missing option of the schedule {name!r}; expected some of "
            f"{', '.join(accepted) or '(it has none)'}; received "
            f"{', '.join(unknown) or 'no ' + ', '.join(missing)}"
        )


def parameters_of(name: str) -> dict[str, bool]:
    """Returns the options of the schedule of that name, and whether it needs each."""
    schedule = SCHEDULES[name]
    parameters = dict(inspect.signature(schedule).parameters)
    if "kwargs" in parameters:
        parameters |= inspect.signature(by_epoch.EpochSchedule).parameters
        del parameters["kwargs"]
    return {key: value.default is value.empty for key, value in parameters.items()}


def with_checkpoints(description: dict, checkpoints: Sequence[float]) -> dict:
    """Returns a schedule's name and options with shared checkpoints, where it takes any."""
    if "checkpoints" in description and len(checkpoints):
        raise ValueError(
            "Two lists of checkpoints; expected the schedule's own or shared ones, not both; "
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
