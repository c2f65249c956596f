"""Schedules that count in training steps: steps, straight lines, cosine, FastAT's triangle.

Steps count from 0. A drop "at epoch 75" is at the first batch of the epoch with index 75, as in the
papers' code. What Keras already offers is used: its `PiecewiseConstantDecay` and `CosineDecay`.
`PiecewiseLinear` adds FastAT's triangular learning rate (Wong et al., 2020) and the momentum cycle
that comes with it unseen. PyTorch's `CyclicLR` moves the momentum 0.9 -> 0.8 -> 0.9, against the
learning rate, whatever momentum was configured.
"""

from collections.abc import Sequence
from typing import Any

import keras
from keras.optimizers.schedules import CosineDecay, LearningRateSchedule, PiecewiseConstantDecay

from he_keras.arguments import check_positive, is_increasing, parse_epsilon
from he_keras.configurable import Configurable

#: The defaults of PyTorch's `CyclicLR`, which FastAT uses.
_LOW_MOMENTUM, _HIGH_MOMENTUM = 0.8, 0.9


@keras.saving.register_keras_serializable(package="he_keras")
class PiecewiseLinear(Configurable, LearningRateSchedule):
    """Straight lines between points, and the first and last value outside them (`numpy.interp`).

    Args:
        steps: Strictly increasing steps, at least two; they need not be whole numbers.
        values: The value at each of them, reached exactly; numbers or fractions such as "8/255".

    Example:
        >>> import he_keras as he
        >>> warm_up = he.schedules.PiecewiseLinear([0, 100, 400], [0.0, 0.1, 0.1])
        >>> float(warm_up(50)), float(warm_up(1000))
        (0.05..., 0.1...)
    """

    def __init__(self, steps: Sequence[float], values: Sequence[float | str]):
        if len(steps) < 2 or not is_increasing(steps):
            raise ValueError(
                "Invalid steps of a piecewise linear schedule; expected two or more strictly "
                f"increasing numbers; received steps={list(steps)}"
            )
        if len(values) != len(steps):
            raise ValueError(
                f"Invalid values of a piecewise linear schedule; expected {len(steps)}, one for "
                f"each step; received values={list(values)}"
            )
        self.steps = [float(step) for step in steps]
        self.values = [parse_epsilon(value) for value in values]

    def __call__(self, step: Any) -> Any:
        """Returns the value at `step` as a float32 scalar."""
        steps = keras.ops.convert_to_tensor(self.steps, "float32")
        values = keras.ops.convert_to_tensor(self.values, "float32")
        step = keras.ops.cast(step, "float32")
        right = keras.ops.sum(keras.ops.cast(step >= steps, "int32"))
        right = keras.ops.clip(right, 1, len(self.steps) - 1)
        start, end = steps[right - 1], steps[right]
        fraction = keras.ops.clip((step - start) / (end - start), 0.0, 1.0)
        # This form hits both end values exactly, where start + fraction * rise may miss the second.
        return (1.0 - fraction) * values[right - 1] + fraction * values[right]


def piecewise_constant(
    boundaries: Sequence[int], values: Sequence[float]
) -> PiecewiseConstantDecay:
    """Returns `values[i + 1]` from step `boundaries[i]` on (inclusive), `values[0]` before.

    Keras's `PiecewiseConstantDecay` itself changes one step later.
    """
    if not boundaries or boundaries[0] < 1 or not is_increasing(boundaries):
        raise ValueError(
            "Invalid boundaries of a piecewise constant schedule; expected strictly increasing "
            f"whole steps from 1 on; received boundaries={list(boundaries)}"
        )
    if len(values) != len(boundaries) + 1:
        raise ValueError(
            "Invalid values of a piecewise constant schedule; expected one more than boundaries, "
            f"{len(boundaries) + 1}; received values={list(values)}"
        )
    last_steps = [int(boundary) - 1 for boundary in boundaries]
    return PiecewiseConstantDecay(last_steps, [float(value) for value in values])


