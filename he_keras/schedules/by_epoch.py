"""Schedules that count in epochs, for the radius of the adversary and for the learning rate.

Paper: Liu et al. 2020, "On the loss landscape of adversarial training: identifying challenges and
how to overcome them" (PAS): the radius grows from 0, so that training starts on a smoother loss.
Radius and learning rate may restart together, again and again, and the weights at the ends of the
cycles make an ensemble (`he_keras.SnapshotEnsemble`).

With t the number of epochs trained so far, checkpoints `0 = T_0 < T_1 < .. < T_n`, and inside of
`T_i <= t < T_{i+1}` the position `r = (t - T_i) / (T_{i+1} - T_i)`:

* `Linear`: initial + slope * t;
* `CycleLinear`: initial + (final - initial) * r;
* `CycleCosine`: initial + (final - initial) * (1 - cos(pi r)) / 2;
* `CycleJump`: initial * power^k, with k drop points <= r.

These are the schedules of the paper's experiments; its released code has four more that no
experiment uses. Everything is clipped to `minimum` and `maximum` at the end. So a radius that heads
for 0.6 under a maximum of 0.4 stays at 0.4 for the rest of its cycle. From T_n on r is 1. The
released code has no value at t = T_n exactly, and its `cycle_jump` is an error there. The radius is
in the units of the images: 8-bit numbers are fractions, "8/255".
"""

import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.optimizers.schedules import LearningRateSchedule

from he_keras.arguments import check_choice, check_positive, is_increasing, parse_epsilon
from he_keras.configurable import Configurable

UNITS = ("epoch", "batch")


class EpochSchedule(Configurable, LearningRateSchedule):
    """A function of the number t of epochs trained so far.

    Args:
        steps_per_epoch: Number of training steps of an epoch.
        unit: with "epoch", t is the index of the epoch, and its batches share a value. With
            "batch", t grows by `1 / steps_per_epoch` with every batch.
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
        check_choice("unit", unit, UNITS)
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


def warm_up(
    target: float | str, num_epochs: int, steps_per_epoch: int, unit: str = "epoch"
) -> Linear:
    """Returns `target * (t + 1) / num_epochs`, and `target` from t = num_epochs - 1 on.

    The warm-up of the radius in Pang et al. 2021, "Bag of tricks for adversarial training".

    Args:
        target: the value after the warm-up.
        num_epochs: length of the warm-up.
        steps_per_epoch: steps of an epoch.
        unit: "epoch", or "batch" for a value that grows within the epochs too.

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


class CycleSchedule(EpochSchedule):
    """A function of the position r in the current cycle, from 0 at its start to 1 at its end.

    Args:
        checkpoints: Epochs at which cycles end, strictly increasing; the first cycle starts at 0,
            which may stand in the list. After the last the value stays where it is.
        **kwargs: See `EpochSchedule`.
    """

    def __init__(self, checkpoints: Sequence[float], **kwargs: Any):
        super().__init__(**kwargs)
        points = [float(point) for point in checkpoints]
        if points and points[0] > 0:
            points = [0.0, *points]
        if len(points) < 2 or points[0] < 0 or not is_increasing(points):
            raise ValueError(
                "Invalid checkpoints; expected at least one epoch > 0, strictly increasing; "
                f"received checkpoints={list(checkpoints)}"
            )
        self.checkpoints = points

    def in_cycle(self, position: Any) -> Any:
        """Returns the value at a position in [0, 1] of a cycle; subclasses define it."""
        raise TypeError(
            f"{type(self).__name__} is not a schedule; expected a subclass that defines in_cycle()"
        )

    def at(self, epochs: Any) -> Any:
        """Returns the value after so many epochs."""
        points = tf.constant(self.checkpoints, tf.float32)
        number = tf.reduce_sum(tf.cast(epochs >= points, tf.int32))
        number = tf.minimum(number, len(self.checkpoints) - 1)
        start, end = points[number - 1], points[number]
        return self.in_cycle(tf.minimum((epochs - start) / (end - start), 1.0))


