"""Digital: contrast, elastic transform, pixelation, JPEG, and (extra) saturation."""

from __future__ import annotations

import io

import numpy as np

from he_keras.data.corruptions import filters
from he_keras.data.corruptions.registry import Setting, register


@register("contrast", small=(0.75, 0.5, 0.4, 0.3, 0.15), large=(0.4, 0.3, 0.2, 0.1, 0.05))
def contrast(images: np.ndarray, setting: Setting) -> np.ndarray:
    """Pulls every channel towards its mean over the image."""
    values = images / 255.0
    # Of integers the sum is exact, in whatever order it is taken.
    sums = images.sum(axis=(1, 2), keepdims=True, dtype=np.int64)
    means = sums / (255.0 * images.shape[1] * images.shape[2])
    return (values - means) * setting.level + means


@register(
    "saturate",
    small=((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2)),
    large=((0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (20, 0.2)),
)
def saturate(images: np.ndarray, setting: Setting) -> np.ndarray:
    """Multiplies the saturation of hue, saturation and value, and adds to it.

    The distance of a channel to the largest one is in proportion to the saturation. Grey has no
    hue, which counts as red, as in scikit-image.
    """
    factor, offset = setting.level
    values = images / 255.0
    value = values.max(axis=-1, keepdims=True)
    spread = value - values.min(axis=-1, keepdims=True)
    saturation = np.divide(spread, value, out=np.zeros_like(value), where=value > 0)
    target = np.clip(saturation * factor + offset, 0.0, 1.0)
    ratio = np.divide(value - values, spread, out=np.ones_like(values), where=spread > 0)
    # Where the colour is grey, the largest channel is red alone.
    ratio[..., :1][spread == 0] = 0.0
    return value - ratio * (target * value)


def _elastic_levels(side: float, *levels: tuple) -> tuple:
    return tuple(tuple(side * part for part in level) for level in levels)


@register(
    "elastic_transform",
    small=_elastic_levels(
        32,
        (0, 0, 0.08),
        (0.05, 0.2, 0.07),
        (0.08, 0.06, 0.06),
        (0.1, 0.04, 0.05),
        (0.1, 0.03, 0.03),
    ),
    # 244, not 224, is what the published set was made with.
    large=_elastic_levels(
        244,
        (2, 0.7, 0.1),
        (2, 0.08, 0.2),
        (0.05, 0.01, 0.02),
        (0.07, 0.01, 0.02),
        (0.12, 0.01, 0.02),
    ),
)
def elastic_transform(images: np.ndarray, setting: Setting) -> np.ndarray:
    """Applies a random affine map, then moves every pixel along a smooth random field."""
    amplitude, sigma, jitter = setting.level
    height, width = images.shape[1:3]
    values = images.astype(np.float32) / np.float32(255.0)
    corners = anchor_points(height, width)
    moved = corners + setting.draws.uniform((3, 2), -jitter, jitter)
    values = filters.sample(values, *affine_places(corners, moved, height, width), filters.mirrored)
    if amplitude == 0:
        return values
    shifts = setting.draws.uniform((2, height, width), -1.0, 1.0)
    across, down = (
        filters.smooth(shifts[:, axis], sigma, mode="reflect", truncate=3.0) * amplitude
        for axis in (0, 1)
    )
    rows = np.arange(height)[:, None] + down
    columns = np.arange(width) + across
    return filters.sample(values, rows, columns, filters.reflected)


def anchor_points(height: int, width: int) -> np.ndarray:
    """Returns three points around the centre, (x, y), that an affine map may move."""
    x, y, reach = width // 2, height // 2, min(height, width) // 3
    return np.array([[x + reach, y + reach], [x + reach, y - reach], [x - reach, y - reach]], float)


def affine_places(
    corners: np.ndarray, moved: np.ndarray, height: int, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (rows, columns) to read, so that `corners` (3, 2) arrive at `moved` (n, 3, 2)."""
    with_one = np.concatenate([moved, np.ones((len(moved), 3, 1))], axis=-1)
    # (n, 3, 2): what x, y and 1 of the result contribute to x and y of the source.
    matrix = np.linalg.solve(with_one, np.broadcast_to(corners, moved.shape))
    part = matrix[..., None, None]
    x, y = np.arange(width), np.arange(height)[:, None]
    columns, rows = (
        part[:, 0, axis] * x + part[:, 1, axis] * y + part[:, 2, axis] for axis in (0, 1)
    )
    return rows, columns


@register("pixelate", small=(0.95, 0.9, 0.85, 0.75, 0.65), large=(0.6, 0.5, 0.4, 0.3, 0.25))
def pixelate(images: np.ndarray, setting: Setting) -> np.ndarray:
    """Shrinks the image and enlarges it again, both by averaging over boxes."""
    import PIL.Image

    height, width = images.shape[1:3]
    small = (int(width * setting.level), int(height * setting.level))
    box = PIL.Image.Resampling.BOX
    return np.stack(
        [
            np.asarray(PIL.Image.fromarray(image).resize(small, box).resize((width, height), box))
            for image in images
        ]
    )


@register("jpeg_compression", small=(80, 65, 58, 50, 40), large=(25, 18, 15, 10, 7))
def jpeg_compression(images: np.ndarray, setting: Setting) -> np.ndarray:
    """Saves the image as a JPEG of the given quality and reads it back."""
    import PIL.Image

    decoded = []
    for image in images:
        stream = io.BytesIO()
        PIL.Image.fromarray(image).save(stream, "JPEG", quality=setting.level)
        decoded.append(np.asarray(PIL.Image.open(stream)))
    return np.stack(decoded)
