"""Random numbers that belong to an image, whatever its batch and its place in it."""

from __future__ import annotations

import functools
import zlib

import numpy as np

Shape = tuple[int, ...]


class Draws:
    """One stream of random numbers for each image of a batch.

    A stream is a function of (seed, corruption, severity, example number). They cannot overlap: the
    first three are Philox's key, and the last is the high word of its counter.

    Args:
        seed: non-negative integer.
        name: name of the corruption.
        severity: 1 to 5.
        example_ids: the number of each image.

    Example:
        >>> import numpy as np
        >>> from he_keras.data.corruptions.random_draws import Draws
        >>> both = Draws(0, "fog", 3, np.array([7, 8])).uniform((4,))
        >>> alone = Draws(0, "fog", 3, np.array([8])).uniform((4,))
        >>> bool((both[1] == alone[0]).all())
        True
    """

    def __init__(self, seed: int, name: str, severity: int, example_ids: np.ndarray) -> None:
        # A checksum of the name, not its position: a new corruption must not change the others.
        stream = zlib.crc32(name.encode()) * 16 + severity
        self._key = np.array([seed, stream], np.uint64)
        self._example_ids = example_ids

    @functools.cached_property
    def _generators(self) -> list[np.random.Generator]:
        return [
            np.random.Generator(
                np.random.Philox(key=self._key, counter=np.array([0, 0, 0, number], np.uint64))
            )
            for number in self._example_ids
        ]

    def normal(self, shape: Shape, mean: float = 0.0, deviation: float = 1.0) -> np.ndarray:
        """Returns Gaussian numbers of shape (images, *shape)."""
        drawn = np.empty((len(self._generators), *shape))
        for row, generator in zip(drawn, self._generators, strict=True):
            generator.standard_normal(out=row)
        drawn *= deviation
        drawn += mean
        return drawn

    def uniform(self, shape: Shape, low: float = 0.0, high: float = 1.0) -> np.ndarray:
        """Returns numbers from [low, high), of shape (images, *shape)."""
        drawn = np.empty((len(self._generators), *shape))
        for row, generator in zip(drawn, self._generators, strict=True):
            generator.random(out=row)
        drawn *= high - low
        drawn += low
        return drawn

    def integers(self, shape: Shape, low: int, high: int) -> np.ndarray:
        """Returns integers from low to high - 1, of shape (images, *shape)."""
        return np.stack([each.integers(low, high, shape) for each in self._generators])

    def poisson(self, means: np.ndarray) -> np.ndarray:
        """Returns Poisson counts for means of shape (images, ...)."""
        pairs = zip(self._generators, means, strict=True)
        return np.stack([generator.poisson(mean) for generator, mean in pairs])
