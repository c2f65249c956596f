"""Images as PNG data URIs, small enough for one page."""

import dataclasses

import numpy as np

from he_keras.drawing import png

#: Bytes that all pictures of a page may take together.
PICTURE_BUDGET = 2_200_000
# Longest sides to try where the pictures are too many bytes at full size.
_SHRUNK_SIDES = (160, 128, 112, 96, 80, 64, 48, 32)


@dataclasses.dataclass(frozen=True)
class Triple:
    """One example's pictures as data URIs.

    Attributes:
        clean: the image.
        adversarial: the worst image that an attack made of it.
        difference: grey means no change; the largest change reaches black or white.
        magnification: how many times larger the change is shown than it is; 0 for no change.
    """

    clean: str
    adversarial: str
    difference: str
    magnification: float


@dataclasses.dataclass(frozen=True)
class Album:
    """All pictures of a page.

    Attributes:
        triples: one for each example.
        side: longest side as shown, in pixels.
        original_side: longest side of the data.
    """

    triples: tuple[Triple, ...]
    side: int
    original_side: int


def can_show(images: np.ndarray) -> bool:
    """True for grey and colour images `(k, height, width, channels)`."""
    return images.ndim == 4 and images.shape[-1] in (1, 3) and images.size > 0


def make_album(
    clean: np.ndarray, adversarial: np.ndarray, bounds, budget: int = PICTURE_BUDGET
) -> Album:
    """Encodes every example, shrunk just as far as the budget asks for."""
    original = max(clean.shape[1:3])
    sides = [original, *(side for side in _SHRUNK_SIDES if side < original)]
    for side in sides:
        triples = tuple(
            _triple(*pair, bounds, side) for pair in zip(clean, adversarial, strict=True)
        )
        size = sum(len(each.clean + each.adversarial + each.difference) for each in triples)
        if size <= budget:
            break
    return Album(triples, side, original)


def _triple(clean: np.ndarray, adversarial: np.ndarray, bounds, side: int) -> Triple:
    low, high = (float(bound) for bound in bounds)
    change = adversarial.astype(np.float64) - clean
    change = np.where(np.isfinite(change), change, 0.0)
    largest = float(np.abs(change).max())
    difference = 0.5 + 0.5 * change / largest if largest else np.full(change.shape, 0.5)
    return Triple(
        clean=_data_uri((clean - low) / (high - low), side),
        adversarial=_data_uri((adversarial - low) / (high - low), side),
        difference=_data_uri(difference, side, keep_pixels=True),
        magnification=0.5 * (high - low) / largest if largest else 0.0,
    )


def _data_uri(shares: np.ndarray, side: int, keep_pixels: bool = False) -> str:
    return "data:image/png;base64," + png(shares, side, keep_pixels)
