"""Schedules of epochs that restart, and what they share.

Paper: Liu et al. 2020, "On the loss landscape of adversarial training: identifying challenges and
how to overcome them" (PAS): the radius grows from 0, so that training starts on a smoother loss;
radius and learning rate may restart together, again and again, and the weights at the ends of the
cycles make an ensemble (`he_keras.SnapshotEnsemble`).

With t the number of epochs trained so far, checkpoints `0 = T_0 < T_1 < .. < T_n`, and inside of
`T_i <= t < T_{i+1}` the position `r = (t - T_i) / (T_{i+1} - T_i)`:

* `Linear`: initial + slope * t;
* `CycleLinear`: initial + (final - initial) * r;
* `CycleCosine`: initial + (final - initial) * (1 - cos(pi r)) / 2;
* `Exponential`: initial * power^(t / interval);
* `CycleExponential`: initial * power^r;
* `Jump`: initial * power^k, k drops so far, at t = first_jump and then every jump_every epochs;
* `CycleJump`: initial * power^k, with k drop points <= r;
* `CosineJump`: from initial to final along a cosine, and back to initial at every jump.

Everything is clipped to `minimum` and `maximum` at the end: a radius that heads for 0.6 under a
maximum of 0.4 stays at 0.4 for the rest of its cycle. From T_n on r is 1; the released code has no
value at t = T_n exactly, and its `cycle_jump` is an error there. Its `exp` could not be chosen by
name. The radius is in the units of the images: 8-bit numbers are fractions, "8/255".
"""

import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from he_keras.schedules.by_epoch import EpochSchedule
from he_keras.schedules.by_step import check_positive, is_increasing
from he_keras.threat import parse_epsilon


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

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor as plain data."""
        return {"checkpoints": self.checkpoints, **super().get_config()}


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

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor as plain data."""
        return {"initial": self.initial, "final": self.final, **super().get_config()}


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
class CycleExponential(CycleSchedule):
    """From `initial` to `initial * power` along an exponential, in every cycle.

    Args:
        initial: The value at the start of a cycle.
        power: Factor at its end.
        checkpoints: See `CycleSchedule`.
        **kwargs: See `EpochSchedule`.
    """

    def __init__(
        self, initial: float | str, power: float, checkpoints: Sequence[float], **kwargs: Any
    ):
        super().__init__(checkpoints, **kwargs)
        check_positive("power", power)
        self.initial, self.power = parse_epsilon(initial), float(power)

    def in_cycle(self, position: Any) -> Any:
        """Returns the value at a position of a cycle."""
        return self.initial * tf.pow(self.power, position)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor as plain data."""
        return {"initial": self.initial, "power": self.power, **super().get_config()}


@keras.saving.register_keras_serializable(package="he_keras")
class CycleJump(CycleExponential):
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
        super().__init__(initial, power, checkpoints, **kwargs)
        self.drop_points = [float(point) for point in drop_points]
        if not self.drop_points or not all(0 <= point <= 1 for point in self.drop_points):
            raise ValueError(
                "Invalid drop points; expected at least one position from 0 to 1; "
                f"received drop_points={list(drop_points)}"
            )

    def in_cycle(self, position: Any) -> Any:
        """Returns the value at a position of a cycle."""
        drops = tf.reduce_sum(tf.cast(tf.constant(self.drop_points) <= position, tf.float32))
        return super().in_cycle(drops)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor as plain data."""
        return {"drop_points": self.drop_points, **super().get_config()}
