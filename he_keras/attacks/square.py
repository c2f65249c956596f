"""Square attack: random search with square windows, from the logits alone, without gradients.

This file has the search and the windows of the linf ball, `square_l2` those of the l2 and l1 balls.
"""

import math
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from he_keras import losses
from he_keras.attacks.attack import Attack, is_wrong
from he_keras.attacks.checks import check_flag, check_number, check_positive_integer
from he_keras.attacks.registry import register
from he_keras.attacks.result import Crafted
from he_keras.attacks.square_l2 import MassWindows, random_signs, window_origin
from he_keras.attacks.survivors import iterate, select_rows
from he_keras.attacks.victim import Victim
from he_keras.threat import ThreatModel, draw_per_seed

LOSSES = ("cw", "ce")
#: The share of the image that a window covers is halved after each of these queries.
HALVINGS = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)
_RESCALED_QUERIES = 10_000


class Draws(NamedTuple):
    """The random numbers of a run, uniform in [0, 1), one row per example.

    Attributes:
        start: what the starting point needs.
        queries: `(n, num_queries, k)`, k numbers for each query.
    """

    start: Any
    queries: Any


class _State(NamedTuple):
    """Loop state; every entry has one row per example.

    The best images are flattened: choosing rows of a matrix takes TensorFlow a seventh of the time
    that choosing images takes.
    """

    x_best: Any
    loss: Any
    broken: Any
    forward_passes: Any


@register("square", budget="num_queries")
@keras.saving.register_keras_serializable(package="he_keras")
class Square(Attack):
    """Random search with square windows.

    Each query changes one window of the best image so far and keeps the change if the loss falls.
    The windows shrink with the query's number: the share `p` of the image that a window covers
    starts at `initial_fraction` and is halved after 10, 50, 200, 500, 1000, 2000, 4000, 6000 and
    8000 queries.

    Paper: Andriushchenko et al. 2020, "Square Attack: a query-efficient black-box adversarial
        attack via random search"; the settings are those of AutoAttack (Croce & Hein 2020).
    Assumes: nothing about the model beyond logits.
    Cost: one forward pass for the start and one for each query, no backward pass. The random
        numbers of all queries are drawn first and take 4 bytes times (2 + channels; l2 and l1: 5 +
        channels) for each query and example: 13 MB for 5000 queries on 128 RGB images.
    Deviations: AutoAttack draws one window (and, for linf, one set of signs) for all examples of a
        batch; here every example has its own, so that batching changes no result. An exact tie that
        `argmax` decides in favour of the label does not end an example. With
        `stop_when_broken=False` a misclassified point is only replaced by one that is misclassified
        too, and has a lower loss. In l2 and l1, its starting pattern needs a side that divides into
        five tiles without a rest of a whole tile, which excludes, for example, 12 and 14 pixels;
        here as many tiles are used as fit, which is the same wherever AutoAttack runs on square
        images. Kept: a window never starts in the last row or column that it could, so that windows
        of one pixel leave the last row and column alone.

    Args:
        threat: the threat model.
        num_queries: number of windows tried; the start is one more query.
        initial_fraction: share of the image that the first windows cover.
        loss: "cw" (margin) or "ce"; the attack raises it.
        rescale_schedule: shrink the windows as if there were 10000 queries, over the whole budget.
        **kwargs: see `Attack`.

    Example:
        >>> import he_keras as he, numpy as np, tensorflow as tf
        >>> attack = he.attacks.get("square-50", he.ThreatModel("linf", 0.1))
        >>> weights = tf.constant([[1.0, -1.0]] * 4)
        >>> logits = lambda images: tf.reshape(images, [-1, 4]) @ weights - [1.9, -1.9]
        >>> images = np.full((1, 2, 2, 1), 0.5, "float32")
        >>> result = attack(logits, images, np.array([0]))
        >>> bool(result.success[0]), round(float(result.distance[0]), 3)
        (True, 0.1)
    """

    uses_gradient = False

    def __init__(
        self,
        threat: ThreatModel,
        num_queries: int = 5000,
        initial_fraction: float = 0.8,
        loss: str = "cw",
        rescale_schedule: bool = False,
        name: str = "square",
        **kwargs,
    ) -> None:
        super().__init__(threat, name=name, **kwargs)
        check_positive_integer("num_queries", num_queries)
        check_number("initial_fraction", initial_fraction, 0.0)
        if not 0 < initial_fraction <= 1:
            raise ValueError(
                "Invalid initial_fraction; expected a share of the image, above 0 and at most 1; "
                f"received initial_fraction={initial_fraction!r}"
            )
        if loss not in LOSSES:
            raise ValueError(
                f"Unknown attack loss; expected one of {LOSSES}; received loss={loss!r}"
            )
        check_flag("rescale_schedule", rescale_schedule)
        self.num_queries = int(num_queries)
        self.initial_fraction = float(initial_fraction)
        self.loss = loss
        self.rescale_schedule = rescale_schedule

    def run(self, victim: Victim, images, labels, seeds) -> Crafted:
        """Runs the search on one batch."""
        return self.search(victim, images, labels, self._draw(images, seeds))

    def search(self, victim: Victim, images, labels, draws: Draws) -> Crafted:
        """Runs the search with given random numbers."""
        windows = self._windows(images)
        start = windows.start(images, draws.start)

        def step(index, state, inputs):
            return self._step(victim, windows, index, state, inputs)

        state = iterate(
            step,
            self._initial_state(victim, start, labels),
            (windows.constants(images), labels, draws.queries),
            self.num_queries,
            (lambda state: ~state.broken) if self.stop_when_broken else None,
        )
        x_adv = tf.reshape(state.x_best, tf.shape(images))
        return Crafted(x_adv, state.forward_passes, tf.zeros_like(state.forward_passes))

    def window_areas(self, height: int, width: int) -> np.ndarray:
        """Returns the number of pixels that a window should cover, for each query."""
        queries = np.arange(self.num_queries)
        if self.rescale_schedule:
            queries = (queries / self.num_queries * _RESCALED_QUERIES).astype(int)
        halved = np.sum(queries[:, np.newaxis] > np.array(HALVINGS), axis=1)
        return self.initial_fraction / 2.0**halved * height * width

    def _windows(self, images):
        if images.shape.rank != 4:
            raise ValueError(
                "The Square attack changes windows of images; expected images of shape "
                f"(n, height, width, channels); received shape {tuple(images.shape)}"
            )
        areas = self.window_areas(*images.shape[1:3])
        kind = _SignWindows if self.threat.norm == "linf" else MassWindows
        return kind(self.threat, images.shape[1:], areas)

    def _draw(self, images, seeds) -> Draws:
        windows = self._windows(images)
        examples = tf.shape(images)[0]

        def draw(stream, *shape):
            def sampler(shape, seed, dtype):
                return tf.random.stateless_uniform(
                    shape, tf.random.fold_in(seed, stream), 0, 1, dtype
                )

            return draw_per_seed(sampler, tf.zeros([examples, *shape]), seeds)

        # All at once: a generator for each example, run at every query, would cost more than the
        # model.
        queries = draw(1, self.num_queries, windows.numbers_per_query)
        return Draws(draw(0, *windows.start_shape), queries)

    def _initial_state(self, victim, start, labels) -> _State:
        logits = victim.logits(start)
        return _State(
            x_best=_flat(start),
            loss=-losses.ATTACK_LOSSES[self.loss](logits, labels),
            broken=is_wrong(logits, labels),
            forward_passes=tf.ones_like(labels, tf.int32),
        )

    def _step(self, victim, windows, index, state: _State, inputs) -> _State:
        constants, labels, draws = inputs
        x_best = tf.reshape(state.x_best, [-1, *windows.shape])
        candidate = windows.propose(index, x_best, constants, draws[:, index])
        logits = victim.logits(candidate)
        loss = -losses.ATTACK_LOSSES[self.loss](logits, labels)
        wrong = is_wrong(logits, labels)
        better = loss < state.loss
        # A cross-entropy can fall back while the decision turns: broken counts first.
        turned = wrong | (losses.margin(logits, labels) <= 0.0)
        accepted = tf.where(state.broken, better & wrong, better | turned)
        return _State(
            x_best=select_rows(accepted, _flat(candidate), state.x_best),
            loss=tf.where(accepted, loss, state.loss),
            broken=state.broken | wrong,
            forward_passes=state.forward_passes + 1,
        )

    def get_config(self) -> dict:
        """Returns the plain-data arguments of the constructor."""
        return {
            **super().get_config(),
            "num_queries": self.num_queries,
            "initial_fraction": self.initial_fraction,
            "loss": self.loss,
            "rescale_schedule": self.rescale_schedule,
        }


