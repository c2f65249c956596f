"""SPSA and NES: ascent along a gradient estimated from the logits at pairs of images."""

import functools
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from he_keras import losses
from he_keras.arguments import check_choice, check_positive_integer, positive_number
from he_keras.attacks.framework.attack import Attack
from he_keras.attacks.framework.gradients import adam_step, zero_moments
from he_keras.attacks.framework.result import Best, Crafted, Goal
from he_keras.attacks.framework.rows import IMAGES_AT_ONCE, iterate, map_groups
from he_keras.attacks.framework.victim import Victim
from he_keras.attacks.registry import register
from he_keras.balls import map_seeds, seed_per_example
from he_keras.threat import ThreatModel, checked_start

DIRECTIONS = ("rademacher", "gaussian")
OPTIMIZERS = ("adam", "sign")
_DIRECTIONS_AT_ONCE = IMAGES_AT_ONCE // 2
# The random start uses the seed itself and its first few descendants.
_FIRST_DRAW = 16


class _State(NamedTuple):
    """Loop state; every entry has one row per example."""

    x_adv: Any
    moments: Any
    best: Best
    passes: Any


@keras.saving.register_keras_serializable(package="he_keras")
class GradientEstimation(Attack):
    """Iterated ascent along an estimated gradient, with projection.

    Each step estimates the gradient of the loss at the current image `x`. The estimate is the mean
    of `(loss(x + sigma u) - loss(x - sigma u)) / (2 sigma) * u` over `num_samples` random
    directions `u`. These are random signs (SPSA) or standard normal (NES). Then it ascends. SPSA
    takes one step of Adam. NES takes a step of length `step_size` along the steepest direction of
    the norm, in linf the sign. The result is projected and checked.

    Paper: Uesato et al. 2018 (`SPSA`), Ilyas et al. 2018 (`NES`); both as in the HE paper (Pang et
        al. 2020), Eq. 23.
    Assumes: logits only, precise enough for their differences. If a model computes in 16 bits,
        these are mostly rounding at the default sigma: take a larger one.
    Cost: `2 * num_samples + 1` forward passes per step, 257 by default. Without the check
        (`keep="last"` and `stop_when_broken=False`) it is one fewer. About 256 images exist at a
        time.
    Deviations: the HE paper prints an ascent on the margin, although its loss falls towards
        success. Here the default loss is the negative margin, which rises. Every example has its
        own directions, where advertorch and torchattacks share them within a batch. The HE paper's
        20, 50 and 80 steps, 128 directions and sigma of 0.001 are kept. It does not state its step
        size. As in all of these tools, the images asked for may leave the pixel bounds by sigma.

    Args:
        threat: the threat model.
        num_steps: number of steps.
        num_samples: directions per estimate, each of which costs two queries.
        sigma: length of the queries' displacement along a direction, as a share of the width of the
            pixel bounds.
        step_size: Adam's learning rate, or the length of a step. The default is 0.01 of the width
            of the bounds for Adam, else 2.5 * epsilon / num_steps.
        directions: "rademacher" (random signs, SPSA) or "gaussian" (NES).
        optimizer: "adam", or "sign" for the steepest step of the threat model's norm.
        loss: "cw" (margin), "ce" or "dlr".
        random_start: False starts at the image, True draws uniformly from the ball, a number is the
            radius of a uniform start.
        **kwargs: see `Attack`.

    Example:
        >>> import he_keras as he, numpy as np, tensorflow as tf
        >>> attack = he.attacks.get("nes-5", he.ThreatModel("linf", 0.1), num_samples=64)
        >>> weights = tf.constant([[1.0, -1.0], [0.5, -0.5]])
        >>> images = np.array([[0.5, 0.5]], "float32")
        >>> result = attack(lambda images: images @ weights, images, np.array([0]))
        >>> [round(float(pixel), 3) for pixel in result.x_adv[0]]
        [0.4, 0.4]
    """

    has_targeted_form = True
    uses_gradient = False

    def __init__(
        self,
        threat: ThreatModel,
        num_steps: int = 20,
        num_samples: int = 128,
        sigma: float = 0.001,
        step_size: float | str | None = None,
        directions: str = "rademacher",
        optimizer: str = "adam",
        loss: str = "cw",
        random_start: bool | float = False,
        name: str = "spsa",
        **kwargs,
    ) -> None:
        super().__init__(threat, name=name, **kwargs)
        check_positive_integer("num_steps", num_steps)
        check_positive_integer("num_samples", num_samples)
        check_choice("directions", directions, DIRECTIONS)
        check_choice("optimizer", optimizer, OPTIMIZERS)
        check_choice("loss", loss, tuple(losses.ATTACK_LOSSES))
        if step_size is None:
            rate, step = 0.01 * threat.width, 2.5 * threat.epsilon / num_steps
            step_size = rate if optimizer == "adam" else step
        self.num_steps = int(num_steps)
        self.num_samples = int(num_samples)
        self.sigma = positive_number("sigma", sigma)
        self.step_size = positive_number("step_size", step_size)
        self.directions = directions
        self.optimizer = optimizer
        self.loss = loss
        self.random_start = checked_start(random_start, allows_gaussian=False)
        self.min_classes = losses.MIN_CLASSES[loss]

    def passes_of_run(self, num_classes: int) -> int:
        """Returns the passes of one run of an image that holds to the end, see `Attack`."""
        return self.num_steps * (2 * self.num_samples + 1)

    def run(self, victim: Victim, images, labels, seeds, targets=None) -> Crafted:
        """Runs the loop on one batch."""
        start = self.threat.start(self.random_start, images, seeds)
        start = self.threat.project(start, images)
        state = self._initial_state(images, start)

        def step(index, state, inputs):
            return self._step(victim, index, *inputs, state)

        inputs = images, Goal.of(labels, targets), seed_per_example(seeds, images)
        is_active = (lambda state: ~state.best.broken) if self.stop_when_broken else None
        state = iterate(step, state, inputs, self.num_steps, is_active)
        x_adv = state.best.point if self.keep == "best" else state.x_adv
        return Crafted(x_adv, state.passes, tf.zeros_like(state.passes))

    def _initial_state(self, images, start) -> _State:
        rows = tf.shape(images)[:1]
        passes = tf.zeros(rows, tf.int32)
        return _State(
            x_adv=start,
            moments=zero_moments(images) if self.optimizer == "adam" else (),
            best=Best.before(start if self.keep == "best" else (), images),
            passes=passes,
        )

    def _step(self, victim, index, images, goal, seeds, state: _State) -> _State:
        gradient = self.estimate(victim, index, state.x_adv, goal, seeds)
        if self.optimizer == "adam":
            step, moments = adam_step(gradient, state.moments, index + 1, self.step_size)
            state = state._replace(moments=moments)
        else:
            step = self.step_size * self.threat.steepest_step(gradient)
        x_adv = self.threat.project(state.x_adv + step, images)
        state = state._replace(x_adv=x_adv, passes=state.passes + 2 * self.num_samples)
        if not self.stop_when_broken and self.keep == "last":
            return state
        logits = victim.logits(x_adv)
        point = x_adv if self.keep == "best" else ()
        best = state.best.updated(point, goal.loss(self.loss, logits), goal.is_reached(logits))
        return state._replace(best=best, passes=state.passes + 1)

    def estimate(self, victim, index, x_adv, goal, seeds):
        """Returns the estimated gradient of the loss at `x_adv` in step `index`."""
        function = functools.partial(self._estimate_group, victim, index)
        images_per_row = 2 * min(self.num_samples, _DIRECTIONS_AT_ONCE)
        return map_groups(function, (x_adv, goal, seeds), images_per_row)

    def _estimate_group(self, victim, index, x_adv, goal, seeds):
        """Estimates for a few examples, from so many directions at a time as memory allows."""

        def add(chunk, total, count=_DIRECTIONS_AT_ONCE):
            directions = self.draw(index, chunk, count, x_adv, seeds)
            rise = self._rise(victim, x_adv, goal, directions)
            axes = list(range(2, directions.shape.rank))
            weights = tf.reshape(rise, tf.concat([tf.shape(rise), tf.ones_like(axes)], axis=0))
            return chunk + 1, total + tf.reduce_sum(weights * directions, axis=1)

        num_chunks, rest = divmod(self.num_samples, _DIRECTIONS_AT_ONCE)
        _, total = tf.while_loop(
            lambda chunk, _total: chunk < num_chunks,
            add,
            (tf.constant(0), tf.zeros_like(x_adv)),
            shape_invariants=(tf.TensorShape([]), tf.TensorShape([None, *x_adv.shape[1:]])),
        )
        if rest:
            _, total = add(num_chunks, total, rest)
        return total / (2.0 * self.sigma * self.threat.width * self.num_samples)

    def draw(self, index, chunk, count, x_adv, seeds):
        """Draws directions `(n, count, ...)`, each example's from its seed, step and chunk."""
        shape = tf.concat([[count], tf.shape(x_adv)[1:]], axis=0)

        def draw_one(seed):
            seed = tf.random.fold_in(tf.random.fold_in(seed, _FIRST_DRAW + index), chunk)
            if self.directions == "gaussian":
                return tf.random.stateless_normal(shape, seed, dtype=x_adv.dtype)
            signs = tf.random.stateless_uniform(shape, seed, 0, 2, tf.int32)
            return tf.cast(2 * signs - 1, x_adv.dtype)

        return map_seeds(draw_one, seeds, [None, *x_adv.shape[1:]], x_adv.dtype)

    def _rise(self, victim, x_adv, goal, directions):
        """Returns `loss(x + sigma u) - loss(x - sigma u)`, `(n, count)`; 0 where not finite."""
        shift = self.sigma * self.threat.width * directions
        x_adv = x_adv[:, tf.newaxis]
        queries = tf.concat([x_adv + shift, x_adv - shift], axis=1)
        queries_per_row = tf.shape(queries)[1]
        logits = victim.logits(tf.reshape(queries, [-1, *queries.shape[2:]]))
        loss = goal.repeated(queries_per_row).loss(self.loss, logits)
        upper, lower = tf.split(tf.reshape(loss, [-1, queries_per_row]), 2, axis=1)
        rise = tf.cast(upper - lower, directions.dtype)
        return tf.where(tf.math.is_finite(rise), rise, tf.zeros_like(rise))


