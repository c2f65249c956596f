"""The names of the corruptions, the decorator that adds one, and `corrupt`, which applies one."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from he_keras.arguments import check_integer, is_integer, unknown_name
from he_keras.data.corruptions.frost_textures import check_frost_dir
from he_keras.data.corruptions.random_draws import Draws
from he_keras.data.datasets import check_images
from he_keras.registry import Registry

#: The fifteen of the benchmarks, in their order: noise, blur, weather, digital.
CORRUPTIONS = (
    "gaussian_noise",
    "shot_noise",
    "impulse_noise",
    "defocus_blur",
    "glass_blur",
    "motion_blur",
    "zoom_blur",
    "snow",
    "frost",
    "fog",
    "brightness",
    "contrast",
    "elastic_transform",
    "pixelate",
    "jpeg_compression",
)

#: Four more, meant for validation. The means of the benchmarks do not include them.
EXTRA_CORRUPTIONS = ("speckle_noise", "gaussian_blur", "spatter", "saturate")

SEVERITIES = (1, 2, 3, 4, 5)

SMALLEST_SIDE = 8
# Sides in pixels of the images that the two tables were made for.
_TABLE_SIDES = (32, 224)
# How many numbers are processed at once: few enough for the cache, and for the memory.
_VALUES_AT_ONCE = 2**19


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a corruption gets in addition to the images.

    Attributes:
        level: the parameters of this severity, from the table for this size of images.
        is_small: whether this is the table for 32-pixel images.
        draws: the random numbers of each image.
        frost_dir: the folder of frost pictures, or None.
    """

    level: Any
    is_small: bool
    draws: Draws
    frost_dir: pathlib.Path | None = None


Corruption = Callable[[np.ndarray, Setting], np.ndarray]


@dataclasses.dataclass(frozen=True)
class _Entry:
    function: Corruption
    small: tuple
    large: tuple


ENTRIES: Registry[_Entry] = Registry("corruption")


def register(name: str, small: tuple, large: tuple) -> Callable[[Corruption], Corruption]:
    """Registers a corruption: a function of uint8 images (n, height, width, 3) and a `Setting`.

    It returns uint8 images or floats. Floats are clipped to [0, 1], times 255, and truncated.

    Args:
        name: the new corruption's name.
        small: the parameters of severities 1 to 5 for images near 32 pixels a side.
        large: the same for images near 224.

    Example:
        >>> import numpy as np
        >>> from he_keras.data import corruptions
        >>> from he_keras.data.corruptions import registry
        >>> levels = (0.9, 0.8, 0.7, 0.6, 0.5)
        >>> @corruptions.register("dusk", small=levels, large=levels)
        ... def dusk(images, setting):
        ...     return images / 255.0 * setting.level
        >>> white = np.full((1, 32, 32, 3), 255, np.uint8)
        >>> int(corruptions.corrupt(white, "dusk", 5)[0, 0, 0, 0])
        127
        >>> del registry.ENTRIES["dusk"]
    """
    for label, table in (("small", small), ("large", large)):
        if len(table) != len(SEVERITIES):
            raise ValueError(
                f"Incomplete table; expected one entry for each of the severities {SEVERITIES}; "
                f"received len({label})={len(table)}"
            )

    def decorate(function: Corruption) -> Corruption:
        ENTRIES[name] = _Entry(function, tuple(small), tuple(large))
        return function

    return decorate


def names() -> tuple[str, ...]:
    """Returns the registered corruptions: the fifteen, the four extra ones, and any added since.

    Example:
        >>> from he_keras.data import corruptions
        >>> len(corruptions.names()) >= 19, corruptions.names()[0]
        (True, 'gaussian_noise')
    """
    known = (*CORRUPTIONS, *EXTRA_CORRUPTIONS)
    return (*known, *(name for name in ENTRIES if name not in known))


def check_corruption(name, severity) -> None:
    """Raises a ValueError unless there is such a corruption and such a severity."""
    if name not in ENTRIES:
        raise unknown_name("corruption", name, names())
    if not is_integer(severity) or severity not in SEVERITIES:
        raise ValueError(
            f"Invalid severity; expected one of {SEVERITIES}; received severity={severity!r}"
        )


