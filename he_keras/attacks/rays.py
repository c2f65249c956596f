"""RayS: searches the direction in which the decision boundary is nearest, from labels alone."""

import math
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from he_keras.arguments import check_positive_integer
from he_keras.attacks.framework.attack import Attack
from he_keras.attacks.framework.result import Crafted, is_wrong
from he_keras.attacks.framework.rows import iterate, select_rows
from he_keras.attacks.framework.victim import Victim
from he_keras.attacks.registry import register
from he_keras.balls import flat
from he_keras.threat import ThreatModel

#: Width at which a bisection ends, in l2 length, for bounds of width 1.
TOLERANCE = 1e-3


class RaysState(NamedTuple):
    """Where every example is in its search; each entry has one row per example.

    Attributes:
        signs: the best direction so far, `(n, pixels)`.
        length: l2 length along it to the boundary; infinity until one was found.
        low: bisection: the longest length seen to be classified correctly.
        high: bisection: the shortest length seen to be misclassified.
        high_is_within: the point at `high` lies within epsilon.
        is_bisecting: False while a new direction is tested at `length`.
        level: blocks are a 2**level-th part of the image.
        block: number of the block whose signs are flipped.
        queries: queries spent.
        is_done: the best point lies within epsilon, and the attack may stop there.
    """

    signs: Any
    length: Any
    low: Any
    high: Any
    high_is_within: Any
    is_bisecting: Any
    level: Any
    block: Any
    queries: Any
    is_done: Any


