"""The two ways in which APGD steps: with momentum in linf and l2, with sparse steps in l1.

A rule answers three questions about each example: what it has to remember (`initial_memory`), how
long the next step is and whether it starts from the best point again (`adapt`), and where the step
leads (`move`). The iterations at which steps may change are constants of the number of steps.
"""

from typing import Any, NamedTuple

import tensorflow as tf

from he_keras.attacks.survivors import mask_like, select_rows
from he_keras.threat import ThreatModel

# Shares of the number of steps, Croce & Hein 2020: first period, shortest one, and how much shorter
# each period is than the one before.
_FIRST_PERIOD, _SHORTEST_PERIOD, _DECREMENT = 0.22, 0.06, 0.03
#: Share of the new step; the rest is momentum.
_NEW_SHARE = 0.75

# Croce & Hein 2021. Shares that decide between neighbouring pixels are fractions, (numerator,
# denominator), since rounding would decide in their place: pixels of the first step, pixels of a
# step by those of the perturbation, and when that counts as sparser than at the check before.
_SPARSE_PERIOD = 0.04
_FIRST_SHARE, _SHARE_OF_CHANGED, _SPARSER = (1, 5), (2, 3), (19, 20)
_STEP_DIVISOR, _LARGEST_DIVISOR = 1.5, 10.0
_COUNT_FLOOR = 1e-10
# Changes below this share of epsilon are what rounding leaves of entries that the projection
# returned to the image. It returns many: after equal steps its threshold is often one of them.
_UNCHANGED = 1e-6


class MomentumMemory(NamedTuple):
    """What a momentum rule remembers of each example.

    `rises` counts the increases of the loss since the last check; `reduced` and `checked_loss` are
    that check's verdict and the best loss that it saw.
    """

    last_loss: Any
    rises: Any
    reduced: Any
    checked_loss: Any


class MomentumSteps:
    """Steps of linf and l2: halved where the loss rose too rarely, or where nothing got better.

    Args:
        threat: the threat model.
        num_steps: number of steps.
        rho: share of the steps since the last check in which the loss must have risen.
    """

    #: Length of the first step, in epsilons.
    first_length = 2.0

    def __init__(self, threat: ThreatModel, num_steps: int, rho: float) -> None:
        self.threat = threat
        self._limits = rise_limits(num_steps, rho)

    def initial_memory(self, images, _start) -> MomentumMemory:
        """What is remembered before the start has been evaluated."""
        zero = tf.zeros(tf.shape(images)[:1], images.dtype)
        return MomentumMemory(
            last_loss=zero,
            rises=tf.zeros_like(zero, tf.int32),
            # The step counts as just reduced: lack of progress is no reason at the first check.
            reduced=tf.ones_like(zero, tf.bool),
            checked_loss=zero,
        )

    def adapt(self, index, state, loss, _images):
        """Returns memory, step sizes, and a mask of the examples to take up at their best point."""
        memory = state.memory
        at_start = index == 0
        limit = tf.gather(tf.constant(self._limits), index)
        is_check = limit >= 0
        rises = memory.rises + tf.cast(loss > memory.last_loss, tf.int32)
        no_progress = ~memory.reduced & (memory.checked_loss >= state.best_loss)
        reduce = is_check & ((rises <= limit) | no_progress)
        memory = MomentumMemory(
            # The reference compares the first loss after the start with zero, not with the start's.
            last_loss=tf.where(at_start, tf.zeros_like(loss), loss),
            rises=tf.where(is_check | at_start, tf.zeros_like(rises), rises),
            reduced=tf.where(is_check, reduce, memory.reduced),
            checked_loss=tf.where(is_check | at_start, state.best_loss, memory.checked_loss),
        )
        return memory, tf.where(reduce, state.step_size / 2.0, state.step_size), reduce

    def move(self, index, state, point, gradient, images):
        """Takes 3/4 of a projected step and 1/4 of the last movement; first the whole step."""
        length = mask_like(state.step_size, images)
        target = self.threat.project(point + length * self.threat.steepest_step(gradient), images)
        share = tf.cast(tf.where(index == 0, 1.0, _NEW_SHARE), images.dtype)
        momentum = point - state.previous
        moved = point + share * (target - point) + (1.0 - share) * momentum
        return self.threat.project(moved, images)


