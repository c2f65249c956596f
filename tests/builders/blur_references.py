"""Blurs written a second time, by other means."""

import math

import numpy as np
import scipy.ndimage

from he_keras.data.corruptions import random_draws


def draws_for(count, name="glass_blur", severity=1):
    return random_draws.Draws(0, name, severity, np.arange(count))


def assert_levels_close(actual, expected, share=0.002):
    """Equal, but for values so near to a whole level that rounding decides."""
    difference = np.abs(actual.astype(int) - expected.astype(int))
    assert difference.max() <= 1
    assert (difference > 0).mean() <= share


def motion_by_shifts(image, radius, sigma, angle):
    """Every pixel on its own: taps along the line, the border repeated."""
    weights = [math.exp(-(i**2) / (2 * sigma**2)) for i in range(2 * radius + 1)]
    height, width = image.shape[:2]
    result = np.zeros(image.shape)
    for i, weight in enumerate(weights):
        down = math.ceil(i * math.sin(math.radians(angle)) - 0.5)
        right = math.ceil(i * math.cos(math.radians(angle)) - 0.5)
        rows = np.clip(np.arange(height) + down, 0, height - 1)
        columns = np.clip(np.arange(width) + right, 0, width - 1)
        result += weight / sum(weights) * image[rows][:, columns]
    return np.floor(result + 0.5)


def zoomed_by_scipy(image, factor):
    """Cuts the centre out, enlarges it, and trims what is too much."""
    for axis in (0, 1):
        size = image.shape[axis]
        kept = math.ceil(size / factor)
        first = (size - kept) // 2
        image = np.take(image, range(first, first + kept), axis)
        factors = [1.0] * image.ndim
        factors[axis] = factor
        image = scipy.ndimage.zoom(image, factors, order=1)
        trim = (image.shape[axis] - size) // 2
        image = np.take(image, range(trim, trim + size), axis)
    return image
