"""Filters on batches of images: smoothing, zooming, motion, sampling between pixels.

No image's result depends on the other images of its batch, to the last bit. A corrupted value is
truncated, so that a different order of summation could change it by a whole level. That is why
there is no matrix product over the batch here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np


def smooth(
    fields: np.ndarray, sigma: float, mode: str = "nearest", truncate: float = 4.0
) -> np.ndarray:
    """Smooths the axes 1 and 2 with a Gaussian, as scikit-image's `gaussian` does by default.

    Args:
        fields: floats of shape (n, height, width) or (n, height, width, channels).
        sigma: standard deviation in pixels.
        mode: SciPy's name of the border: "nearest" or "reflect".
        truncate: where the kernel ends, in standard deviations.
    """
    import scipy.ndimage

    sigmas = (0.0, sigma, sigma, 0.0)[: fields.ndim]
    return scipy.ndimage.gaussian_filter(fields, sigmas, mode=mode, truncate=truncate)


def clipped_zoom(fields: np.ndarray, factor: float) -> np.ndarray:
    """Enlarges the centre of (height, width, ...) by `factor`, keeping the size.

    The corner pixels of the part that is enlarged stay corner pixels, and between pixels the values
    are linear, as in `scipy.ndimage.zoom` with order 1.
    """
    for axis in (0, 1):
        lower, upper, share = _zoom_taps(fields.shape[axis], factor)
        shape = (1,) * axis + (-1,) + (1,) * (fields.ndim - axis - 1)
        weight = share.astype(fields.dtype).reshape(shape)
        below, above = np.take(fields, lower, axis), np.take(fields, upper, axis)
        above -= below
        above *= weight
        above += below
        fields = above
    return fields


def _zoom_taps(size: int, factor: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each pixel of the result: the two pixels it lies between, the weight of the second."""
    kept = math.ceil(size / factor)
    first = (size - kept) // 2
    enlarged = round(kept * factor)
    places = np.arange(size) + (enlarged - size) // 2
    position = places * ((kept - 1) / max(enlarged - 1, 1))
    lower = np.minimum(position.astype(int), kept - 1)
    upper = np.minimum(lower + 1, kept - 1)
    return first + lower, first + upper, position - lower


def motion(fields: np.ndarray, radius: int, sigma: float, angles: np.ndarray) -> np.ndarray:
    """Blurs (n, height, width, channels) along a line, each image at its own angle.

    The kernel is one half of a Gaussian, 2 * radius + 1 pixels long, normalised. It runs along the
    direction (cos, sin) of the angle, each tap at the nearest pixel, and the border is repeated.
    The result is rounded to whole levels, because the original is an 8-bit picture at this point.

    Args:
        fields: values 0..255.
        radius: half the length of the kernel.
        sigma: standard deviation of the kernel in pixels.
        angles: angle of each image in degrees.
    """
    length = 2 * radius + 1
    kernel = np.exp(-0.5 * (np.arange(length) / sigma) ** 2)
    kernel /= kernel.sum()
    height, width = fields.shape[1:3]
    edges = ((0, 0), (length, length), (length, length), (0, 0))
    padded = np.pad(fields.astype(np.float64), edges, mode="edge")
    blurred = np.zeros(fields.shape)
    scaled = np.empty(fields.shape[1:])
    for image, total, angle in zip(padded, blurred, angles, strict=True):
        # `math`, because NumPy's vectorised sine may depend on the position in the array.
        sine, cosine = math.sin(math.radians(angle)), math.cos(math.radians(angle))
        for step, weight in enumerate(kernel):
            top = length + math.ceil(step * sine - 0.5)
            left = length + math.ceil(step * cosine - 0.5)
            window = image[top : top + height, left : left + width]
            total += np.multiply(window, weight, out=scaled)
    return np.floor(blurred + 0.5)


def mirrored(index: np.ndarray, size: int) -> np.ndarray:
    """Folds positions back at the centre of the edge pixels: d c b | a b c d | c b a."""
    index = np.mod(index, 2 * size - 2)
    return np.minimum(index, 2 * size - 2 - index)


def reflected(index: np.ndarray, size: int) -> np.ndarray:
    """Folds positions back at the outer side of the edge pixels: c b a | a b c d | d c b."""
    index = np.mod(index, 2 * size)
    return np.minimum(index, 2 * size - 1 - index)


def sample(
    images: np.ndarray,
    rows: np.ndarray,
    columns: np.ndarray,
    fold: Callable[[np.ndarray, int], np.ndarray],
) -> np.ndarray:
    """Reads images between pixels, linearly.

    Args:
        images: (n, height, width, channels).
        rows: (n, height, width), where to read, in pixels.
        columns: the same for the other axis.
        fold: `mirrored` or `reflected`: what lies beyond the border.
    """
    count, height, width, channels = images.shape
    pixels = images.reshape(-1, channels)
    offsets = (np.arange(count) * (height * width))[:, None, None]
    top, left = np.floor(rows).astype(int), np.floor(columns).astype(int)
    down = (rows - top).astype(images.dtype)[..., None]
    right = (columns - left).astype(images.dtype)[..., None]
    row_starts = [offsets + fold(top + step, height) * width for step in (0, 1)]
    places = [fold(left + step, width) for step in (0, 1)]
    upper, lower = (
        _between(pixels[start + places[0]], pixels[start + places[1]], right)
        for start in row_starts
    )
    return _between(upper, lower, down)


def _between(first: np.ndarray, second: np.ndarray, share: np.ndarray) -> np.ndarray:
    return first * (1 - share) + second * share


def correlate(fields: np.ndarray, kernel: Sequence[Sequence[float]] | np.ndarray) -> np.ndarray:
    """Correlates the axes 1 and 2 with a small kernel; the border is mirrored."""
    import scipy.ndimage

    weights = np.asarray(kernel)
    weights = weights.reshape(1, *weights.shape, *(1,) * (fields.ndim - 3))
    return scipy.ndimage.correlate(fields, weights, mode="mirror")
