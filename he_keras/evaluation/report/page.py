"""Fills the templates: each section's own, then the frame around all of them."""

import base64
import functools
import hashlib
import importlib.resources
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from he_keras.evaluation.report import formatting
from he_keras.version import __version__

#: Shades of a heat map, from none to strongest; style.css has a colour for each.
NUM_SHADES = 6


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