def step_decay(
    initial: float | str, boundaries: Sequence[int], drop_factor: float = 0.1
) -> PiecewiseConstantDecay:
    """Returns `initial`, multiplied by `drop_factor` once more from each boundary step on.

    Args:
        initial: the first value.
        boundaries: the steps from which on the value is smaller.
        drop_factor: what the value is multiplied by at each of them.

    Example:
        >>> import he_keras as he
        >>> rate = he.schedules.step_decay(0.1, boundaries=[40000, 60000])
        >>> [round(float(rate(step)), 6) for step in (39999, 40000, 60000)]
        [0.1, 0.01, 0.001]
    """
    initial = parse_epsilon(initial)
    values = [initial * drop_factor**drops for drops in range(len(boundaries) + 1)]
    return piecewise_constant(boundaries, values)


def triangular(
    peak: float | str,
    total_steps: int,
    peak_fraction: float = 0.5,
    start: float | str = 0.0,
    end: float | str = 0.0,
) -> PiecewiseLinear:
    """Returns a rise from `start` to `peak` and a fall to `end` (FastAT: 0 -> 0.2 -> 0).

    The peak is reached at `peak_fraction * total_steps`, `end` at `total_steps`.

    Args:
        peak: the highest value.
        total_steps: length of the whole run.
        peak_fraction: share of the run after which the peak is reached.
        start: the first value.
        end: the last value.

    Example:
        >>> import he_keras as he
        >>> rate = he.schedules.triangular(0.2, total_steps=1000)
        >>> [float(rate(step)) for step in (0, 500, 1000)]
        [0.0, 0.2..., 0.0]
    """
    if not 0 < peak_fraction < 1:
        raise ValueError(
            "Invalid place of the peak; expected a fraction between 0 and 1; "
            f"received peak_fraction={peak_fraction}"
        )
    check_positive("total_steps", total_steps)
    return PiecewiseLinear([0, peak_fraction * total_steps, total_steps], [start, peak, end])


def cyclic_momentum(total_steps: int, peak_fraction: float = 0.5) -> PiecewiseLinear:
    """Returns the momentum cycle 0.9 -> 0.8 -> 0.9, lowest where the learning rate peaks.

    Give it the `total_steps` and `peak_fraction` of the `triangular` learning rate that it goes
    with.

    Args:
        total_steps: length of the whole run.
        peak_fraction: share of the run after which the momentum is lowest.
    """
    return triangular(
        _LOW_MOMENTUM, total_steps, peak_fraction, start=_HIGH_MOMENTUM, end=_HIGH_MOMENTUM
    )


def cosine(
    initial: float | str, total_steps: int, warmup_steps: int = 0, final: float | str = 0.0
) -> CosineDecay:
    """Returns a linear warm-up from 0 to `initial`, then half a cosine down to `final`.

    Args:
        initial: Value at the end of the warm-up; without one, the value at step 0.
        total_steps: Step at which `final` is reached, warm-up included.
        warmup_steps: Length of the warm-up.
        final: Value from `total_steps` on.

    Example:
        >>> import he_keras as he
        >>> rate = he.schedules.cosine(0.1, total_steps=1100, warmup_steps=100)
        >>> [round(float(rate(step)), 4) for step in (0, 50, 100, 600, 1100)]
        [0.0, 0.05, 0.1, 0.05, 0.0]
    """
    check_positive("total_steps", total_steps)
    initial, final = parse_epsilon(initial), parse_epsilon(final)
    if not 0 <= warmup_steps < total_steps or not initial > 0:
        raise ValueError(
            "Invalid cosine schedule; expected initial > 0 and 0 <= warmup_steps < total_steps; "
            f"received initial={initial}, warmup_steps={warmup_steps}, total_steps={total_steps}"
        )
    warmup = {"warmup_target": initial, "warmup_steps": warmup_steps} if warmup_steps else {}
    return CosineDecay(
        0.0 if warmup_steps else initial,
        total_steps - warmup_steps,
        alpha=final / initial,
        **warmup,
    )
