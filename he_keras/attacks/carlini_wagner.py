"""The l2 attack of Carlini & Wagner: the nearest adversarial image, by a penalty and Adam."""

import math
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from he_keras.attacks.adam import Moments, adam_step, zero_moments
from he_keras.attacks.attack import Attack
from he_keras.attacks.checks import (
    check_flag,
    check_number,
    check_positive_integer,
    positive_number,
)
from he_keras.attacks.gradients import loss_and_gradient
from he_keras.attacks.penalty import (
    ConstantSearch,
    TanhSpace,
    end_round,
    hinge,
    is_adversarial,
    record,
    start_search,
)
from he_keras.attacks.registry import register
from he_keras.attacks.result import Crafted
from he_keras.attacks.survivors import iterate, mask_like, select_rows
from he_keras.attacks.victim import Victim
from he_keras.threat import ThreatModel

_CHECKS_PER_ROUND = 10
_PROGRESS = 0.9999


class _State(NamedTuple):
    """Loop state; every entry has one row per example."""

    variable: Any
    moments: Moments
    steps_done: Any
    checked_loss: Any
    search: ConstantSearch
    passes: Any


@register("cw-l2", budget="num_steps")
@keras.saving.register_keras_serializable(package="he_keras")
class CarliniWagnerL2(Attack):
    """Minimum-norm attack in l2, by a penalty and Adam.

    For each example it minimises `|x' - x|^2 + const * max(margin + confidence, 0)` over
    `x' = centre + half_width * tanh(variable)` with Adam, in `binary_search_steps` rounds, each
    from the image itself with a fresh Adam and another constant: ten times the last one until a
    round finds an adversarial image, then by bisection. The nearest adversarial image of all rounds
    is returned.

    Paper: Carlini & Wagner 2017, "Towards evaluating the robustness of neural networks".
    Assumes: logits with a useful gradient in the images.
    Cost: `num_steps * binary_search_steps` forward and backward passes, 2,700 by default; a round's
        last step is not evaluated. On the two small networks of the tests the mean distance is 2 to
        3 % larger with 100 steps and half a percent smaller with 1,000; `abort_early` saves two
        thirds of the passes for 0.3 % of the mean distance, but single examples lose much more.
    Deviations: from the authors' code: with `abort_early` an example gives up a round, and begins
        its next one, when its own objective stalls, where theirs looks at the sum over the batch,
        so that examples influence each other; the default runs all steps.

    Args:
        threat: the threat model, of norm l2; epsilon only decides what counts as a success.
        num_steps: Adam steps per round.
        binary_search_steps: rounds; from ten on, the last one repeats the best constant.
        learning_rate: Adam's, in tanh space.
        initial_const: constant of the first round.
        confidence: how far another class must lead the true one.
        abort_early: begin the next round when the objective has not fallen by 0.01 % within a tenth
            of the steps.
        stop_when_broken: True ends an example with its first adversarial image within epsilon;
            False searches on for the nearest one.
        **kwargs: see `Attack`.

    Example:
        >>> import he_keras as he, numpy as np, tensorflow as tf
        >>> attack = he.attacks.get("cw-l2-100", he.ThreatModel("l2", 0.5))
        >>> weights = tf.constant([[1.0, -1.0], [0.5, -0.5]])
        >>> images = np.array([[0.8, 0.7]], "float32")
        >>> result = attack(lambda images: (images - 0.6) @ weights, images, np.array([0]))
        >>> round(float(result.distance[0]), 2)  # (0.2 + 0.5 * 0.1) / |(1, 0.5)|
        0.22
    """

    norms = ("l2",)
    minimum_norm = True

    def __init__(
        self,
        threat: ThreatModel,
        num_steps: int = 300,
        binary_search_steps: int = 9,
        learning_rate: float = 0.01,
        initial_const: float = 1e-3,
        confidence: float = 0.0,
        abort_early: bool = False,
        stop_when_broken: bool = False,
        name: str = "cw-l2",
        **kwargs,
    ) -> None:
        super().__init__(threat, stop_when_broken=stop_when_broken, name=name, **kwargs)
        check_positive_integer("num_steps", num_steps)
        check_positive_integer("binary_search_steps", binary_search_steps)
        check_number("confidence", confidence, 0.0)
        check_flag("abort_early", abort_early)
        self.num_steps = int(num_steps)
        self.binary_search_steps = int(binary_search_steps)
        self.learning_rate = positive_number("learning_rate", learning_rate)
        self.initial_const = positive_number("initial_const", initial_const)
        self.confidence = float(confidence)
        self.abort_early = abort_early

    def run(self, victim: Victim, images, labels, seeds) -> Crafted:
        """Searches from the images themselves; nothing is drawn at random."""
        start = TanhSpace(self.threat).variable(images)
        rows = tf.shape(images)[:1]
        state = _State(
            variable=start,
            moments=zero_moments(start),
            steps_done=tf.zeros(rows, tf.int32),
            checked_loss=tf.fill(rows, tf.constant(math.inf, images.dtype)),
            search=start_search(images, self.initial_const),
            passes=tf.zeros(rows, tf.int32),
        )

        def step(_index, state, inputs):
            return self._step(victim, *inputs, state)

        is_active = self._is_active if self.stop_when_broken or self.abort_early else None
        num_steps = self.num_steps * self.binary_search_steps
        state = iterate(step, state, (images, labels, start), num_steps, is_active)
        search = state.search
        return Crafted(search.best, state.passes, state.passes, search.best_distance)

    def _is_active(self, state: _State):
        active = state.search.round_number < self.binary_search_steps
        if self.stop_when_broken:
            active &= state.search.best_distance > self.threat.epsilon
        return active

    def _step(self, victim, images, labels, start, state: _State) -> _State:
        space = TanhSpace(self.threat)
        x_adv = space.images(state.variable)
        logits, penalty, gradient = loss_and_gradient(
            victim, lambda logits: hinge(logits, labels, self.confidence), x_adv
        )
        search = record(
            state.search,
            is_adversarial(logits, labels, self.confidence),
            x_adv,
            self.threat.distance(x_adv, images),
        )
        # Measured from the image that the start stands for, so that the start itself costs nothing.
        perturbation = x_adv - space.images(start)
        slope = space.slope(state.variable)
        gradient = (2.0 * perturbation + mask_like(search.const, x_adv) * gradient) * slope
        steps_done = state.steps_done + 1
        ascent, moments = adam_step(
            gradient, state.moments, mask_like(steps_done, x_adv), self.learning_rate
        )
        state = state._replace(
            variable=state.variable - ascent,
            moments=moments,
            steps_done=steps_done,
            search=search,
            passes=state.passes + 1,
        )
        ended = steps_done == self.num_steps
        if self.abort_early:
            length = tf.norm(tf.reshape(perturbation, [tf.shape(images)[0], -1]), axis=1)
            objective = tf.square(length) + search.const * tf.cast(penalty, length.dtype)
            ended, state = self._check_progress(state, objective, ended)
        return tf.cond(
            tf.reduce_any(ended), lambda: self._next_round(state, ended, start), lambda: state
        )

    def _check_progress(self, state: _State, objective, ended):
        """Ends the rounds in which the objective stalls, each example by itself."""
        period = math.ceil(self.num_steps / _CHECKS_PER_ROUND)
        is_check = (state.steps_done - 1) % period == 0
        stalled = is_check & ~(objective <= _PROGRESS * state.checked_loss)
        checked_loss = tf.where(is_check, objective, state.checked_loss)
        return ended | stalled, state._replace(checked_loss=checked_loss)

    def _next_round(self, state: _State, ended, start) -> _State:
        fresh = state._replace(
            variable=start,
            moments=zero_moments(start),
            steps_done=tf.zeros_like(state.steps_done),
            checked_loss=tf.fill(tf.shape(ended), tf.constant(math.inf, start.dtype)),
        )
        search = end_round(state.search, ended, self.binary_search_steps)
        return select_rows(ended, fresh, state)._replace(search=search)

    def get_config(self) -> dict:
        """Returns the plain-data arguments of the constructor."""
        return {
            **super().get_config(),
            "num_steps": self.num_steps,
            "binary_search_steps": self.binary_search_steps,
            "learning_rate": self.learning_rate,
            "initial_const": self.initial_const,
            "confidence": self.confidence,
            "abort_early": self.abort_early,
        }
