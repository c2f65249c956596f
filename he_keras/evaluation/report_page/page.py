"""The frame of a page: head with style and script inside, list of contents, sections."""

import base64
import hashlib
import importlib.resources
from collections.abc import Sequence

from he_keras.evaluation.report_page.markup import Html, join, tag
from he_keras.evaluation.report_page.section import Section
from he_keras.version import __version__


def page(kicker: str, title: str, remarks: Sequence[str], sections: Sequence[Section]) -> str:
    """Returns a whole document that needs no other file and no network.

    Args:
        kicker: the kind of page.
        title: its subject.
        remarks: short facts below the title.
        sections: its content.
    """
    body = tag(
        "body",
        tag("a", "Skip to the result", href="#main", class_="skip"),
        _masthead(kicker, title, remarks),
        tag("div", _contents(sections), _main(sections), class_="columns"),
        tag("footer", tag("p", f"Written by he_keras {__version__}.")),
        tag("p", id="announcement", role="status", class_="hidden"),
        _script(),
    )
    return "<!doctype html>\n" + tag("html", _head(f"{title} – {kicker}"), body, lang="en") + "\n"


def _head(title: str) -> Html:
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", http_equiv="Content-Security-Policy", content=_content_policy()),
        tag("title", title),
        # Keeps browsers from asking a server for an icon.
        tag("link", rel="icon", href="data:,"),
        tag("style", Html(_resource("style.css"))),
    )


def _content_policy() -> str:
    """Forbids every request, and every script but ours, whatever may stand in the data."""
    digest = hashlib.sha256(_resource("script.js").encode("utf-8")).digest()
    script = base64.b64encode(digest).decode("ascii")
    return (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{script}'; base-uri 'none'; form-action 'none'"
    )


def _script() -> Html:
    return tag("script", Html(_resource("script.js")))


def _resource(name: str) -> str:
    resource = importlib.resources.files("he_keras.evaluation.report_page").joinpath(name)
    return resource.read_text(encoding="utf-8")


def _masthead(kicker: str, title: str, remarks: Sequence[str]) -> Html:
    return tag(
        "header",
        tag("p", kicker, class_="kicker"),
        tag("h1", title),
        tag("p", join(remarks, " · "), class_="remark"),
        class_="masthead",
    )


def _contents(sections: Sequence[Section]) -> Html:
    links = [tag("li", tag("a", section.title, href=f"#{section.anchor}")) for section in sections]
    return tag("nav", tag("ul", *links), aria_label="Contents", class_="contents")


def _main(sections: Sequence[Section]) -> Html:
    parts = []
    for section in sections:
        heading = f"{section.anchor}-heading"
        parts.append(
            tag(
                "section",
                tag("h2", section.title, id=heading),
                section.body,
                id=section.anchor,
                aria_labelledby=heading,
            )
        )
    return tag("main", *parts, id="main", tabindex="-1")
