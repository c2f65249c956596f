"""HTML that is escaped by construction: text becomes markup only through `tag`."""

import html
from collections.abc import Iterable

_VOID = frozenset({"br", "col", "hr", "img", "link", "meta"})


class Html(str):
    """Markup that is ready for the page; every other string is text, and gets escaped."""

    __slots__ = ()


def text(content) -> Html:
    """Returns content as markup: escaped, unless it is markup already."""
    if isinstance(content, Html):
        return content
    return Html(html.escape(str(content), quote=True))


def join(parts: Iterable, separator: str = "") -> Html:
    """Puts parts one after the other; None is left out."""
    return Html(separator.join(text(part) for part in parts if part is not None))


def tag(element: str, *children, **attributes) -> Html:
    """Returns one element; children of None and attributes of None or False are left out.

    A trailing underscore of an attribute's name is dropped, any other one becomes a hyphen.

    Example:
        >>> from he_keras.evaluation.report_page.markup import tag
        >>> print(tag("p", "a < b & ", tag("b", "c"), class_="note", data_sort=None))
        <p class="note">a &lt; b &amp; <b>c</b></p>
    """
    written = [element]
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        name = name.rstrip("_").replace("_", "-")
        written.append(name if value is True else f'{name}="{html.escape(str(value))}"')
    opening = f"<{' '.join(written)}>"
    if element in _VOID:
        return Html(opening)
    return Html(f"{opening}{join(children)}</{element}>")