def corrupt(
    images: npt.ArrayLike,
    name: str,
    severity: int,
    seed: int = 0,
    example_ids: npt.ArrayLike | None = None,
    frost_dir: str | os.PathLike[str] | None = None,
) -> np.ndarray:
    """Applies one corruption to a batch of images.

    The random numbers of an image depend on (seed, its number, corruption, severity) and on nothing
    else. So neither the batch size nor the order changes an image.

    The parameters are those of CIFAR-10-C (made for 32 pixels) or of ImageNet-C (224), whichever
    is nearer in ratio to the shorter side: the former up to 84 pixels. They are not rescaled.

    Args:
        images: (n, height, width, 3), uint8, or floats in [0, 1], which are rounded to 8 bits.
        name: one of `names()`.
        severity: 1 to 5.
        seed: seed of the random corruptions.
        example_ids: the number of each image, for the random draws. Defaults to 0, 1, ...
        frost_dir: folder of frost pictures (see `docs/reference/corruptions.md`). Without it
            the frost is made up, and differs from that of the published benchmarks.

    Returns:
        Images of the same shape and kind: uint8 for uint8, else float32 in [0, 1].

    Example:
        >>> import numpy as np
        >>> from he_keras.data import corruptions
        >>> grey = np.full((2, 32, 32, 3), 100, np.uint8)
        >>> corruptions.corrupt(grey, "brightness", 1)[0, 0, 0].tolist()
        [112, 112, 112]
    """
    check_corruption(name, severity)
    pixels, is_float = _as_uint8(images)
    numbers_of_images = _check_draw(len(pixels), seed, example_ids)
    entry = ENTRIES[name]
    folder = check_frost_dir(frost_dir)
    is_small = uses_small_table(*pixels.shape[1:3])
    level = (entry.small if is_small else entry.large)[severity - 1]
    corrupted = np.empty_like(pixels)
    step = max(1, _VALUES_AT_ONCE // pixels[0].size)
    for first in range(0, len(pixels), step):
        rows = slice(first, first + step)
        draws = Draws(seed, name, severity, numbers_of_images[rows])
        setting = Setting(level, is_small, draws, folder)
        corrupted[rows] = _truncated(entry.function(pixels[rows], setting))
    return corrupted.astype(np.float32) / np.float32(255.0) if is_float else corrupted


def uses_small_table(height: int, width: int) -> bool:
    """Whether images of this size take the parameters made for 32 pixels a side."""
    small, large = _TABLE_SIDES
    return min(height, width) ** 2 < small * large


def _truncated(images: np.ndarray) -> np.ndarray:
    """The published sets are cast, not rounded."""
    if images.dtype == np.uint8:
        return images
    return (np.clip(images, 0.0, 1.0) * 255.0).astype(np.uint8)


def _as_uint8(images) -> tuple[np.ndarray, bool]:
    """Returns the images as uint8, and whether they came as floats."""
    images = check_images(images)
    if images.shape[-1] != 3 or min(images.shape[1:3]) < SMALLEST_SIDE:
        raise ValueError(
            f"Images cannot be corrupted; expected (n, height, width, 3), {SMALLEST_SIDE} pixels a "
            "side or more; repeat grey images with np.repeat(images, 3, axis=-1); received "
            f"images.shape={images.shape}"
        )
    if images.dtype == np.uint8:
        return images, False
    return np.rint(images * 255.0).astype(np.uint8), True


def _check_draw(num_images: int, seed, example_ids) -> np.ndarray:
    """Checks the seed and returns the numbers of the images."""
    check_integer("seed", seed, 0)
    ids = np.arange(num_images) if example_ids is None else np.asarray(example_ids)
    if (
        ids.shape != (num_images,)
        or not np.issubdtype(ids.dtype, np.integer)
        or ids.min(initial=0) < 0
    ):
        raise ValueError(
            f"Invalid example_ids; expected {num_images} integers >= 0, one for each image; "
            f"received shape={ids.shape}, dtype={ids.dtype}"
        )
    return ids
