"""ZOO: coordinate descent on the objective of Carlini & Wagner, with differences of queries."""

import functools
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from he_keras.arguments import check_choice, check_number, check_positive_integer, positive_number
from he_keras.attacks.carlini_wagner import (
    ConstantSearch,
    DirectSpace,
    TanhSpace,
    end_round,
    hinge,
    record,
    start_search,
)
from he_keras.attacks.framework.attack import Attack
from he_keras.attacks.framework.gradients import Moments, adam_step, zero_moments
from he_keras.attacks.framework.result import Crafted, Goal
from he_keras.attacks.framework.rows import iterate, map_groups
from he_keras.attacks.framework.victim import Victim
from he_keras.attacks.registry import register
from he_keras.balls import flat, map_seeds, seed_per_example
from he_keras.threat import ThreatModel

SPACES: dict[str, type[TanhSpace] | type[DirectSpace]] = {
    "tanh": TanhSpace,
    "direct": DirectSpace,
}


class _State(NamedTuple):
    """Loop state; every entry has one row per example, pixels in one axis."""

    variable: Any
    moments: Moments
    counts: Any
    search: ConstantSearch
    passes: Any


@register("zoo")
@keras.saving.register_keras_serializable(package="he_keras")
class ZOO(Attack):
    """Minimum-norm attack by coordinate-wise finite differences.

    Each step draws `coordinates_per_step` pixels without replacement. It takes the difference of
    the penalty between two queries for each pixel. Adam then moves each of these pixels. It keeps
    moments and a count of steps for each pixel. One more query, at the beginning of the next step,
    checks the new image. The nearest adversarial image found is returned.

    Precision: the penalty's differences at sigma = 1e-4 are of the order of 1e-5. The logits of a
    float32 network carry noise of 1e-6, and more in 16 bits. So nothing else is differenced: the
    gradient of the squared distance is known and added exactly, and margins are subtracted before
    they are scaled. The noise of the network itself remains. It shrinks with the logits, as at
    scale 1 of a cosine head. A larger sigma lowers it.

    Paper: Chen et al. 2017, "ZOO: zeroth order optimization based black-box attacks to deep neural
        networks without training substitute models". The HE paper reports it with 20,000 queries
        and sigma = 1e-4.
    Assumes: logits only, precise enough for their differences.
    Cost: `num_queries` forward passes at most, 20,000 by default. A step takes
        `2 * coordinates_per_step + 1`, so there are 77 steps, in which a pixel of a CIFAR image
        moves about three times. That makes it weak within such a budget. The HE paper finds so
        too: it is weaker than 50 steps of SPSA.
    Deviations: from the authors' code. The gradient of the distance is exact, as said. The penalty
        is on logits, not on log-probabilities. Its first weight is 10 instead of 0.5, at which few
        steps find nothing. There is no hierarchical space and no importance sampling. Adam's floor
        of 1e-8 is added to the corrected moment. In linf, too, the objective measures l2, but the
        image nearest in linf is kept.

    Args:
        threat: the threat model, of norm l2 or linf; epsilon only decides what is a success.
        num_queries: queries per example, over all rounds.
        coordinates_per_step: pixels that each step moves; 1 is the HE paper's reading, 128 the
            authors' choice.
        sigma: half of the difference between a pixel's two queries, in the units of the variable.
        learning_rate: Adam's, in the units of the variable.
        initial_const: weight of the penalty (in the first round).
        binary_search_steps: rounds of the search over that weight, which share the queries.
        confidence: how far another class must lead the true one.
        space: "tanh" for an unbounded variable, "direct" for the pixels as shares of their bounds.
        stop_when_broken: True ends an example with its first adversarial image within epsilon;
            False searches on for the nearest one.
        **kwargs: see `Attack`.

    Example:
        >>> import he_keras as he, numpy as np, tensorflow as tf
        >>> attack = he.attacks.get("zoo", he.ThreatModel("l2", 0.5), num_queries=1000)
        >>> weights = tf.constant([[1.0, -1.0], [0.5, -0.5]])
        >>> images = np.array([[0.8, 0.7]], "float32")
        >>> result = attack(lambda images: (images - 0.6) @ weights, images, np.array([0]))
        >>> bool(result.success[0])
        True
    """

    norms = ("l2", "linf")
    minimum_norm = True
    has_targeted_form = True
    uses_gradient = False

    def __init__(
        self,
        threat: ThreatModel,
        num_queries: int = 20_000,
        coordinates_per_step: int = 128,
        sigma: float = 1e-4,
        learning_rate: float = 0.01,
        initial_const: float = 10.0,
        binary_search_steps: int = 1,
        confidence: float = 0.0,
        space: str = "tanh",
        stop_when_broken: bool = False,
        name: str = "zoo",
        **kwargs,
    ) -> None:
        super().__init__(threat, stop_when_broken=stop_when_broken, name=name, **kwargs)
        check_positive_integer("num_queries", num_queries)
        check_positive_integer("coordinates_per_step", coordinates_per_step)
        check_positive_integer("binary_search_steps", binary_search_steps)
        needed = binary_search_steps * (2 * coordinates_per_step + 1)
        if num_queries < needed:
            raise ValueError(
                "Too few queries; expected at least one step, 2 * coordinates_per_step + 1, for "
                f"each of {binary_search_steps} rounds, {needed} in all; "
                f"received num_queries={num_queries}"
            )
        check_number("confidence", confidence, 0.0)
        check_choice("space", space, tuple(SPACES))
        self.num_queries = int(num_queries)
        self.coordinates_per_step = int(coordinates_per_step)
        self.sigma = positive_number("sigma", sigma)
        self.learning_rate = positive_number("learning_rate", learning_rate)
        self.initial_const = positive_number("initial_const", initial_const)
        self.binary_search_steps = int(binary_search_steps)
        self.confidence = float(confidence)
        self.space = space

    def passes_of_run(self, num_classes: int) -> int:
        """Returns the passes of one run of an image that holds to the end, see `Attack`."""
        return self.num_queries + 1

    def run(self, victim: Victim, images, labels, seeds, targets=None) -> Crafted:
        """Runs all rounds on one batch."""
        start = flat(SPACES[self.space](self.threat).variable(images))
        rows = tf.shape(images)[:1]
        state = _State(
            variable=start,
            moments=zero_moments(start),
            counts=tf.zeros_like(start),
            search=start_search(images, self.initial_const),
            passes=tf.zeros(rows, tf.int32),
        )
        steps_per_round = self.num_steps(start.shape[1]) // self.binary_search_steps

        def step(index, state, inputs):
            state = self._step(victim, index, *inputs, state)
            ends_round = (index + 1) % steps_per_round == 0
            return tf.cond(ends_round, lambda: self._next_round(state, inputs[-1]), lambda: state)

        goal = Goal.of(labels, targets)
        inputs = images, goal, seed_per_example(seeds, images), start
        is_active = self._is_active if self.stop_when_broken else None
        num_steps = steps_per_round * self.binary_search_steps
        state = iterate(step, state, inputs, num_steps, is_active)
        passes = tf.zeros_like(state.passes)
        best = state.search.best
        return Crafted(best.point, state.passes, passes, best.distance)

    def num_steps(self, num_pixels: int) -> int:
        """Returns how many steps the queries suffice for."""
        return self.num_queries // (2 * min(self.coordinates_per_step, num_pixels) + 1)

    def _is_active(self, state: _State):
        return state.search.best.distance > self.threat.epsilon

    def _step(self, victim, index, images, goal, seeds, start, state: _State) -> _State:
        x_adv = self._images(state.variable, images)
        logits = victim.logits(x_adv)
        search = record(
            state.search,
            goal.is_reached(logits, self.confidence),
            x_adv,
            self.threat.distance(x_adv, images),
        )
        coordinates = self.draw(index, seeds, start.shape[1])
        gradient = self.partial_derivatives(
            victim, images, goal, start, state.variable, search.const, coordinates
        )
        state = self._move(state, coordinates, gradient)
        queries = 2 * coordinates.shape[1] + 1
        return state._replace(search=search, passes=state.passes + queries)

    def draw(self, index, seeds, num_pixels: int):
        """Draws pixels `(n, coordinates_per_step)` without replacement, for each example alone."""
        count = min(self.coordinates_per_step, num_pixels)

        def draw_one(seed):
            seed = tf.random.fold_in(seed, index)
            if count == 1:
                return tf.random.stateless_uniform([1], seed, 0, num_pixels, tf.int32)
            return tf.math.top_k(tf.random.stateless_uniform([num_pixels], seed), count).indices

        return map_seeds(draw_one, seeds, [count], tf.int32)

    def partial_derivatives(self, victim, images, goal, start, variable, const, coordinates):
        """Returns the objective's derivatives with respect to the chosen entries of the variable.

        The penalty's are differences of queries; those of the squared distance are exact.
        """
        function = functools.partial(self._difference, victim, images.shape[1:])
        chosen = tf.gather(variable, coordinates, batch_dims=1)
        inputs = flat(self._images(variable, images)), chosen, coordinates, goal
        difference = map_groups(function, inputs, images_per_row=2 * coordinates.shape[1])
        penalty_slope = difference / (2.0 * self.sigma)
        space = SPACES[self.space](self.threat)
        chosen_start = tf.gather(start, coordinates, batch_dims=1)
        perturbation = space.images(chosen) - space.images(chosen_start)
        distance_gradient = 2.0 * perturbation / self.threat.width**2
        return distance_gradient * space.slope(chosen) + const[:, tf.newaxis] * penalty_slope

    def _difference(self, victim, image_shape, x_adv, chosen, coordinates, goal):
        """Returns `penalty(v + sigma e) - penalty(v - sigma e)`; 0 where that is not finite."""
        space = SPACES[self.space](self.threat)
        pixels = tf.concat(
            [space.images(chosen + self.sigma), space.images(chosen - self.sigma)], axis=1
        )
        count = pixels.shape[1]
        queries = tf.repeat(x_adv, count, axis=0)
        columns = tf.reshape(tf.tile(coordinates, [1, 2]), [-1])
        where = tf.stack([tf.range(tf.size(columns)), columns], axis=1)
        queries = tf.tensor_scatter_nd_update(queries, where, tf.reshape(pixels, [-1]))
        logits = victim.logits(tf.reshape(queries, [-1, *image_shape]))
        penalty = hinge(logits, goal.repeated(count), self.confidence)
        upper, lower = tf.split(tf.reshape(penalty, [-1, count]), 2, axis=1)
        difference = tf.cast(upper - lower, x_adv.dtype)
        return tf.where(tf.math.is_finite(difference), difference, tf.zeros_like(difference))

    def _move(self, state: _State, coordinates, gradient) -> _State:
        """Moves the chosen entries by one step of their own Adam."""
        rows = tf.range(tf.shape(coordinates)[0])[:, tf.newaxis]
        where = tf.stack([tf.broadcast_to(rows, tf.shape(coordinates)), coordinates], axis=2)
        tensors = state.variable, state.moments, state.counts
        chosen = tf.nest.map_structure(lambda each: tf.gather_nd(each, where), tensors)
        variable, moments, counts = chosen
        counts += 1.0
        ascent, moments = adam_step(gradient, moments, counts, self.learning_rate)
        moved = variable - ascent
        if self.space == "direct":
            moved = tf.clip_by_value(moved, 0.0, 1.0)
        variable, moments, counts = tf.nest.map_structure(
            lambda old, new: tf.tensor_scatter_nd_update(old, where, new),
            tensors,
            (moved, moments, counts),
        )
        return state._replace(variable=variable, moments=moments, counts=counts)

    def _next_round(self, state: _State, start) -> _State:
        every = tf.ones_like(state.search.found)
        return state._replace(
            variable=start,
            moments=zero_moments(start),
            counts=tf.zeros_like(start),
            search=end_round(state.search, every, self.binary_search_steps),
        )

    def _images(self, variable, images):
        return tf.reshape(SPACES[self.space](self.threat).images(variable), tf.shape(images))
