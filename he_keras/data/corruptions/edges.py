"""Edges of 8-bit maps and distances to them, as OpenCV defines both, on batches."""

from __future__ import annotations

import numpy as np

# Weights of the 5x5 distance: straight, diagonal, and the move of a chess knight.
_STRAIGHT, _DIAGONAL, _KNIGHT = 1.0, 1.4, 2.1969
_TANGENT_OF_22_5 = np.sqrt(2.0) - 1.0


def canny(maps: np.ndarray, weak: int, strong: int) -> np.ndarray:
    """Returns the pixels on Canny edges, as booleans.

    Sobel slopes with a repeated border; their size is the sum of both absolute slopes. An edge
    pixel is larger than the neighbours along its slope. Of two equal ones the first counts. At
    least one pixel of an edge is above `strong`, and all are above `weak`.

    Args:
        maps: uint8, of shape (n, height, width).
        weak: lower threshold.
        strong: upper threshold.
    """
    import scipy.ndimage

    down, across = _sobel(maps)
    size = np.abs(down) + np.abs(across)
    is_peak = _peaks(size, down, across)
    candidates = is_peak & (size > weak)
    # Eight neighbours within a map, none in the next one.
    neighbours = np.zeros((3, 3, 3), bool)
    neighbours[1] = True
    labels, count = scipy.ndimage.label(candidates, neighbours)
    is_edge = np.zeros(count + 1, bool)
    is_edge[labels[candidates & (size > strong)]] = True
    return is_edge[labels]


def _sobel(maps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the slopes along the axes 1 and 2."""
    padded = np.pad(maps.astype(np.int32), ((0, 0), (1, 1), (1, 1)), mode="edge")
    across = padded[:, :, 2:] - padded[:, :, :-2]
    down = padded[:, 2:] - padded[:, :-2]
    across = across[:, :-2] + 2 * across[:, 1:-1] + across[:, 2:]
    down = down[:, :, :-2] + 2 * down[:, :, 1:-1] + down[:, :, 2:]
    return down, across


def _peaks(size: np.ndarray, down: np.ndarray, across: np.ndarray) -> np.ndarray:
    """Returns where `size` is largest among the two neighbours along the slope."""
    height, width = size.shape[1:]
    padded = np.pad(size, ((0, 0), (1, 1), (1, 1)))

    def beside(rows: int, columns: int) -> np.ndarray:
        return padded[:, 1 + rows : 1 + rows + height, 1 + columns : 1 + columns + width]

    steep, flat = np.abs(down), np.abs(across)
    is_horizontal = steep < flat * _TANGENT_OF_22_5
    is_vertical = flat < steep * _TANGENT_OF_22_5
    horizontal = (size > beside(0, -1)) & (size >= beside(0, 1))
    vertical = (size > beside(-1, 0)) & (size >= beside(1, 0))
    falling = (size > beside(-1, -1)) & (size > beside(1, 1))
    rising = (size > beside(-1, 1)) & (size > beside(1, -1))
    diagonal = np.where((down < 0) != (across < 0), rising, falling)
    return np.where(is_horizontal, horizontal, np.where(is_vertical, vertical, diagonal))


def chamfer_distance(is_edge: np.ndarray) -> np.ndarray:
    """Returns for each pixel the length of the shortest path to a True pixel of its map.

    Steps to the neighbours cost 1 and 1.4, steps of a chess knight 2.1969. Where a map has no True
    pixel, the distance is infinite. Two passes, one from each corner, find it: within a row, the
    shortest way along the row is a running minimum.

    Args:
        is_edge: booleans of shape (n, height, width).
    """
    distance = np.where(is_edge, 0.0, np.inf)
    _sweep(distance)
    _sweep(distance[:, ::-1, ::-1])
    return distance


def _sweep(distance: np.ndarray) -> None:
    """Shortens distances, in place, by paths that come from above or from the left."""
    count, height, width = distance.shape
    along = _STRAIGHT * np.arange(width)
    # Two rows above and two columns to either side that are never nearer.
    padded = np.full((count, height + 2, width + 4), np.inf)
    for row in range(height):
        last, second = padded[:, row + 1], padded[:, row]
        best = padded[:, row + 2, 2:-2]
        best[:] = distance[:, row]
        for columns, source, cost in (
            (0, last, _STRAIGHT),
            (-1, last, _DIAGONAL),
            (1, last, _DIAGONAL),
            (-2, last, _KNIGHT),
            (2, last, _KNIGHT),
            (-1, second, _KNIGHT),
            (1, second, _KNIGHT),
        ):
            np.minimum(best, source[:, 2 + columns : 2 + columns + width] + cost, out=best)
        best[:] = np.minimum.accumulate(best - along, axis=1) + along
    distance[:] = padded[:, 2:, 2:-2]
