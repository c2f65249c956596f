"""Spatter (extra): drops of water, or of mud, on the lens."""

from __future__ import annotations

import numpy as np

from he_keras.data.corruptions import edges, filters
from he_keras.data.corruptions.registry import Setting, register

_PALE_TURQUOISE = np.array([175, 238, 238]) / 255.0
_MUD_BROWN = np.array([63, 42, 20]) / 255.0
_EMBOSS = ((-2, -1, 0), (-1, 1, 1), (0, 1, 2))
# Thresholds of the edge detector, and the largest distance.
_WEAK_EDGE, _STRONG_EDGE, _FARTHEST = 50, 150, 20.0
_THINNEST_MUD = 0.8


@register(
    "spatter",
    small=(
        (0.62, 0.1, 0.7, 0.7, 0.5, 0),
        (0.65, 0.1, 0.8, 0.7, 0.5, 0),
        (0.65, 0.3, 1, 0.69, 0.5, 0),
        (0.65, 0.1, 0.7, 0.69, 0.6, 1),
        (0.65, 0.1, 0.5, 0.68, 0.6, 1),
    ),
    large=(
        (0.65, 0.3, 4, 0.69, 0.6, 0),
        (0.65, 0.3, 3, 0.68, 0.6, 0),
        (0.65, 0.3, 2, 0.68, 0.5, 0),
        (0.65, 0.3, 1, 0.65, 1.5, 1),
        (0.67, 0.4, 1, 0.65, 1.5, 1),
    ),
)
def spatter(images: np.ndarray, setting: Setting) -> np.ndarray:
    """Lets drops fall where a smooth random field is high: water up to severity 3, then mud."""
    mean, deviation, sigma, threshold, strength, is_mud = setting.level
    liquid = filters.smooth(setting.draws.normal(images.shape[1:3], mean, deviation), sigma)
    liquid[liquid < threshold] = 0.0
    values = images / 255.0
    if is_mud:
        mud = filters.smooth((liquid > threshold).astype(np.float64), strength)[..., None]
        mud[mud < _THINNEST_MUD] = 0.0
        return values * (1 - mud) + mud * _MUD_BROWN
    # In the original, noise above 1 overflows when it is cast to 8 bits. Here it is cut off.
    levels = (np.minimum(liquid, 1.0) * 255.0).astype(np.uint8)
    return values + strength * _sheen(levels)[..., None] * _PALE_TURQUOISE


def _sheen(levels: np.ndarray) -> np.ndarray:
    """Returns how much water shows (0..1) on drops of these thicknesses (uint8, one map each).

    The distance from the drops' edges, equalised and embossed, makes them look lit from one side.
    """
    distance = edges.chamfer_distance(edges.canny(levels, _WEAK_EDGE, _STRONG_EDGE))
    distance = np.minimum(distance, _FARTHEST)
    relief = equalised(_box_sum(distance).astype(np.float32).astype(np.uint8))
    relief = np.clip(filters.correlate(relief.astype(np.int32), _EMBOSS), 0, 255)
    relief = np.rint(_box_sum(relief.astype(np.float64)))
    shine = levels * relief
    largest = shine.max(axis=(1, 2), keepdims=True)
    return np.divide(shine, largest, out=np.zeros_like(shine), where=largest > 0)


def _box_sum(fields: np.ndarray) -> np.ndarray:
    """Returns the means over 3x3 pixels."""
    return filters.correlate(fields, np.ones((3, 3))) / 9.0


def equalised(fields: np.ndarray) -> np.ndarray:
    """Equalises the histogram of each 8-bit map: its lowest level becomes 0, its highest 255."""
    count, num_pixels = len(fields), fields[0].size
    flat = fields.reshape(count, num_pixels).astype(np.intp)
    bins = flat + 256 * np.arange(count)[:, None]
    histogram = np.bincount(bins.ravel(), minlength=256 * count).reshape(count, 256)
    lowest = flat.min(axis=1, keepdims=True)
    num_lowest = np.take_along_axis(histogram, lowest, axis=1)
    above = np.cumsum(histogram, axis=1) - num_lowest
    # A map of one level stays as it is.
    is_flat = num_lowest == num_pixels
    table = np.rint(above * (255.0 / np.maximum(num_pixels - num_lowest, 1)))
    mapped = np.where(is_flat, flat, np.take_along_axis(table, flat, axis=1))
    return mapped.astype(np.uint8).reshape(fields.shape)
