"""Weather: snow, frost, fog and brightness."""

from __future__ import annotations

import numpy as np

from he_keras.data.corruptions import fields, filters, frost_textures
from he_keras.data.corruptions.registry import Setting, register

_GREY_WEIGHTS = (0.299, 0.587, 0.114)


@register(
    "snow",
    small=(
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    ),
    large=(
        (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
        (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
        (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
        (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
        (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
    ),
)
def snow(images: np.ndarray, setting: Setting) -> np.ndarray:
    """Whitens the image; flakes fall on it twice, as they are and turned by 180 degrees."""
    mean, deviation, zoom, threshold, radius, sigma, mix = setting.level
    flakes = setting.draws.normal(images.shape[1:3], mean, deviation)
    flakes = np.moveaxis(filters.clipped_zoom(np.moveaxis(flakes, 0, 2), zoom), 2, 0)
    flakes[flakes < threshold] = 0.0
    levels = (np.clip(flakes, 0.0, 1.0) * 255.0).astype(np.uint8)[..., None]
    angles = setting.draws.uniform((1,), -135.0, -45.0)[:, 0]
    flakes = filters.motion(levels, radius, sigma, angles) / 255.0

    values = images.astype(np.float32) / np.float32(255.0)
    whitened = np.maximum(values, _grey(values) * 1.5 + 0.5)
    return mix * values + (1 - mix) * whitened + flakes + flakes[:, ::-1, ::-1]


def _grey(values: np.ndarray) -> np.ndarray:
    # Not a matrix product, whose rounding may depend on the size of the batch.
    red, green, blue = (values[..., channel : channel + 1] for channel in range(3))
    return _GREY_WEIGHTS[0] * red + _GREY_WEIGHTS[1] * green + _GREY_WEIGHTS[2] * blue


@register(
    "frost",
    small=((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)),
    large=((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75)),
)
def frost(images: np.ndarray, setting: Setting) -> np.ndarray:
    """Adds a random part of one of five frost textures, to an image that is darkened for it."""
    image_share, frost_share = setting.level
    height, width = images.shape[1:3]
    textures = frost_textures.load(setting.frost_dir, setting.is_small, height, width)
    places = setting.draws.uniform((3,))
    ice = np.empty(images.shape, np.uint8)
    for part, (which, down, right) in zip(ice, places, strict=True):
        texture = textures[int(which * len(textures))]
        top = int(down * (texture.shape[0] - height))
        left = int(right * (texture.shape[1] - width))
        part[:] = texture[top : top + height, left : left + width]
    # In levels 0..255, as the original computes it.
    return np.clip(image_share * images + frost_share * ice, 0, 255).astype(np.uint8)


@register(
    "fog",
    small=((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
    large=((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),
)
def fog(images: np.ndarray, setting: Setting) -> np.ndarray:
    """Adds a cloud, and scales the sum back to the image's largest value."""
    amount, decay = setting.level
    height, width = images.shape[1:3]
    clouds = fields.plasma(setting.draws, max(height, width), decay)[:, :height, :width, None]
    values = images / 255.0
    largest = values.max(axis=(1, 2, 3), keepdims=True)
    return (values + amount * clouds) * largest / (largest + amount)


@register("brightness", small=(0.05, 0.1, 0.15, 0.2, 0.3), large=(0.1, 0.2, 0.3, 0.4, 0.5))
def brightness(images: np.ndarray, setting: Setting) -> np.ndarray:
    """Adds to the value of hue, saturation and value.

    Hue and saturation stay if all three channels grow by the same factor. Black becomes grey.
    """
    values = images / 255.0
    value = values.max(axis=-1, keepdims=True)
    brighter = np.minimum(value + setting.level, 1.0)
    ratio = np.divide(values, value, out=np.ones_like(values), where=value > 0)
    return ratio * brighter
