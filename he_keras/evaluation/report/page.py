"""What the pages share: numbers as text, templates, and pictures small enough for one page.

What is missing or not finite shows as a dash. Each section has a template of its own, and the frame
stands around all of them. Images become PNG data URIs.
"""

import base64
import dataclasses
import datetime
import functools
import hashlib
import importlib.resources
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from he_keras.drawing import png
from he_keras.threat import fraction_of_255
from he_keras.version import __version__

#: Stands for what was not measured.
MISSING = "–"
#: Shades of a heat map, from none to strongest; style.css has a colour for each.
NUM_SHADES = 6
#: Bytes that all pictures of a page may take together: chosen so that the page stays below 3 MB.
PICTURE_BUDGET = 2_200_000
_NORM_NAMES = {"linf": "L∞", "l2": "L2", "l1": "L1"}
# Longest sides to try where the pictures are too many bytes at full size.
_SHRUNK_SIDES = (160, 128, 112, 96, 80, 64, 48, 32)


def is_number(value) -> bool:
    """True for a finite number; None, NaN, infinity and text are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_interval(bounds) -> bool:
    """True for a pair of finite numbers."""
    return bool(bounds) and len(bounds) == 2 and all(map(is_number, bounds))


def percent(share, decimals: int = 2) -> str:
    """0.5261 -> 52.61%."""
    return f"{100.0 * share:.{decimals}f}%" if is_number(share) else MISSING


def points(difference) -> str:
    """A difference of two shares in percentage points, with its sign."""
    if not is_number(difference):
        return MISSING
    return f"{100.0 * difference:+.2f}".replace("-", "−")


def point_range(bounds) -> str:
    """[-0.011, 0.0166] -> −1.10 to +1.66."""
    return " to ".join(map(points, bounds)) if is_interval(bounds) else MISSING


def interval(bounds) -> str:
    """[0.516, 0.5359] -> 51.60 to 53.59%."""
    if not is_interval(bounds):
        return MISSING
    low, high = bounds
    return f"{100.0 * low:.2f} to {100.0 * high:.2f}%"


def count(number) -> str:
    """10000 -> 10,000."""
    return f"{number:,.0f}" if is_number(number) else MISSING


def passes(number) -> str:
    """Mean number of passes for one example: whole where it is large."""
    if not is_number(number):
        return MISSING
    return f"{number:,.0f}" if number >= 100 or number == int(number) else f"{number:,.1f}"


def significant(number, digits: int = 4) -> str:
    """A distance or a margin, with a true minus sign."""
    return f"{number:.{digits}g}".replace("-", "−") if is_number(number) else MISSING


def duration(seconds) -> str:
    """75 -> 1 min 15 s."""
    if not is_number(seconds):
        return MISSING
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def moment(written) -> str | None:
    """An ISO 8601 date and time as people write it, in UTC; other text as it is."""
    try:
        parsed = datetime.datetime.fromisoformat(written)
    except (TypeError, ValueError):
        return None if written is None else str(written)
    if parsed.tzinfo is None:
        return parsed.strftime("%Y-%m-%d %H:%M")
    return parsed.astimezone(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def norm_name(norm) -> str:
    """The norm as mathematicians write it."""
    return _NORM_NAMES.get(norm, str(norm))


def epsilon_in_pixels(epsilon, bounds) -> str | None:
    """Epsilon as a fraction of 255, if it is one and pixels run from 0 to 1."""
    if not is_number(epsilon) or list(bounds or ()) != [0, 1]:
        return None
    return fraction_of_255(epsilon)


def epsilon_text(threat: dict, epsilon=None) -> str:
    """A radius, by default the threat model's, as it is usually quoted, then the plain number."""
    epsilon = threat.get("epsilon") if epsilon is None else epsilon
    fraction = None
    if threat.get("norm") == "linf":
        fraction = epsilon_in_pixels(epsilon, threat.get("bounds"))
    return f"{fraction} ({significant(epsilon)})" if fraction else significant(epsilon)


def short_epsilon(threat: dict) -> str:
    """Epsilon as it is usually quoted, alone."""
    return epsilon_text(threat).partition(" (")[0]


def pixels(threat: dict) -> str:
    """The values that pixels may have."""
    low, high = (significant(bound) for bound in threat.get("bounds") or (None, None))
    return f"pixels from {low} to {high}"


def threat_text(threat: dict) -> str:
    """The threat model in one line."""
    return f"{norm_name(threat.get('norm'))}, ε = {epsilon_text(threat)}, {pixels(threat)}"


def p_value(probability) -> str:
    """A p-value; a very small one as a bound."""
    if not is_number(probability):
        return MISSING
    return "< 0.0001" if probability < 1e-4 else f"{probability:.2g}"


def sentence(text) -> str:
    """A remark as a sentence."""
    return f"{str(text)[:1].upper()}{str(text)[1:]}."


def css_percent(share: float) -> str:
    """A share as a length in a style."""
    return f"{100.0 * share:.2f}%"


# What templates may apply to a value, under the functions' own names.
_FILTERS = (
    count,
    css_percent,
    duration,
    epsilon_text,
    interval,
    moment,
    norm_name,
    p_value,
    passes,
    percent,
    pixels,
    point_range,
    points,
    sentence,
    short_epsilon,
    significant,
    threat_text,
)


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


def notebook_table(
    caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]], remarks: Sequence[str]
) -> str:
    """Returns a table that a notebook shows, without style or script.

    Example:
        >>> from he_keras.evaluation.report.page import notebook_table
        >>> "<td>71.1%</td>" in notebook_table("Accuracy", ["Attack", "%"], [["pgd", "71.1%"]], [])
        True
    """
    values = {"caption": caption, "columns": columns, "rows": rows, "remarks": remarks}
    return _templates().get_template("notebook.html.jinja").render(values)


def shade(strength: float) -> str:
    """The class of a heat map's cell; `strength` runs from 0 to 1."""
    if not is_number(strength):
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
    environment.tests.update(finite=is_number, interval=is_interval)
    environment.filters.update({each.__name__: each for each in _FILTERS}, json=_json, shade=shade)
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


def make_album(clean: np.ndarray, adversarial: np.ndarray, bounds) -> Album:
    """Encodes every example, shrunk just as far as the budget asks for."""
    original = max(clean.shape[1:3])
    sides = [original, *(side for side in _SHRUNK_SIDES if side < original)]
    for side in sides:
        triples = tuple(
            _triple(*pair, bounds, side) for pair in zip(clean, adversarial, strict=True)
        )
        size = sum(len(each.clean + each.adversarial + each.difference) for each in triples)
        if size <= PICTURE_BUDGET:
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