@register("rays", budget="num_queries")
@keras.saving.register_keras_serializable(package="he_keras")
class RayS(Attack):
    """Nearest adversarial image along a direction of signs, from labels alone.

    A direction is a sign for every pixel. Starting from all +1, the attack flips the signs of one
    block of pixels at a time: the whole image, then its halves, quarters and so on. Blocks are
    contiguous in channel-first order. One query tells whether the flipped direction reaches the
    boundary before the best one so far does. If so, a bisection finds its distance and the flip is
    kept. The search is deterministic.

    The mean of `AttackResult.distance` over a test set is the average decision boundary distance
    (ADBD) of the paper. With `stop_when_broken=True` an example ends after the first direction that
    leads to a point within epsilon: its `forward_passes`, less the 2 of the framework, are the
    paper's number of queries until success.

    Paper: Chen & Gu 2020, "RayS: a ray searching method for hard-label adversarial attack".
    Assumes: nothing about the model beyond the predicted label.
    Cost: one forward pass per query, no backward pass. `num_queries` is checked only before a block
        is tried, as in the released code: the bisection of the last block may take about 16 more.
    Deviations: in the released code a batch waits until the bisection of its last example has
        ended. Here every example is at its own place of the search, and every pass through the
        network serves all of them. The result is the same. Lengths are scaled by the width of the
        pixel bounds, which is 1 there.

    Args:
        threat: an linf or l2 threat model; its norm measures the distance, the directions are the
            same for both.
        num_queries: no new direction is tried after so many queries.
        **kwargs: see `Attack`; `stop_when_broken` is False unless set.

    Example:
        >>> import he_keras as he, numpy as np, tensorflow as tf
        >>> attack = he.attacks.get("rays-200", he.ThreatModel("linf", 0.1))
        >>> logits = lambda images: tf.stack([images[:, 0] - images[:, 1], images[:, 2]], axis=1)
        >>> images = np.array([[0.9, 0.3, 0.3]], "float32")
        >>> result = attack(logits, images, np.array([0]))
        >>> round(float(result.distance.mean()), 2)
        0.1
    """

    norms = ("linf", "l2")
    minimum_norm = True
    uses_gradient = False

    def __init__(
        self,
        threat: ThreatModel,
        num_queries: int = 10_000,
        stop_when_broken: bool = False,
        name: str = "rays",
        **kwargs,
    ) -> None:
        super().__init__(threat, name=name, stop_when_broken=stop_when_broken, **kwargs)
        check_positive_integer("num_queries", num_queries)
        self.num_queries = int(num_queries)

    def passes_of_run(self, num_classes: int) -> int:
        """Returns the passes of one run of an image that holds to the end, see `Attack`."""
        return self.num_queries + 1

    def run(self, victim: Victim, images, labels, seeds) -> Crafted:
        """Runs the search on one batch; `seeds` is not used."""
        del seeds
        state = self.search(victim, images, labels)
        x_adv = self._points(flat(images), state.signs, state.length)
        x_adv = tf.reshape(x_adv, tf.shape(images))
        was_found = tf.math.is_finite(state.length)
        distance = self.threat.distance(x_adv, images)
        return Crafted(
            x_adv=select_rows(was_found, x_adv, images),
            forward_passes=state.queries,
            backward_passes=tf.zeros_like(state.queries),
            distance=tf.where(was_found, distance, np.inf),
        )

    def search(self, victim: Victim, images, labels) -> RaysState:
        """Returns the end of the search; `signs` are in the order of the images' pixels."""
        blocks = _Blocks(images.shape[1:])
        longest = self._width() * math.sqrt(blocks.num_pixels)

        def step(_index, state, inputs):
            pixels, labels = inputs
            return self._step(victim, images.shape[1:], blocks, state, pixels, labels)

        return iterate(
            step,
            self._initial_state(images, blocks),
            (flat(images), labels),
            self.num_queries + math.ceil(math.log2(longest / self._tolerance())) + 2,
            lambda state: (
                ~state.is_done & (state.is_bisecting | (state.queries < self.num_queries))
            ),
        )

    def _initial_state(self, images, blocks: "_Blocks") -> RaysState:
        pixels = flat(images)
        no = tf.zeros(tf.shape(images)[:1], tf.bool)
        zero = tf.zeros_like(no, tf.int32)
        no_length = tf.zeros_like(no, images.dtype)
        return RaysState(
            signs=tf.ones_like(pixels),
            length=no_length + np.inf,
            low=no_length,
            high=no_length,
            high_is_within=no,
            is_bisecting=no,
            level=zero,
            block=zero,
            queries=zero,
            is_done=no,
        )

    def _step(self, victim, shape, blocks, state: RaysState, pixels, labels) -> RaysState:
        """Spends one query on each example: a test of a new direction, or a bisection."""
        candidate = blocks.flip(state.signs, state.level, state.block)
        middle = 0.5 * (state.low + state.high)
        tried = tf.where(state.is_bisecting, middle, state.length)
        points = self._points(pixels, candidate, tried)
        wrong = is_wrong(victim.logits(tf.reshape(points, [-1, *shape])), labels)
        if self.stop_when_broken:
            is_within = self.threat.distance(points, pixels) <= self.threat.epsilon
            state = state._replace(high_is_within=tf.where(wrong, is_within, state.high_is_within))
        state, has_ended = self._judge(state, tried, wrong, blocks.num_pixels)
        # The bisection has ended below the best length.
        is_nearer = state.is_bisecting & has_ended & (state.high < state.length)
        level, block = blocks.following(state.level, state.block)
        return state._replace(
            signs=select_rows(is_nearer, candidate, state.signs),
            length=tf.where(is_nearer, state.high, state.length),
            is_bisecting=~has_ended,
            level=tf.where(has_ended, level, state.level),
            block=tf.where(has_ended, block, state.block),
            queries=state.queries + 1,
            is_done=state.is_done | (is_nearer & state.high_is_within),
        )

    def _judge(self, state: RaysState, tried, wrong, num_pixels: int):
        """Moves the ends of the bisections; also returns which directions are dealt with."""
        begins = wrong & ~state.is_bisecting
        # No point of the box is farther away than a corner.
        tried = tf.minimum(tried, self._width() * math.sqrt(num_pixels))
        low = tf.where(begins, tf.zeros_like(tried), state.low)
        low = tf.where(state.is_bisecting & ~wrong, tried, low)
        high = tf.where(wrong, tried, state.high)
        # One query at least, as in the released code, even where the first width is small enough.
        goes_on = begins | (state.is_bisecting & (high - low > self._tolerance()))
        return state._replace(low=low, high=high), ~goes_on

    def _points(self, pixels, signs, length):
        """The points at l2 `length` along the unit vectors of `signs`, inside the bounds."""
        unit = 1.0 / tf.sqrt(tf.constant(pixels.shape[1], pixels.dtype))
        amplitude = (length * unit)[:, tf.newaxis]
        return self.threat.clip_to_bounds(pixels + amplitude * signs)

    def _width(self) -> float:
        return self.threat.width

    def _tolerance(self) -> float:
        return TOLERANCE * self._width()


class _Blocks:
    """The blocks of pixels of all levels, for one image shape."""

    def __init__(self, shape) -> None:
        self.num_pixels = math.prod(shape)
        numbers = np.arange(self.num_pixels, dtype=np.int32)
        if len(shape) > 2:
            # Blocks are contiguous where the channel is the slowest axis.
            numbers = np.moveaxis(numbers.reshape([shape[-1], *shape[:-1]]), 0, -1)
        self._numbers = numbers.reshape([1, -1])
        # Below one pixel, blocks are not divided further.
        self._last_level = max(math.ceil(math.log2(self.num_pixels)), 0)
        levels = range(self._last_level + 1)
        self._sizes = np.array([-(-self.num_pixels // 2**level) for level in levels], np.int32)

    def flip(self, signs, level, block):
        """Returns `signs` with those of the block negated."""
        size = tf.gather(self._sizes, level)
        first = (block * size)[:, tf.newaxis]
        is_inside = (self._numbers >= first) & (self._numbers < first + size[:, tf.newaxis])
        return tf.where(is_inside, -signs, signs)

    def following(self, level, block):
        """Returns level and number of the block after this one."""
        end = (block + 1) * tf.gather(self._sizes, level)
        is_last = end >= self.num_pixels
        next_level = tf.minimum(level + 1, self._last_level)
        return tf.where(is_last, next_level, level), tf.where(is_last, 0, block + 1)
