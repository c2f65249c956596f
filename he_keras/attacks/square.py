"""Square attack: random search with square windows, from the logits alone, without gradients.

The file reads from top to bottom: the search, the windows of the linf ball, and those of the l2
and l1 balls.
"""

import math
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from he_keras.arguments import (
    check_choice,
    check_flag,
    check_positive_integer,
    check_share,
    positive_number,
)
from he_keras.attacks.framework.attack import Attack
from he_keras.attacks.framework.result import Crafted, Goal
from he_keras.attacks.framework.rows import iterate, select_rows
from he_keras.attacks.framework.victim import Victim
from he_keras.attacks.registry import register
from he_keras.balls import draw_per_seed, flat, uniform
from he_keras.threat import ThreatModel

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
    The windows shrink with the query's number. The share `p` of the image that a window covers
    starts at `initial_fraction`. It is halved after 10, 50, 200, 500, 1000, 2000, 4000, 6000 and
    8000 queries.

    Paper: Andriushchenko et al. 2020, "Square Attack: a query-efficient black-box adversarial
        attack via random search". The settings are those of AutoAttack (Croce & Hein 2020).
    Assumes: nothing about the model beyond logits.
    Cost: one forward pass for the start and one for each query, no backward pass. The random
        numbers of all queries are drawn first. They take 4 bytes times 2 + channels (l2 and l1: 5 +
        channels) for each query and example. For 5000 queries on 128 RGB images that is 13 MB.
    Deviations: AutoAttack draws one window (and, for linf, one set of signs) for all examples of a
        batch. Here every example has its own, so that batching changes no result. An exact tie that
        `argmax` decides in favour of the label does not end an example. With
        `stop_when_broken=False` a misclassified point is only replaced by one that is misclassified
        too, and has a lower loss. In l2 and l1, AutoAttack's starting pattern needs a side that
        divides into five tiles without a rest of a whole tile. That excludes 12 and 14 pixels, for
        example. Here as many tiles are used as fit. Wherever AutoAttack runs on square images, that
        is the same. As there, a window never starts in the last row or column that it could. So
        windows of one pixel leave the last row and column alone.

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

    has_targeted_form = True
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
        check_share("initial_fraction", initial_fraction)
        check_choice("loss", loss, LOSSES)
        check_flag("rescale_schedule", rescale_schedule)
        self.num_queries = int(num_queries)
        self.initial_fraction = positive_number("initial_fraction", initial_fraction)
        self.loss = loss
        self.rescale_schedule = rescale_schedule
        # The windows of the other norms are cut out.
        self.runs_under_xla = threat.norm == "linf"

    def passes_of_run(self, num_classes: int) -> int:
        """Returns the passes of one run of an image that holds to the end, see `Attack`."""
        return self.num_queries + 1

    def run(self, victim: Victim, images, labels, seeds, targets=None) -> Crafted:
        """Runs the search on one batch."""
        return self.search(victim, images, labels, self._draw(images, seeds), targets)

    def search(self, victim: Victim, images, labels, draws: Draws, targets=None) -> Crafted:
        """Runs the search with given random numbers."""
        goal = Goal.of(labels, targets)
        windows = self._windows(images)
        start = windows.start(images, draws.start)

        def step(index, state, inputs):
            return self._step(victim, windows, index, state, inputs)

        state = iterate(
            step,
            self._initial_state(victim, start, goal),
            (windows.constants(images), goal, draws.queries),
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

        def draw(stream, *shape):
            def sampler(shape, seed, dtype):
                return uniform(shape, tf.random.fold_in(seed, stream), dtype)

            return draw_per_seed(sampler, tf.zeros([tf.shape(images)[0], *shape]), seeds)

        # All at once: a generator for each example and query would cost more than the model.
        queries = draw(1, self.num_queries, windows.numbers_per_query)
        return Draws(draw(0, *windows.start_shape), queries)

    def _initial_state(self, victim, start, goal: Goal) -> _State:
        logits = victim.logits(start)
        return _State(
            x_best=flat(start),
            loss=-goal.loss(self.loss, logits),
            broken=goal.is_reached(logits),
            forward_passes=tf.ones_like(goal.labels, tf.int32),
        )

    def _step(self, victim, windows, index, state: _State, inputs) -> _State:
        constants, goal, draws = inputs
        x_best = tf.reshape(state.x_best, [-1, *windows.shape])
        candidate = windows.propose(index, x_best, constants, draws[:, index])
        logits = victim.logits(candidate)
        loss = -goal.loss(self.loss, logits)
        wrong = goal.is_reached(logits)
        better = loss < state.loss
        # The loss may get worse while the prediction becomes wrong: misclassified counts first.
        turned = wrong | (goal.margin(logits) <= 0.0)
        accepted = tf.where(state.broken, better & wrong, better | turned)
        return _State(
            x_best=select_rows(accepted, flat(candidate), state.x_best),
            loss=tf.where(accepted, loss, state.loss),
            broken=state.broken | wrong,
            forward_passes=state.forward_passes + 1,
        )


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


def _in_window(uniform, length: int, side, dtype):
    """Returns 1 for the rows (or columns) inside windows of `side`, else 0: `(n, length)`."""
    first = window_origin(uniform, length, side)[:, tf.newaxis]
    position = tf.range(length)
    return tf.cast((position >= first) & (position < first + side), dtype)


#: AutoAttack's: tiles along a side of the starting pattern, shortest side of a window in l2 and l1,
#: and what keeps a division by a length of zero finite.
_TILES = 5
_SMALLEST_SIDE = 3
_FLOOR = 1e-12
# A perturbation that ends just inside the ball stays inside after rounding.
_L1_MARGIN = 1e-6


class _Window(NamedTuple):
    """Windows of one size, one per example: numbers of their rows and columns, each `(n, side)`."""

    rows: tf.Tensor
    columns: tf.Tensor


class MassWindows:
    """Windows that move mass of the perturbation, for one image shape.

    Args:
        threat: an l2 or l1 threat model.
        shape: height, width and channels of the images.
        areas: number of pixels that the window should cover, for each query.
    """

    def __init__(self, threat: ThreatModel, shape, areas: np.ndarray) -> None:
        self.threat = threat
        self.shape = shape
        self.height, self.width, self.channels = shape
        self.order = 2 if threat.norm == "l2" else 1
        radius = threat.epsilon * (1.0 - _L1_MARGIN)
        self.inner_ball = ThreatModel(threat.norm, radius, threat.bounds)
        self.tile = max(min(self.height, self.width) // _TILES, 1)
        self.grid = self.height // self.tile, self.width // self.tile
        # A bit that transposes the pattern, and a sign per channel.
        self.start_shape = (*self.grid, 1 + self.channels)
        # For a query: places of two windows (four numbers), a bit and the signs, as above.
        self.numbers_per_query = 4 + 1 + self.channels
        self.sides = np.array([self._side(area) for area in areas], np.int32)
        sizes, self._size_of_query = np.unique(self.sides, return_inverse=True)
        patterns = [pattern(int(side), self.order).ravel() for side in sizes]
        self._patterns = np.concatenate(patterns)
        self._offsets = np.concatenate([[0], np.cumsum(sizes**2)]).astype(np.int32)

    def start(self, images, draws):
        """Returns the starting points; `draws` is `(n, tiles down, tiles across, 1 + channels)`."""
        draws = tf.cast(draws, images.dtype)
        signs = random_signs(draws[..., tf.newaxis, tf.newaxis, 1:])
        tile = tf.constant(pattern(self.tile, self.order), images.dtype)
        is_transposed = (draws[..., 0] > 0.5)[..., tf.newaxis, tf.newaxis]
        tiles = tf.where(is_transposed, tf.transpose(tile), tile)[..., tf.newaxis] * signs
        down, across = (count * self.tile for count in self.grid)
        tiles = tf.transpose(tiles, [0, 1, 3, 2, 4, 5])
        covered = tf.reshape(tiles, [-1, down, across, self.channels])
        above, before = (self.height - down) // 2, (self.width - across) // 2
        below, after = self.height - down - above, self.width - across - before
        perturbation = tf.pad(covered, [[0, 0], [above, below], [before, after], [0, 0]])
        return self._at_full_length(images, perturbation)

    def constants(self, images):
        """Returns what `propose` needs of the images: themselves."""
        return images

    def propose(self, index, x_best, images, draws):
        """Returns the candidates; `draws`: both windows, transposition, a sign per channel."""
        side = tf.gather(self.sides, index)
        target, source = self._window(draws[:, 0:2], side), self._window(draws[:, 2:4], side)
        perturbation = x_best - images
        old = _read(perturbation, target)
        taken = _read(perturbation, source) * _outside(source, target, images.dtype)
        mass = self._power(old, [1, 2]) + self._power(taken, [1, 2])
        moved = self._pattern(index, side, draws[:, 4:], images.dtype)
        moved += old / (_FLOOR + self._root(self._power(old, [1, 2])))
        unused = self.threat.epsilon**self.order - self._power(perturbation, [1, 2, 3])
        mass += tf.maximum(unused, 0.0) / self.channels
        length = tf.sqrt(mass) if self.order == 2 else mass * self.channels
        moved *= length / (_FLOOR + self._root(self._power(moved, [1, 2])))
        perturbation = _write(perturbation, source, tf.zeros_like(taken))
        perturbation = _write(perturbation, target, moved)
        if self.order == 2:
            return self._at_full_length(images, perturbation)
        # Rows of a matrix reduce faster than images do.
        pixels = flat(images)
        inside = self.inner_ball.project(pixels + flat(perturbation), pixels)
        return tf.reshape(inside, tf.shape(images))

    def _at_full_length(self, images, perturbation):
        length = self._root(self._power(perturbation, [1, 2, 3]))
        perturbation *= self.threat.epsilon / (length + _FLOOR)
        return self.threat.clip_to_bounds(images + perturbation)

    def _power(self, tensor, axes):
        """Sum of squares, or of absolute values in the l1 norm, with kept axes."""
        each = tf.square(tensor) if self.order == 2 else tf.abs(tensor)
        return tf.reduce_sum(each, axis=axes, keepdims=True)

    def _root(self, power):
        return tf.sqrt(power) if self.order == 2 else power

    def _side(self, area: float) -> int:
        side = max(round(math.sqrt(area)), _SMALLEST_SIDE)
        return min(side + (side + 1) % 2, self.height, self.width)

    def _window(self, draws, side) -> _Window:
        return _Window(
            window_origin(draws[:, 0], self.height, side)[:, tf.newaxis] + tf.range(side),
            window_origin(draws[:, 1], self.width, side)[:, tf.newaxis] + tf.range(side),
        )

    def _pattern(self, index, side, draws, dtype):
        """The pattern of the query's size, transposed for half of the examples, signed."""
        offset = tf.gather(self._offsets, tf.gather(self._size_of_query, index))
        flat = tf.constant(self._patterns)[offset : offset + side * side]
        drawn = tf.cast(tf.reshape(flat, [side, side]), dtype)
        is_transposed = draws[:, 0, tf.newaxis, tf.newaxis] > 0.5
        drawn = tf.where(is_transposed, tf.transpose(drawn), drawn)
        signs = random_signs(tf.cast(draws[:, 1:], dtype))
        return drawn[..., tf.newaxis] * signs[:, tf.newaxis, tf.newaxis]


def pattern(side: int, order: int) -> np.ndarray:
    """Two bumps of opposite sign, one above the other, of unit length in the norm of `order`.

    Example:
        >>> from he_keras.attacks.square import pattern
        >>> pattern(2, order=1).round(3)
        array([[ 0.028,  0.472],
               [-0.028, -0.472]])
    """
    upper = side // 2
    drawn = -_bump(side - upper, side, order)
    if upper:
        drawn = np.concatenate([_bump(upper, side, order), drawn])
    return drawn / np.linalg.norm(drawn.ravel(), order)


def _bump(height: int, width: int, order: int) -> np.ndarray:
    """A rectangle that falls off from the middle in square rings, of unit length."""
    middle_row, middle_column = height // 2, width // 2
    rings = np.maximum(
        np.abs(np.arange(height) - middle_row)[:, np.newaxis],
        np.abs(np.arange(width) - middle_column),
    )
    # Square number j, around the middle, adds 1 / (j + 1)**exponent to all that it covers.
    exponent = 2 if order == 2 else 4
    count = max(middle_row, middle_column) + 1
    weights = 1.0 / np.arange(1, count + 1) ** exponent
    falling = np.cumsum(weights[::-1])[::-1][rings]
    return falling / np.linalg.norm(falling.ravel(), order)


def random_signs(uniform):
    """Returns -1 or 1, each for one half of the numbers in [0, 1)."""
    return tf.where(uniform < 0.5, -tf.ones_like(uniform), tf.ones_like(uniform))


def window_origin(uniform, length, side):
    """Returns the first row (or column) of windows of `side` among `length`."""
    return tf.cast(uniform * tf.cast(length - side, uniform.dtype), tf.int32)


def _outside(window: _Window, other: _Window, dtype):
    """1 for the pixels of `window` that do not belong to `other`, else 0: `(n, side, side, 1)`."""
    shared_rows, shared_columns = (
        (mine >= others[:, :1]) & (mine <= others[:, -1:])
        for mine, others in zip(window, other, strict=True)
    )
    shared = shared_rows[:, :, tf.newaxis] & shared_columns[:, tf.newaxis]
    return tf.cast(~shared, dtype)[..., tf.newaxis]


def _indices(window: _Window):
    """Index of every pixel of the windows, `(n, side, side, 3)`."""
    side = tf.shape(window.rows)[1]
    examples = tf.range(tf.shape(window.rows)[0])[:, tf.newaxis, tf.newaxis]
    shape = [tf.shape(window.rows)[0], side, side]
    parts = (examples, window.rows[:, :, tf.newaxis], window.columns[:, tf.newaxis])
    return tf.stack([tf.broadcast_to(part, shape) for part in parts], axis=-1)


def _read(images, window: _Window):
    return tf.gather_nd(images, _indices(window))


def _write(images, window: _Window, pixels):
    return tf.tensor_scatter_nd_update(images, _indices(window), pixels)
