"""The l2 attack of Carlini & Wagner: the nearest adversarial image, by a penalty and Adam.

Below the attack stand its objective, its variable and its search for a constant. ZOO uses them too.
"""

import math
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from he_keras.arguments import check_flag, check_number, check_positive_integer, positive_number
from he_keras.attacks.framework.attack import Attack
from he_keras.attacks.framework.gradients import Moments, adam_step, loss_and_gradient, zero_moments
from he_keras.attacks.framework.result import Best, Crafted, Goal
from he_keras.attacks.framework.rows import iterate, mask_like, select_rows
from he_keras.attacks.framework.victim import Victim
from he_keras.attacks.registry import register
from he_keras.threat import ThreatModel

#: As in the authors' code: a round ends early if a tenth of it has not gained 0.01 %.
_CHECKS_PER_ROUND = 10
_PROGRESS = 0.9999


class _State(NamedTuple):
    """Loop state; every entry has one row per example."""

    variable: Any
    moments: Moments
    steps_done: Any
    checked_loss: Any
    search: "ConstantSearch"
    passes: Any


@register("cw-l2", budget="num_steps")
@keras.saving.register_keras_serializable(package="he_keras")
class CarliniWagnerL2(Attack):
    """Minimum-norm attack in l2, by a penalty and Adam.

    For each example, Adam minimises `|x' - x|^2 + const * max(margin + confidence, 0)` over
    `x' = centre + half_width * tanh(variable)`. There are `binary_search_steps` rounds. Each begins
    at the image itself, with a fresh Adam and another constant. The constant is ten times the last
    one until a round finds an adversarial image. After that it is found by bisection. The nearest
    adversarial image of all rounds is returned.

    Paper: Carlini & Wagner 2017, "Towards evaluating the robustness of neural networks".
    Assumes: logits with a useful gradient in the images.
    Cost: `num_steps * binary_search_steps` forward and backward passes, 2,700 by default; a round's
        last step is not evaluated. On the two small networks of the tests, the mean distance is 2
        to 3 % larger with 100 steps. With 1,000 it is half a percent smaller. `abort_early` saves
        two thirds of the passes for 0.3 % of the mean distance, but single examples lose much more.
    Deviations: from the authors' code. A round has 300 steps by default, and all of them are run.
        Theirs allows 10,000 and aborts early. With `abort_early`, an example begins its next round
        when its own objective stalls. Theirs looks at the sum over the batch, so that examples
        influence each other.

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
    has_targeted_form = True

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

    def passes_of_run(self, num_classes: int) -> int:
        """Returns the passes of one run of an image that holds to the end, see `Attack`."""
        return 2 * self.num_steps * self.binary_search_steps + 1

    def run(self, victim: Victim, images, labels, seeds, targets=None) -> Crafted:
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
        inputs = images, Goal.of(labels, targets), start
        state = iterate(step, state, inputs, num_steps, is_active)
        search = state.search
        return Crafted(search.best.point, state.passes, state.passes, search.best.distance)

    def _is_active(self, state: _State):
        active = state.search.round_number < self.binary_search_steps
        if self.stop_when_broken:
            active &= state.search.best.distance > self.threat.epsilon
        return active

    def _step(self, victim, images, goal, start, state: _State) -> _State:
        space = TanhSpace(self.threat)
        x_adv = space.images(state.variable)
        logits, penalty, gradient = loss_and_gradient(
            victim, lambda logits: hinge(logits, goal, self.confidence), x_adv
        )
        search = record(
            state.search,
            goal.is_reached(logits, self.confidence),
            x_adv,
            self.threat.distance(x_adv, images),
        )
        # Measured from the image that the start stands for, so that the start itself costs nothing.
        perturbation = x_adv - space.images(start)
        slope = space.slope(state.variable)
        distance_gradient = 2.0 * perturbation / self.threat.width**2
        gradient = (distance_gradient + mask_like(search.const, x_adv) * gradient) * slope
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
            shares = tf.reshape(perturbation / self.threat.width, [tf.shape(images)[0], -1])
            length = tf.norm(shares, axis=1)
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


#: Rounds from which the last one repeats the best constant instead of trying a new one.
ROUNDS_WITH_REPEAT = 10
#: As in the authors' code: keeps the variable of a pixel at the bounds finite.
_SHRINK = 0.999999
#: As in the authors' code: no larger constant is tried.
_LARGEST_CONST = 1e10


class TanhSpace:
    """Images as `centre + half_width * tanh(variable)`: whatever the variable, within bounds."""

    def __init__(self, threat: ThreatModel) -> None:
        low, high = threat.bounds
        self.threat = threat
        self.centre = (high + low) / 2.0
        self.half_width = (high - low) / 2.0

    def variable(self, images):
        """Returns the variable of images; pixels at the bounds move inward by half a millionth."""
        return tf.atanh(_SHRINK * (images - self.centre) / self.half_width)

    def images(self, variable):
        """Returns the images of a variable."""
        # Rounding could take the sum beyond the bounds.
        return self.threat.clip_to_bounds(self.centre + self.half_width * tf.tanh(variable))

    def slope(self, variable):
        """Returns the derivative of each pixel with respect to its variable."""
        return self.half_width * (1.0 - tf.square(tf.tanh(variable)))


class DirectSpace:
    """Images in [0, 1] as their own variable, clipped."""

    def __init__(self, threat: ThreatModel) -> None:
        self.threat = threat

    def variable(self, images):
        """Returns the images in [0, 1]."""
        return self.threat.to_unit(images)

    def images(self, variable):
        """Returns the images of a variable, clipped to the bounds."""
        return self.threat.clip_to_bounds(self.threat.from_unit(variable))

    def slope(self, variable):
        """Returns the width of the bounds."""
        return self.threat.width * tf.ones_like(variable)


def hinge(logits, goal: Goal, confidence: float):
    """`max(margin + confidence, 0)`: how far the goal, with that confidence, still is."""
    return tf.nn.relu(goal.margin(logits) + confidence)


class ConstantSearch(NamedTuple):
    """State of the search, one row per example.

    Attributes:
        const: constant of the current round.
        lower: largest constant that failed.
        upper: smallest constant that succeeded; infinite before the first success.
        round_number: counts from 0.
        found: an adversarial image was seen in this round.
        best: nearest adversarial image so far; the image itself before the first.
    """

    const: Any
    lower: Any
    upper: Any
    round_number: Any
    found: Any
    best: Best


def start_search(images, initial_const: float) -> ConstantSearch:
    """Returns the state before the first round."""
    rows = tf.shape(images)[:1]
    infinite = tf.fill(rows, tf.constant(np.inf, images.dtype))
    return ConstantSearch(
        const=tf.fill(rows, tf.constant(initial_const, images.dtype)),
        lower=tf.zeros(rows, images.dtype),
        upper=infinite,
        round_number=tf.zeros(rows, tf.int32),
        found=tf.zeros(rows, tf.bool),
        best=Best.before(images, images),
    )


def record(search: ConstantSearch, adversarial, x_adv, distance) -> ConstantSearch:
    """Notes which of the current points are adversarial, and those nearer than any before."""
    best = search.best.updated(x_adv, -distance, adversarial, only_broken=True)
    return search._replace(found=search.found | adversarial, best=best)


def end_round(search: ConstantSearch, ended, num_rounds: int) -> ConstantSearch:
    """Chooses the next constant of the examples whose round has `ended`."""
    lower = tf.where(search.found, search.lower, search.const)
    upper = tf.where(search.found, search.const, search.upper)
    tenfold = tf.minimum(10.0 * search.const, _LARGEST_CONST)
    const = tf.where(tf.math.is_inf(upper), tenfold, 0.5 * (lower + upper))
    round_number = search.round_number + 1
    if num_rounds >= ROUNDS_WITH_REPEAT:
        is_last = round_number == num_rounds - 1
        const = tf.where(is_last, tf.minimum(upper, _LARGEST_CONST), const)
    return search._replace(
        const=tf.where(ended, const, search.const),
        lower=tf.where(ended, lower, search.lower),
        upper=tf.where(ended, upper, search.upper),
        round_number=tf.where(ended, round_number, search.round_number),
        found=search.found & ~ended,
    )
