"""Random fields: the plasma of the fog."""

from __future__ import annotations

import math

import numpy as np

from he_keras.data.corruptions.random_draws import Draws

_FIRST_WIBBLE = 100.0


def plasma(draws: Draws, side: int, decay: float) -> np.ndarray:
    """Returns a cloud in [0, 1] for each image, of shape (n, size, size), by diamond-square.

    The size is the next power of two from `side` on. Every level halves the grid: the centre of
    each square becomes the mean of its corners. Then the middle of each edge becomes the mean of
    its four neighbours, on a torus. A uniform number of amplitude wibble squared is added to each.
    The wibble starts at 100 and is divided by `decay` from level to level.

    Args:
        draws: random numbers, one stream for each image.
        side: size that is needed.
        decay: the smaller, the rougher the cloud.
    """
    size = 2 ** math.ceil(math.log2(side))
    noise = draws.uniform((size * size,), -1.0, 1.0)
    clouds = np.zeros((len(noise), size, size))
    step, wibble, used = size, _FIRST_WIBBLE, 1
    while step >= 2:
        half, cells = step // 2, size // step
        grids = []
        for _ in range(3):
            block = noise[:, used : used + cells**2].reshape(-1, cells, cells)
            grids.append(block * wibble**2)
            used += cells**2
        corners = clouds[:, ::step, ::step]
        pairs = corners + np.roll(corners, -1, axis=1)
        centres = (pairs + np.roll(pairs, -1, axis=2)) / 4 + grids[0]
        beside = corners + np.roll(corners, -1, axis=2) + centres + np.roll(centres, 1, axis=1)
        above = corners + np.roll(corners, -1, axis=1) + centres + np.roll(centres, 1, axis=2)
        clouds[:, half::step, half::step] = centres
        clouds[:, ::step, half::step] = beside / 4 + grids[1]
        clouds[:, half::step, ::step] = above / 4 + grids[2]
        step, wibble = half, wibble / decay
    clouds -= clouds.min(axis=(1, 2), keepdims=True)
    return clouds / clouds.max(axis=(1, 2), keepdims=True)
