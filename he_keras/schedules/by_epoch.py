"""Schedules that count in epochs, for the radius of the adversary and for the learning rate.

These know no cycles; those that do stand in `cycles`, where the paper is explained.
"""

import math
from typing import Any

import keras
import tensorflow as tf
from keras.optimizers.schedules import LearningRateSchedule

from he_keras.schedules.by_step import check_positive
from he_keras.threat import parse_epsilon

UNITS = ("epoch", "batch")


class EpochSchedule(LearningRateSchedule):
    """A function of the number t of epochs trained so far.

    Args:
        steps_per_epoch: Number of training steps of an epoch.
        unit: "epoch": t is the index of the epoch, and its batches share a value; "batch": t grows
            by `1 / steps_per_epoch` with every batch.
        minimum: The value is never below it; None for no limit.
        maximum: The value is never above it; None for no limit.
    """

    def __init__(
        self,
        steps_per_epoch: int,
        unit: str = "epoch",
        minimum: float | str | None = None,
        maximum: float | str | None = None,
    ):
        check_positive("steps_per_epoch", steps_per_epoch)
        if unit not in UNITS:
            raise ValueError(f"Unknown unit; expected one of {UNITS}; received unit={unit!r}")
        self.steps_per_epoch = int(steps_per_epoch)
        self.unit = unit
        self.minimum = None if minimum is None else parse_epsilon(minimum)
        self.maximum = None if maximum is None else parse_epsilon(maximum)
        limits = [each for each in (self.minimum, self.maximum) if each is not None]
        if limits != sorted(limits):
            raise ValueError(
                "Invalid limits; expected minimum <= maximum; "
                f"received minimum={minimum!r}, maximum={maximum!r}"
            )

    def at(self, epochs: Any) -> Any:
        """Returns the value after so many epochs, without limits; subclasses define it."""
        raise TypeError(
            f"{type(self).__name__} is not a schedule; expected a subclass that defines at()"
        )

    def __call__(self, step: Any) -> Any:
        """Returns the value at `step` as a float32 scalar."""
        step = tf.cast(tf.convert_to_tensor(step), tf.int64)
        # In whole numbers: in float32, the first step of an epoch could fall into the one before.
        epochs = tf.cast(step // self.steps_per_epoch, tf.float32)
        if self.unit == "batch":
            batch = tf.cast(step % self.steps_per_epoch, tf.float32)
            epochs += batch / self.steps_per_epoch
        value = self.at(epochs)
        if self.minimum is not None:
            value = tf.maximum(value, self.minimum)
        return value if self.maximum is None else tf.minimum(value, self.maximum)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor as plain data."""
        return {
            "steps_per_epoch": self.steps_per_epoch,
            "unit": self.unit,
            "minimum": self.minimum,
            "maximum": self.maximum,
        }


@keras.saving.register_keras_serializable(package="he_keras")
class Linear(EpochSchedule):
    """`initial + slope * t`.

    Args:
        initial: The value at t = 0.
        slope: What an epoch adds.
        **kwargs: See `EpochSchedule`.

    Example:
        >>> import he_keras as he
        >>> radius = he.schedules.Linear(0.0, 0.1, steps_per_epoch=10, maximum=0.3)
        >>> [round(float(radius(step)), 2) for step in (0, 9, 10, 25, 99)]
        [0.0, 0.0, 0.1, 0.2, 0.3]
    """

    def __init__(self, initial: float | str, slope: float | str, **kwargs: Any):
        super().__init__(**kwargs)
        self.initial = parse_epsilon(initial)
        self.slope = parse_epsilon(slope)

    def at(self, epochs: Any) -> Any:
        """Returns the value after so many epochs."""
        return self.initial + self.slope * epochs

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor as plain data."""
        return {"initial": self.initial, "slope": self.slope, **super().get_config()}


def warm_up(
    target: float | str, num_epochs: int, steps_per_epoch: int, unit: str = "epoch"
) -> Linear:
    """Returns `target * (t + 1) / num_epochs`, and `target` from t = num_epochs - 1 on.

    The warm-up of the radius in Pang et al. 2021, "Bag of tricks for adversarial training".

    Example:
        >>> import he_keras as he
        >>> radius = he.schedules.warm_up(0.3, num_epochs=3, steps_per_epoch=10)
        >>> [round(float(radius(step)), 2) for step in (0, 10, 20, 30)]
        [0.1, 0.2, 0.3, 0.3]
    """
    check_positive("num_epochs", num_epochs)
    target = parse_epsilon(target)
    share = target / num_epochs
    return Linear(share, share, steps_per_epoch=steps_per_epoch, unit=unit, maximum=target)


@keras.saving.register_keras_serializable(package="he_keras")
class Exponential(EpochSchedule):
    """`initial * power^(t / interval)`.

    Args:
        initial: The value at t = 0.
        power: Factor after each interval.
        interval: Number of epochs.
        **kwargs: See `EpochSchedule`.
    """

    def __init__(self, initial: float | str, power: float, interval: float = 1.0, **kwargs: Any):
        super().__init__(**kwargs)
        check_positive("power", power)
        check_positive("interval", interval)
        self.initial = parse_epsilon(initial)
        self.power = float(power)
        self.interval = float(interval)

    def at(self, epochs: Any) -> Any:
        """Returns the value after so many epochs."""
        return self.initial * tf.pow(self.power, epochs / self.interval)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor as plain data."""
        own = {"initial": self.initial, "power": self.power, "interval": self.interval}
        return {**own, **super().get_config()}


@keras.saving.register_keras_serializable(package="he_keras")
class Jump(EpochSchedule):
    """`initial`, times `power` at t = first_jump and then again every `jump_every` epochs.

    Args:
        initial: The value before the first jump.
        power: Factor of a jump.
        first_jump: Epoch of the first jump.
        jump_every: Epochs between jumps.
        **kwargs: See `EpochSchedule`.
    """

    def __init__(
        self,
        initial: float | str,
        power: float,
        first_jump: float,
        jump_every: float,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        check_positive("power", power)
        check_positive("first_jump", first_jump)
        check_positive("jump_every", jump_every)
        self.initial = parse_epsilon(initial)
        self.power = float(power)
        self.first_jump = float(first_jump)
        self.jump_every = float(jump_every)

    def at(self, epochs: Any) -> Any:
        """Returns the value after so many epochs."""
        since_interval_before = tf.maximum(epochs - self.first_jump + self.jump_every, 0.0)
        return self.initial * tf.pow(self.power, tf.floor(since_interval_before / self.jump_every))

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor as plain data."""
        own = {"initial": self.initial, "power": self.power}
        own |= {"first_jump": self.first_jump, "jump_every": self.jump_every}
        return {**own, **super().get_config()}


@keras.saving.register_keras_serializable(package="he_keras")
class CosineJump(EpochSchedule):
    """Falls from `initial` to `final` along half a cosine; at each jump it is `initial` again.

    Args:
        initial: The value until `first_jump`, and after each jump.
        final: The value just before a jump.
        first_jump: Epoch at which the first fall begins.
        jump_every: Length of a fall, in epochs.
        **kwargs: See `EpochSchedule`.
    """

    def __init__(
        self,
        initial: float | str,
        final: float | str,
        first_jump: float,
        jump_every: float,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        if not first_jump >= 0:
            raise ValueError(f"Invalid first_jump; expected >= 0; received first_jump={first_jump}")
        check_positive("jump_every", jump_every)
        self.initial, self.final = parse_epsilon(initial), parse_epsilon(final)
        self.first_jump, self.jump_every = float(first_jump), float(jump_every)

    def at(self, epochs: Any) -> Any:
        """Returns the value after so many epochs."""
        since_first = tf.maximum(epochs - self.first_jump, 0.0)
        position = tf.math.floormod(since_first, self.jump_every) / self.jump_every
        share = 0.5 * (1.0 + tf.cos(math.pi * position))
        return self.final + (self.initial - self.final) * share

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor as plain data."""
        own = {"initial": self.initial, "final": self.final}
        own |= {"first_jump": self.first_jump, "jump_every": self.jump_every}
        return {**own, **super().get_config()}
