"""Fills the templates: each section's own, then the frame around all of them.

Images become PNG data URIs, small enough for one page.
"""

import base64
import dataclasses
import functools
import hashlib
import importlib.resources
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from he_keras.drawing import png
from he_keras.evaluation.report import formatting
from he_keras.version import __version__

#: Shades of a heat map, from none to strongest; style.css has a colour for each.
NUM_SHADES = 6
#: Bytes that all pictures of a page may take together: chosen so that the page stays below 3 MB.
PICTURE_BUDGET = 2_200_000
# Longest sides to try where the pictures are too many bytes at full size.
_SHRUNK_SIDES = (160, 128, 112, 96, 80, 64, 48, 32)


class Section(NamedTuple):
    """A part of the page under a heading of its own, which the list of contents links to.

    Attributes:
        anchor: its name in links.
        title: its heading.
        template: the file in `templates/` that writes its content.
        values: what the template may use.
    """

    anchor: str
    title: str
    template: str
    values: Mapping[str, Any]


def page(kicker: str, title: str, remarks: Sequence[str], sections: Sequence[Section]) -> str:
    """Returns a whole document that needs no other file and no network.

    Args:
        kicker: the kind of page.
        title: its subject.
        remarks: short facts below the title.
        sections: its content.
    """
    from markupsafe import Markup

    script, style = _resource("script.js"), _resource("style.css")
    digest = hashlib.sha256(script.encode("utf-8")).digest()
    rendered = [
        {
            "anchor": section.anchor,
            "title": section.title,
            "body": Markup(_templates().get_template(section.template).render(section.values)),
        }
        for section in sections
    ]
    return (
        _templates()
        .get_template("page.html.jinja")
        .render(
            kicker=kicker,
            title=title,
            remarks=remarks,
            sections=rendered,
            style=Markup(style),
            script=Markup(script),
            script_digest=base64.b64encode(digest).decode("ascii"),
            version=__version__,
        )
    )


def shade(strength: float) -> str:
    """The class of a heat map's cell; `strength` runs from 0 to 1."""
    if not formatting.is_number(strength):
        return "shade-0"
    level = round(min(max(strength, 0.0), 1.0) * (NUM_SHADES - 1))
    return f"shade-{level}"


@functools.cache
def _templates():
    """The templates; text becomes markup only in them, everything else is escaped.

    A report may lack what an earlier version did not write: then the page shows a dash or nothing,
    as for null.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_resource),
        autoescape=True,
        undefined=jinja2.ChainableUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["num_shades"] = NUM_SHADES
    environment.tests.update(finite=formatting.is_number, interval=formatting.is_interval)
    environment.filters.update(
        {each.__name__: each for each in formatting.FILTERS}, json=_json, shade=shade
    )
    return environment


def _json(values, indent: int | None = None) -> str:
    return json.dumps(values, indent=indent, ensure_ascii=False)


def _resource(name: str) -> str:
    folder = importlib.resources.files("he_keras.evaluation.report").joinpath("templates")
    return folder.joinpath(name).read_text(encoding="utf-8")


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