class SparseMemory(NamedTuple):
    """What the sparse rule remembers: entries to step in, and those changed at the last check."""

    number: Any
    changed: Any


class SparseSteps:
    """Steps of l1: along the signs of the largest gradient entries, as sparse as the perturbation.

    Args:
        threat: the threat model.
        num_steps: number of steps.
        continues: the start is an earlier result, whose sparsity sets that of the first steps.
    """

    first_length = 1.0

    def __init__(self, threat: ThreatModel, num_steps: int, continues: bool = False) -> None:
        self.threat = threat
        self.continues = continues
        self._period = max(int(_SPARSE_PERIOD * num_steps), 1)

    def initial_memory(self, images, start) -> SparseMemory:
        """Entries to step in, and to compare the first check with."""
        size = tf.fill(tf.shape(images)[:1], _size_of_example(images))
        cold = SparseMemory(_share(_FIRST_SHARE, size), size)
        if not self.continues:
            return cold
        changed = self._changed_entries(start, images)
        warm = SparseMemory(_share(_SHARE_OF_CHANGED, changed), changed)
        # The image itself says nothing about a useful sparsity.
        return select_rows(changed > 0, warm, cold)

    def adapt(self, index, state, _loss, images):
        """Returns memory, step sizes, and a mask of the examples to take up at their best point."""
        is_check = (index > 0) & (index % self._period == 0)
        changed = self._changed_entries(state.best, images)
        part, whole = _SPARSER
        sparser = whole * changed < part * state.memory.changed
        checked = SparseMemory(_share(_SHARE_OF_CHANGED, changed), changed)
        memory = tf.nest.map_structure(
            lambda new, old: tf.where(is_check, new, old), checked, state.memory
        )
        largest = tf.cast(self.first_length * self.threat.epsilon, images.dtype)
        shorter = tf.maximum(state.step_size / _STEP_DIVISOR, largest / _LARGEST_DIVISOR)
        step_size = tf.where(sparser, largest, shorter)
        return memory, tf.where(is_check, step_size, state.step_size), is_check & sparser

    def move(self, _index, state, point, gradient, images):
        """Steps in the entries whose gradient is largest, all by the same amount."""
        size = _size_of_example(images)
        magnitude = tf.abs(gradient)
        ordered = tf.sort(tf.reshape(magnitude, [-1, size]), axis=1)
        rank = tf.clip_by_value(size - state.memory.number, 0, size - 1)
        smallest = tf.gather(ordered, rank, batch_dims=1)
        is_large = magnitude >= mask_like(smallest, images)
        signs = tf.where(is_large, tf.sign(gradient), tf.zeros_like(gradient))
        number = tf.reduce_sum(tf.abs(signs), axis=_example_axes(images)) + _COUNT_FLOOR
        step = mask_like(state.step_size / number, images) * signs
        return self.threat.project(point + step, images)

    def _changed_entries(self, points, images):
        """Number of entries of each example in which the point differs from the image."""
        changed = tf.abs(points - images) > _UNCHANGED * self.threat.epsilon
        return tf.math.count_nonzero(changed, axis=_example_axes(images), dtype=tf.int32)


def rise_limits(num_steps: int, rho: float) -> list[int]:
    """For each iterate 0..num_steps: -1, or at a check how many rises are still too few.

    Example:
        >>> from he_keras.attacks.apgd_steps import rise_limits
        >>> [index for index, limit in enumerate(rise_limits(100, 0.75)) if limit >= 0]
        [22, 41, 57, 70, 80, 87, 93, 99]
    """
    period = max(int(_FIRST_PERIOD * num_steps), 1)
    shortest = max(int(_SHORTEST_PERIOD * num_steps), 1)
    decrement = max(int(_DECREMENT * num_steps), 1)
    limits = [-1] * (num_steps + 1)
    check = period
    while check <= num_steps:
        limits[check] = int(rho * period)
        period = max(period - decrement, shortest)
        check += period
    return limits


def _share(fraction, count):
    """The fraction of a count, rounded up."""
    part, whole = fraction
    return -(-part * count // whole)


def _size_of_example(images):
    return tf.reduce_prod(tf.shape(images)[1:])


def _example_axes(images) -> list[int]:
    return list(range(1, images.shape.rank))
