"""APGD: projected ascent that sets its step size itself, for linf, l2 and l1.

The file reads from top to bottom: the attack, its two settings, and the two rules by which it steps
(with momentum in linf and l2, with sparse steps in l1).
"""

import math
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from he_keras import losses
from he_keras.arguments import (
    check_choice,
    check_flag,
    check_positive_integer,
    check_share,
)
from he_keras.attacks.framework.attack import Attack
from he_keras.attacks.framework.gradients import loss_and_gradient
from he_keras.attacks.framework.result import Best, Crafted, Goal
from he_keras.attacks.framework.rows import iterate, mask_like, select_rows
from he_keras.attacks.framework.victim import Victim
from he_keras.attacks.registry import register
from he_keras.balls import example_axes, flat, length, sparse_step, start_noise
from he_keras.configurable import Sealed
from he_keras.threat import ThreatModel

# Radii of the l1 schedule in epsilons, and the share of the steps that the first two each take.
_LARGER_EPSILONS = (3.0, 2.0, 1.0)
_SHARE_OF_LARGER = 0.3


@keras.saving.register_keras_serializable(package="he_keras")
class APGD(Attack):
    """Untargeted APGD: returns a misclassified point, else the point of the largest loss.

    Each example starts with steps of 2 * epsilon (l1: epsilon). At fixed checks, an example whose
    loss rose too rarely or did not improve goes back to its best point, and its step is halved. In
    l1 a step changes only the pixels of the largest gradient, and a check sets their number.

    Paper: Croce & Hein 2020, "Reliable evaluation of adversarial robustness with an ensemble of
        diverse parameter-free attacks" (linf, l2). Croce & Hein 2021, "Mind the box: l1-APGD for
        sparse adversarial attacks on image classifiers" (l1).
    Assumes: a loss with a useful gradient in the images. The cross-entropy of a model with large
        logits underflows to a zero gradient. "dlr" and "cw" do not depend on the scale.
    Cost: `num_steps + 1` forward and backward passes (times `eot_samples`), 2 more with
        `larger_epsilons`.
    Deviations: from AutoAttack's code. With `stop_when_broken` (the default) the first
        misclassified point is returned, not the last one. Where none is found, it is the point of
        the largest loss, not the image. The step of an l2 attack keeps its length for a gradient
        below 1e-12. In l1, numbers of pixels are exact; in AutoAttack, rounding decides about
        single ones. As in that code, the first loss after the start is compared with zero, not with
        the start's loss.

    Args:
        threat: the threat model.
        loss: "ce", "dlr" or "cw" (margin).
        num_steps: number of steps, over all radii.
        rho: share of steps that must raise the loss for the step size to stay (linf, l2).
        eot_samples: passes over which the gradient of a randomised model is averaged.
        random_start: False starts at the image. True draws from the sphere: in linf noise divided
            by its largest entry, in l2 a Gaussian direction, in l1 projected Gaussian noise.
        larger_epsilons: l1 only: ascends in balls of 3, 2 and 1 epsilon, each from the best point
            of the one before, as AutoAttack does.
        **kwargs: see `Attack`. The best point is part of the algorithm: `keep` must be "best".

    Example:
        >>> import he_keras as he, numpy as np, tensorflow as tf
        >>> attack = he.attacks.get("apgd-ce-10", he.ThreatModel("linf", 0.1), random_start=False)
        >>> weights = tf.constant([[1.0, -1.0], [0.5, -0.5]])
        >>> images = np.array([[0.5, 0.5]], "float32")
        >>> result = attack(lambda images: images @ weights, images, np.array([0]))
        >>> [round(float(pixel), 3) for pixel in result.x_adv[0]]
        [0.4, 0.4]
    """

    has_targeted_form = True
    #: The losses to choose from.
    loss_names = tuple(losses.ATTACK_LOSSES)

    def __init__(
        self,
        threat: ThreatModel,
        loss: str = "ce",
        num_steps: int = 100,
        rho: float = 0.75,
        eot_samples: int = 1,
        random_start: bool = True,
        larger_epsilons: bool = False,
        name: str = "apgd",
        **kwargs,
    ) -> None:
        super().__init__(threat, name=name, **kwargs)
        check_positive_integer("num_steps", num_steps)
        check_positive_integer("eot_samples", eot_samples)
        self.loss = loss
        self.num_steps = int(num_steps)
        check_share("rho", rho)
        check_flag("random_start", random_start)
        check_flag("larger_epsilons", larger_epsilons)
        self.rho = float(rho)
        self.eot_samples = int(eot_samples)
        self.random_start = random_start
        self.larger_epsilons = larger_epsilons
        self._check_choices()
        self.min_classes = losses.MIN_CLASSES[self.loss]
        self.rules = self._build_rules()

    def _check_choices(self) -> None:
        check_choice("loss", self.loss, self.loss_names)
        if self.keep != "best":
            raise ValueError(
                f'APGD returns its best point; expected keep="best"; received keep={self.keep!r}'
            )
        if not self.larger_epsilons:
            return
        if self.threat.norm != "l1":
            raise ValueError(
                "larger_epsilons belongs to l1; expected a threat model of norm='l1'; "
                f"received norm={self.threat.norm!r}"
            )
        if self.num_steps < len(_LARGER_EPSILONS):
            raise ValueError(
                f"Too few steps for larger_epsilons; expected at least {len(_LARGER_EPSILONS)}; "
                f"received num_steps={self.num_steps}"
            )

    def _build_rules(self) -> "tuple[MomentumSteps | SparseSteps, ...]":
        """How to step in the ball, or with `larger_epsilons` in each of three."""
        if self.threat.norm != "l1":
            return (MomentumSteps(self.threat, self.num_steps, self.rho),)
        if not self.larger_epsilons:
            return (SparseSteps(self.threat, self.num_steps),)
        # At least one step is left for epsilon itself.
        larger = min(math.ceil(_SHARE_OF_LARGER * self.num_steps), (self.num_steps - 1) // 2)
        steps = [larger, larger, self.num_steps - 2 * larger]
        radii = [factor * self.threat.epsilon for factor in _LARGER_EPSILONS]
        return tuple(
            SparseSteps(ThreatModel("l1", radius, self.threat.bounds), num_steps, continues=True)
            for radius, num_steps in zip(radii, steps, strict=True)
        )

    def passes_of_run(self, num_classes: int) -> int:
        """Returns the passes of one run of an image that holds to the end, see `Attack`."""
        return 2 * self.eot_samples * self.num_steps + 1

    def run(self, victim: Victim, images, labels, seeds, targets=None) -> Crafted:
        """Runs the ascent from the start."""
        goal = Goal.of(labels, targets)
        state = self.search(victim, (images, goal), self._start(images, seeds))
        x_adv = select_rows(state.broken, state.adversarial, state.best.point[0])
        return Crafted(x_adv, state.passes, state.passes)

    def search(self, victim: Victim, inputs, start, skip=None) -> "AscentState":
        """Returns the final state of the ascent, whose entries say more than `run`.

        Args:
            victim: the classifier.
            inputs: images, their `Goal`, and what else `loss_function` takes.
            start: the points to start from, which may lie outside the ball and the bounds.
            skip: mask of examples to leave alone.
        """
        passes = tf.zeros(tf.shape(start)[:1], tf.int32)
        for rule in self.rules:
            state = self._ascend(victim, rule, inputs, start, skip)
            start, _ = state.best.point
            passes += state.passes
        return state._replace(passes=passes)

    def _ascend(self, victim: Victim, rule, inputs, start, skip) -> "AscentState":
        """Ascends in the ball of one rule; the last move is not evaluated."""

        def step(index, state, inputs):
            return self.step(victim, rule, index, state, inputs)

        state = self.initial_state(rule, inputs[0], start, skip)
        may_end = self._may_break(rule) or skip is not None
        is_active = (lambda state: ~state.ended) if may_end else None
        return iterate(step, state, inputs, rule.num_steps + 1, is_active)

    def _may_break(self, rule) -> bool:
        """Whether an example ends at its first misclassified point: only in the last ball."""
        return self.stop_when_broken and rule is self.rules[-1]

    def initial_state(self, rule, images, start, skip=None) -> "AscentState":
        """The state before the start has been evaluated."""
        start = rule.threat.project(start, images)
        passes = tf.zeros(tf.shape(images)[:1], tf.int32)
        nothing = tf.zeros_like(passes, tf.bool)
        first_step = rule.first_length * rule.threat.epsilon
        return AscentState(
            point=start,
            previous=start,
            best=Best.before((start, tf.zeros_like(images)), images),
            adversarial=start,
            broken=nothing,
            ended=nothing if skip is None else skip,
            step_size=tf.fill(tf.shape(passes), tf.constant(first_step, images.dtype)),
            memory=rule.initial_memory(images, start),
            passes=passes,
        )

    def step(self, victim: Victim, rule, index, state: "AscentState", inputs) -> "AscentState":
        """Evaluates the current point and moves on."""
        images, goal = inputs[:2]
        logits, loss, gradient = loss_and_gradient(
            victim,
            lambda logits: self.loss_function(logits, *inputs[1:]),
            state.point,
            self.eot_samples,
        )
        loss, wrong = tf.cast(loss, images.dtype), goal.is_reached(logits)
        state = state._replace(
            best=state.best.updated((state.point, gradient), loss, tf.zeros_like(wrong)),
            adversarial=select_rows(wrong, state.point, state.adversarial),
            broken=state.broken | wrong,
            ended=state.ended | wrong if self._may_break(rule) else state.ended,
            passes=state.passes + self.eot_samples,
        )
        memory, step_size, restart = rule.adapt(index, state, loss, images)
        state = state._replace(memory=memory, step_size=step_size)
        point, gradient = select_rows(restart, state.best.point, (state.point, gradient))
        moved = rule.move(index, state, point, gradient, images)
        return state._replace(point=moved, previous=point)

    def loss_function(self, logits, goal: Goal, targets=None):
        """Returns the loss to ascend for each example; only `APGDTargeted` has `targets` here."""
        return goal.loss(self.loss, logits)

    def _start(self, images, seeds, number: int | Any = 0):
        """Draws the start; `number` tells several starts of one example apart."""
        if not self.random_start:
            return images
        noise = start_noise(images, seeds, self.threat.norm, number)
        if self.threat.norm == "l1":
            # The noise itself is projected.
            return images + noise
        on_sphere = tf.math.divide_no_nan(noise, length(noise, self.threat.norm))
        return images + self.threat.epsilon * on_sphere


@register("apgd-ce", budget="num_steps")
@keras.saving.register_keras_serializable(package="he_keras")
class APGDCE(APGD):
    """APGD on the cross-entropy.

    Paper: Croce & Hein 2020 and, for l1, 2021: see `APGD`.
    Assumes: a useful gradient of the cross-entropy, which large logits can underflow to zero.
    Cost: `num_steps + 1` forward and backward passes; see `APGD`.
    Deviations: those of `APGD`, no others.

    Example:
        >>> import he_keras as he
        >>> he.attacks.get("apgd-ce-50", he.ThreatModel()).num_steps
        50
    """

    def __init__(self, threat: ThreatModel, num_steps: int = 100, **options) -> None:
        defaults = {"loss": "ce", "name": "apgd-ce"}
        super().__init__(threat, num_steps=num_steps, **{**defaults, **options})


@register("apgd-dlr", budget="num_steps")
@keras.saving.register_keras_serializable(package="he_keras")
class APGDDLR(APGD):
    """APGD on the difference of logits ratio, which does not depend on the logits' scale.

    Paper: Croce & Hein 2020 and, for l1, 2021: see `APGD`.
    Assumes: logits with a useful gradient in the images, whatever their scale; 3 classes.
    Cost: `num_steps + 1` forward and backward passes; see `APGD`.
    Deviations: those of `APGD`, no others.

    Example:
        >>> import he_keras as he
        >>> he.attacks.get("apgd-dlr", he.ThreatModel()).min_classes
        3
    """

    def __init__(self, threat: ThreatModel, num_steps: int = 100, **options) -> None:
        defaults = {"loss": "dlr", "name": "apgd-dlr"}
        super().__init__(threat, num_steps=num_steps, **{**defaults, **options})


class AscentState(NamedTuple):
    """Loop state; every entry has one row per example.

    Attributes:
        point: the point to evaluate next.
        previous: the point evaluated last, or the best one where the search was taken up there.
        best: the evaluated point of the largest loss and its gradient. Whether it is misclassified
            makes no difference here: the search is taken up at this point again.
        adversarial: the latest misclassified point; the start where there is none.
        broken: a misclassified point was found.
        ended: no more passes are spent on this example.
        step_size: length of the next step.
        memory: what the rule of the steps remembers.
        passes: forward and backward passes spent.
    """

    point: Any
    previous: Any
    best: Best
    adversarial: Any
    broken: Any
    ended: Any
    step_size: Any
    memory: Any
    passes: Any


# Shares of the number of steps, Croce & Hein 2020: first period, shortest one, and how much shorter
# each period is than the one before.
_FIRST_PERIOD, _SHORTEST_PERIOD, _DECREMENT = 0.22, 0.06, 0.03
#: Share of the new step; the rest is momentum.
_NEW_SHARE = 0.75

# Croce & Hein 2021.
_SPARSE_PERIOD = 0.04
_STEP_DIVISOR, _LARGEST_DIVISOR = 1.5, 10.0
# Changes below this share of epsilon are what rounding leaves of entries that the projection
# returned to the image. It returns many: after equal steps its threshold is often one of them.
_UNCHANGED = 1e-6


class MomentumMemory(NamedTuple):
    """What a momentum rule remembers of each example.

    `rises` counts the increases of the loss since the last check. `reduced` and `checked_loss` are
    that check's verdict and the best loss that it saw.
    """

    last_loss: Any
    rises: Any
    reduced: Any
    checked_loss: Any


class MomentumSteps(Sealed):
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
        self.num_steps = num_steps
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
        no_progress = ~memory.reduced & (memory.checked_loss >= state.best.strength)
        reduce = is_check & ((rises <= limit) | no_progress)
        memory = MomentumMemory(
            # The reference compares the first loss after the start with zero, not with the start's.
            last_loss=tf.where(at_start, tf.zeros_like(loss), loss),
            rises=tf.where(is_check | at_start, tf.zeros_like(rises), rises),
            reduced=tf.where(is_check, reduce, memory.reduced),
            checked_loss=tf.where(is_check | at_start, state.best.strength, memory.checked_loss),
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
    """What the sparse rule remembers: entries to step in, and those changed at the last check.

    Both are integers: rounding would decide between neighbouring pixels.
    """

    number: Any
    changed: Any


class SparseSteps(Sealed):
    """Steps of l1: along the signs of the largest gradient entries, as sparse as the perturbation.

    Args:
        threat: the threat model.
        num_steps: number of steps.
        continues: the start is an earlier result, whose sparsity sets that of the first steps.
    """

    first_length = 1.0

    def __init__(self, threat: ThreatModel, num_steps: int, continues: bool = False) -> None:
        self.threat = threat
        self.num_steps = num_steps
        self.continues = continues
        self._period = max(int(_SPARSE_PERIOD * num_steps), 1)

    def initial_memory(self, images, start) -> SparseMemory:
        """Entries to step in, and to compare the first check with."""
        size = tf.fill(tf.shape(images)[:1], flat(images).shape[1])
        cold = SparseMemory(number=-(-size // 5), changed=size)
        if not self.continues:
            return cold
        warm = self._memory_of(start, images)
        # The image itself says nothing about a useful sparsity.
        return select_rows(warm.changed > 0, warm, cold)

    def adapt(self, index, state, _loss, images):
        """Returns memory, step sizes, and a mask of the examples to take up at their best point."""
        is_check = (index > 0) & (index % self._period == 0)
        checked = self._memory_of(state.best.point[0], images)
        sparser = 20 * checked.changed < 19 * state.memory.changed
        memory = tf.nest.map_structure(
            lambda new, old: tf.where(is_check, new, old), checked, state.memory
        )
        largest = tf.cast(self.first_length * self.threat.epsilon, images.dtype)
        shorter = tf.maximum(state.step_size / _STEP_DIVISOR, largest / _LARGEST_DIVISOR)
        step_size = tf.where(sparser, largest, shorter)
        return memory, tf.where(is_check, step_size, state.step_size), is_check & sparser

    def move(self, _index, state, point, gradient, images):
        """Steps in the entries whose gradient is largest, all by the same amount."""
        step = sparse_step(gradient, state.memory.number, state.step_size)
        return self.threat.project(point + step, images)

    def _memory_of(self, points, images) -> SparseMemory:
        """Two thirds of the entries in which points differ from their images, and all of them."""
        is_changed = tf.abs(points - images) > _UNCHANGED * self.threat.epsilon
        changed = tf.math.count_nonzero(is_changed, axis=example_axes(images), dtype=tf.int32)
        return SparseMemory(number=-(-2 * changed // 3), changed=changed)


def rise_limits(num_steps: int, rho: float) -> list[int]:
    """For each iterate 0..num_steps: -1, or at a check how many rises are still too few.

    Example:
        >>> from he_keras.attacks.apgd import rise_limits
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
