"""Frost: pictures from a folder, or generated textures.

The published benchmarks use six photographs that are not part of this package. Without them, five
textures are generated, always the same ones: frozen clouds of many sizes, crossed by needles.
"""

from __future__ import annotations

import functools
import os
import pathlib

import numpy as np

# The published generators draw from the first five of their six pictures.
NUM_TEXTURES = 5
# For 32-pixel images the pictures are shrunk by this factor.
SHRINKING = 5

_SUFFIXES = (".png", ".jpg", ".jpeg")
_SIDE = 1024
_SHADE, _LIGHT = np.array([28.0, 44.0, 66.0]), np.array([236.0, 246.0, 252.0])


def check_frost_dir(frost_dir: str | os.PathLike[str] | None) -> pathlib.Path | None:
    """Returns the folder if it has pictures, or None if none is given."""
    if frost_dir is None:
        return None
    folder = pathlib.Path(frost_dir).expanduser()
    if not folder.is_dir() or not _pictures(folder):
        raise ValueError(
            "No frost pictures; expected a folder with .png or .jpg files, frost1 to frost5; "
            f"received frost_dir={str(folder)!r}"
        )
    return folder


def describe_frost(frost_dir: str | os.PathLike[str] | None) -> str:
    """Returns which frost a call with this `frost_dir` uses, for reports.

    Example:
        >>> from he_keras.data import corruptions
        >>> corruptions.describe_frost(None)
        'procedural frost (not the published pictures)'
    """
    folder = check_frost_dir(frost_dir)
    if folder is None:
        return "procedural frost (not the published pictures)"
    return f"frost pictures {', '.join(path.name for path in _pictures(folder))}"


def load(folder: pathlib.Path | None, is_small: bool, height: int, width: int) -> list[np.ndarray]:
    """Returns the textures (uint8), each larger than the images on both sides."""
    textures = _procedural(is_small) if folder is None else _read(folder, is_small)
    if folder is None:
        # The pattern repeats without a seam, so that it covers images of any size.
        return [_tiled(texture, height, width) for texture in textures]
    for texture, path in zip(textures, _pictures(folder), strict=True):
        if texture.shape[0] <= height or texture.shape[1] <= width:
            scale = SHRINKING if is_small else 1
            raise ValueError(
                f"A frost picture is too small; expected more than {scale * height} x "
                f"{scale * width} pixels (height x width); received {path.name} with "
                f"{texture.shape[0]} x {texture.shape[1]} pixels after shrinking by {scale}"
            )
    return textures


def _pictures(folder: pathlib.Path) -> list[pathlib.Path]:
    found = sorted(path for path in folder.iterdir() if path.suffix.lower() in _SUFFIXES)
    return found[:NUM_TEXTURES]


@functools.lru_cache(maxsize=4)
def _read(folder: pathlib.Path, is_small: bool) -> list[np.ndarray]:
    import PIL.Image

    textures = []
    for path in _pictures(folder):
        try:
            with PIL.Image.open(path) as picture:
                texture = np.asarray(picture.convert("RGB"))
        except OSError as error:
            raise ValueError(
                f"A frost picture cannot be read; expected a PNG or JPEG file; received {path}"
            ) from error
        textures.append(_shrunk(texture) if is_small else texture)
    return textures


def _shrunk(texture: np.ndarray) -> np.ndarray:
    """Shrinks as OpenCV does by default, without averaging: the middle one of every five pixels."""
    middle = SHRINKING // 2
    return np.ascontiguousarray(texture[middle::SHRINKING, middle::SHRINKING])


def _tiled(texture: np.ndarray, height: int, width: int) -> np.ndarray:
    if texture.shape[0] > height and texture.shape[1] > width:
        return texture
    repeats = (height // texture.shape[0] + 1, width // texture.shape[1] + 1, 1)
    return np.tile(texture, repeats)


@functools.cache
def _procedural(is_small: bool) -> list[np.ndarray]:
    if is_small:
        return [_shrunk(texture) for texture in _procedural(False)]
    return [_texture(np.random.RandomState(number)) for number in range(NUM_TEXTURES)]


def _texture(random: np.random.RandomState) -> np.ndarray:
    """Returns one texture, (1024, 1024, 3), uint8, that repeats without a seam."""
    cloud = _field(random, exponent=2.2, longest=700.0)
    grain = _field(random, exponent=1.2, longest=40.0)
    needles = np.zeros((_SIDE, _SIDE))
    for angle in random.uniform(0.0, np.pi, 4):
        stretched = _field(random, exponent=2.3, longest=250.0, angle=angle, stretch=4.0)
        # Ridges: bright lines where the field changes its sign.
        needles = np.maximum(needles, np.exp(-np.abs(stretched) * 6.0))
    # Ice everywhere, thicker in clouds, so that no part of a texture leaves the image clear.
    cover = 0.5 + 0.5 / (1.0 + np.exp(-1.5 * cloud))
    ice = cover * (0.25 + 0.75 * needles) + 0.06 * grain
    ice = np.clip((ice - 0.05) / 0.75, 0.0, 1.0)[..., None]
    return np.rint(_SHADE + (_LIGHT - _SHADE) * ice).astype(np.uint8)


def _field(random, exponent: float, longest: float, angle: float = 0.0, stretch: float = 1.0):
    """Returns noise of mean 0 and deviation 1 whose spectrum falls with a power of the frequency.

    Args:
        random: source of the noise.
        exponent: of the fall: the larger, the smoother.
        longest: longest wave in pixels.
        angle: direction in which the noise is stretched.
        stretch: how far.
    """
    noise = np.fft.rfft2(random.standard_normal((_SIDE, _SIDE)))
    down, across = np.fft.fftfreq(_SIDE)[:, None], np.fft.rfftfreq(_SIDE)
    along = (across * np.cos(angle) + down * np.sin(angle)) * stretch
    beside = down * np.cos(angle) - across * np.sin(angle)
    frequency = np.sqrt(along**2 + beside**2)
    field = np.fft.irfft2(noise * (frequency + 1.0 / longest) ** -exponent, s=(_SIDE, _SIDE))
    field -= field.mean()
    return field / field.std()