@keras.saving.register_keras_serializable(package="he_keras")
class CycleLinear(CycleSchedule):
    """From `initial` to `final` along a straight line, in every cycle.

    Args:
        initial: The value at the start of a cycle.
        final: The value at its end.
        checkpoints: See `CycleSchedule`.
        **kwargs: See `EpochSchedule`.

    Example:
        >>> import he_keras as he
        >>> options = {"checkpoints": (4, 8), "steps_per_epoch": 10}
        >>> radius = he.schedules.CycleLinear(0.0, 0.6, maximum="0.4", **options)
        >>> [round(float(radius(step)), 2) for step in (0, 10, 30, 40, 50, 80, 99)]
        [0.0, 0.15, 0.4, 0.0, 0.15, 0.4, 0.4]
    """

    def __init__(
        self,
        initial: float | str,
        final: float | str,
        checkpoints: Sequence[float],
        **kwargs: Any,
    ):
        super().__init__(checkpoints, **kwargs)
        self.initial, self.final = parse_epsilon(initial), parse_epsilon(final)

    def in_cycle(self, position: Any) -> Any:
        """Returns the value at a position of a cycle."""
        # This form hits both end values exactly.
        return (1.0 - position) * self.initial + position * self.final


@keras.saving.register_keras_serializable(package="he_keras")
class CycleCosine(CycleLinear):
    """From `initial` to `final` along half a cosine, in every cycle; arguments as `CycleLinear`.

    With `final` below `initial` this is cosine annealing with warm restarts.

    Example:
        >>> import he_keras as he
        >>> options = {"checkpoints": (100,), "steps_per_epoch": 10, "unit": "batch"}
        >>> radius = he.schedules.CycleCosine(0.0, 0.6, maximum=0.4, **options)  # PAS on MNIST
        >>> [round(float(radius(step)), 3) for step in (0, 250, 500, 607, 609, 1000)]
        [0.0, 0.088, 0.3, 0.399, 0.4, 0.4]
    """

    def in_cycle(self, position: Any) -> Any:
        """Returns the value at a position of a cycle."""
        # (1 - cos a) / 2 without the cancellation near the start, and exactly 1 at the end.
        return super().in_cycle(tf.square(tf.sin(0.5 * math.pi * position)))


@keras.saving.register_keras_serializable(package="he_keras")
class CycleJump(CycleSchedule):
    """`initial`, times `power` at each drop point of a cycle.

    Args:
        initial: The value at the start of a cycle.
        power: Factor of a drop.
        drop_points: Positions in a cycle, from 0 to 1.
        checkpoints: See `CycleSchedule`.
        **kwargs: See `EpochSchedule`.

    Example:
        >>> import he_keras as he
        >>> options = {"checkpoints": (4, 8), "steps_per_epoch": 10}
        >>> rate = he.schedules.CycleJump(1.0, 0.1, drop_points=(0.5, 0.75), **options)
        >>> [round(float(rate(step)), 3) for step in (0, 20, 30, 40, 60)]
        [1.0, 0.1, 0.01, 1.0, 0.1]
    """

    def __init__(
        self,
        initial: float | str,
        power: float,
        drop_points: Sequence[float],
        checkpoints: Sequence[float],
        **kwargs: Any,
    ):
        super().__init__(checkpoints, **kwargs)
        check_positive("power", power)
        self.initial, self.power = parse_epsilon(initial), float(power)
        self.drop_points = [float(point) for point in drop_points]
        if not self.drop_points or not all(0 <= point <= 1 for point in self.drop_points):
            raise ValueError(
                "Invalid drop points; expected at least one position from 0 to 1; "
                f"received drop_points={list(drop_points)}"
            )

    def in_cycle(self, position: Any) -> Any:
        """Returns the value at a position of a cycle."""
        drops = tf.reduce_sum(tf.cast(tf.constant(self.drop_points) <= position, tf.float32))
        return self.initial * tf.pow(self.power, drops)
