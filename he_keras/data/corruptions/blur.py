"""Blur: defocus, glass, motion, zoom, and (extra) Gaussian."""

from __future__ import annotations

import functools

import numpy as np

from he_keras.data.corruptions import filters
from he_keras.data.corruptions.random_draws import Draws
from he_keras.data.corruptions.registry import Setting, register


@register("gaussian_blur", small=(0.4, 0.6, 0.7, 0.8, 1.0), large=(1, 2, 3, 4, 6))
def gaussian_blur(images: np.ndarray, setting: Setting) -> np.ndarray:
    """Smooths with a Gaussian."""
    return filters.smooth(images / 255.0, setting.level)


@register(
    "defocus_blur",
    small=((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
    large=((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
)
def defocus_blur(images: np.ndarray, setting: Setting) -> np.ndarray:
    """Averages over a disk, as an unfocused lens does."""
    return filters.correlate(images / 255.0, disk(*setting.level))


@functools.cache
def disk(radius: float, alias_sigma: float) -> np.ndarray:
    """Returns a disk whose edge is softened by a Gaussian, as a kernel that sums to 1.

    Below a radius of one pixel the disk is a single pixel, and the kernel just the Gaussian.
    """
    extent, soft_extent = (8, 1) if radius <= 8 else (int(radius), 2)
    steps = np.arange(-extent, extent + 1)
    kernel = (steps[:, None] ** 2 + steps**2 <= radius**2).astype(np.float64)
    kernel /= kernel.sum()
    taps = np.exp(-0.5 * (np.arange(-soft_extent, soft_extent + 1) / alias_sigma) ** 2)
    taps /= taps.sum()
    kernel = filters.correlate(kernel[None], np.outer(taps, taps))[0]
    # Most of the grid is empty for small disks.
    reach = int(np.abs(steps)[kernel.any(axis=0)].max())
    kept = slice(extent - reach, extent + reach + 1)
    kernel = kernel[kept, kept]
    kernel.setflags(write=False)
    return kernel


@register(
    "glass_blur",
    small=((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
    large=((0.7, 1, 2), (0.9, 2, 1), (1.0, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
)
def glass_blur(images: np.ndarray, setting: Setting) -> np.ndarray:
    """Smooths, lets pixels copy a neighbour, and smooths again."""
    sigma, reach, num_rounds = setting.level
    values = (filters.smooth(images / 255.0, sigma) * 255.0).astype(np.uint8)
    for _ in range(num_rounds):
        values = copy_neighbours(values, reach, setting.draws)
    return filters.smooth(values / 255.0, sigma)


def copy_neighbours(images: np.ndarray, reach: int, draws: Draws) -> np.ndarray:
    """Replaces each inner pixel by a neighbour, from the last pixel to the first.

    The offsets go from -reach to reach - 1. A neighbour that comes earlier in that order has been
    replaced already, and its new value is what is copied. (The original means to swap the two, but
    both are views of one array, so that the neighbour gets its own value back.)

    The scan is sequential, but it need not be run: a pixel whose neighbour was replaced before it
    takes what that neighbour took. Following these links twice as far each time gives every pixel
    its origin after a few rounds.
    """
    count, height, width = images.shape[:3]
    rows, columns = _scanned(height, reach), _scanned(width, reach)
    offsets = draws.integers((len(rows), len(columns), 2), -reach, reach)
    place = (rows[:, None] * width + columns).ravel()
    neighbour = (rows[:, None] + offsets[..., 1]) * width + (columns + offsets[..., 0])
    neighbour = neighbour.reshape(count, -1)
    num_pixels = height * width
    # Two nodes for each pixel: its new value, and after all of those its old one. That is also the
    # new value of pixels at the border.
    origin = np.tile(np.arange(2 * num_pixels), (count, 1))
    origin[:, :num_pixels] += num_pixels
    origin[:, place] = np.where(neighbour > place, neighbour, neighbour + num_pixels)
    while (origin[:, place] < num_pixels).any():
        origin[:, :num_pixels] = np.take_along_axis(origin, origin[:, :num_pixels], axis=1)
    pixels = images.reshape(count, num_pixels, -1)
    taken = origin[:, :num_pixels] - num_pixels
    return np.take_along_axis(pixels, taken[..., None], axis=1).reshape(images.shape)


def _scanned(size: int, reach: int) -> np.ndarray:
    return np.arange(reach + 1, size - reach + 1)


@register(
    "motion_blur",
    small=((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
    large=((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
)
def motion_blur(images: np.ndarray, setting: Setting) -> np.ndarray:
    """Blurs along a line at a random angle from -45 to 45 degrees."""
    radius, sigma = setting.level
    angles = setting.draws.uniform((1,), -45.0, 45.0)[:, 0]
    return filters.motion(images, radius, sigma, angles).astype(np.uint8)


def _factors(stop: float, step: float) -> tuple[float, ...]:
    # Rounding makes some of these rows include their stop, in the published sets too.
    return tuple(np.arange(1, stop, step).tolist())


@register(
    "zoom_blur",
    small=tuple(_factors(stop, 0.01) for stop in (1.06, 1.11, 1.16, 1.21, 1.26)),
    large=(
        _factors(1.11, 0.01),
        _factors(1.16, 0.01),
        _factors(1.21, 0.02),
        _factors(1.26, 0.02),
        _factors(1.31, 0.03),
    ),
)
def zoom_blur(images: np.ndarray, setting: Setting) -> np.ndarray:
    """Averages the image and its enlargements by every factor of the level, 1 included."""
    # The batch last: rows and columns of all images then move in one piece.
    values = np.ascontiguousarray(np.moveaxis(images, 0, 2)).astype(np.float32) / np.float32(255.0)
    total = np.zeros_like(values)
    for factor in setting.level:
        total += filters.clipped_zoom(values, factor)
    return np.moveaxis((values + total) / np.float32(len(setting.level) + 1), 2, 0)
