"""Windows of the Square attack for the l2 and l1 balls.

The perturbation is a sum of patterns, and its length always all of epsilon. A query takes the
perturbation out of one window and puts its mass, together with what the pixel bounds had cut off,
into another window, where a new pattern is added to what was there. `Square` lists the deviations.
"""

import math
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from he_keras.threat import ThreatModel

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
        self.tile = max(min(self.height, self.width) // _TILES, 1)
        self.grid = self.height // self.tile, self.width // self.tile
        # A bit that transposes the pattern, and a sign per channel.
        self.start_shape = (*self.grid, 1 + self.channels)
        # Two windows, and the same.
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
        radius = self.threat.epsilon * (1.0 - _L1_MARGIN)
        ball = ThreatModel(self.threat.norm, radius, self.threat.bounds)
        # Rows of a matrix reduce faster than images do.
        pixels, perturbation = (
            tf.reshape(each, [-1, math.prod(self.shape)]) for each in (images, perturbation)
        )
        return tf.reshape(ball.project(pixels + perturbation, pixels), tf.shape(images))

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
        >>> from he_keras.attacks.square_l2 import pattern
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