class _SignWindows:
    """Windows of the linf ball: each channel moves by +-2 epsilon, clipped to the ball.

    The start is `epsilon` times a random sign for each column and channel: vertical stripes. So
    every pixel begins, and stays, at one of its two extremes.
    """

    def __init__(self, threat: ThreatModel, shape, areas: np.ndarray) -> None:
        height, width, channels = shape
        self.threat = threat
        self.shape = shape
        self.height, self.width = height, width
        self.start_shape = (1, width, channels)
        self.numbers_per_query = 2 + channels
        # Python's rounding: halves to even.
        sides = [min(max(round(math.sqrt(area)), 1), height, width) for area in areas]
        self.sides = np.array(sides, np.int32)

    def start(self, images, draws):
        """Returns the starting points; `draws` is `(n, 1, width, channels)`."""
        stripes = random_signs(tf.cast(draws, images.dtype))
        return self.threat.clip_to_bounds(images + self.threat.epsilon * stripes)

    def constants(self, images):
        """Returns the smallest and the largest allowed value of each pixel."""
        radius = self.threat.epsilon
        clip = self.threat.clip_to_bounds
        return clip(images - radius), clip(images + radius)

    def propose(self, index, x_best, constants, draws):
        """Returns the candidates; `draws` has row, column and a sign per channel."""
        side = tf.gather(self.sides, index)
        rows = _in_window(draws[:, 0], self.height, side, x_best.dtype)
        columns = _in_window(draws[:, 1], self.width, side, x_best.dtype)
        signs = random_signs(tf.cast(draws[:, 2:], x_best.dtype))
        # Small factors first: only the last product is as large as the images.
        step = columns[:, :, tf.newaxis] * (2.0 * self.threat.epsilon * signs)[:, tf.newaxis]
        step = rows[:, :, tf.newaxis, tf.newaxis] * step[:, tf.newaxis]
        return tf.clip_by_value(x_best + step, *constants)


def _flat(images):
    return tf.reshape(images, [-1, math.prod(images.shape[1:])])


def _in_window(uniform, length: int, side, dtype):
    """Returns 1 for the rows (or columns) inside windows of `side`, else 0: `(n, length)`."""
    first = window_origin(uniform, length, side)[:, tf.newaxis]
    position = tf.range(length)
    return tf.cast((position >= first) & (position < first + side), dtype)