@register("spsa", budget="num_steps")
@keras.saving.register_keras_serializable(package="he_keras")
class SPSA(GradientEstimation):
    """Random signs as directions, and Adam.

    Paper: Uesato et al. 2018, "Adversarial risk and the dangers of evaluating against weak
        attacks".
    Assumes: logits only, precise enough for their differences; see `GradientEstimation`.
    Cost: `2 * num_samples + 1` forward passes per step, 257 by default, no backward pass.
    Deviations: those of `GradientEstimation`, no others.

    Example:
        >>> import he_keras as he
        >>> he.attacks.get("spsa-20", he.ThreatModel()).directions
        'rademacher'
    """

    def __init__(self, threat: ThreatModel, num_steps: int = 20, **options) -> None:
        super().__init__(threat, num_steps, **options)


@register("nes", budget="num_steps")
@keras.saving.register_keras_serializable(package="he_keras")
class NES(GradientEstimation):
    """Normal directions, and steps along the steepest direction of the norm.

    Paper: Ilyas et al. 2018, "Black-box adversarial attacks with limited queries and information".
    Assumes: logits only, precise enough for their differences; see `GradientEstimation`.
    Cost: `2 * num_samples + 1` forward passes per step, 257 by default, no backward pass.
    Deviations: those of `GradientEstimation`, no others.

    Example:
        >>> import he_keras as he
        >>> he.attacks.get("nes-20", he.ThreatModel()).num_samples
        128
    """

    def __init__(self, threat: ThreatModel, num_steps: int = 20, **options) -> None:
        defaults = {"directions": "gaussian", "optimizer": "sign", "name": "nes"}
        super().__init__(threat, num_steps, **{**defaults, **options})
