"""Tables: captions, header cells with scope, a scroll box around each, shades of heat maps."""

import dataclasses
from collections.abc import Iterable, Sequence

from he_keras.evaluation.report_page.formatting import is_number
from he_keras.evaluation.report_page.markup import Html, join, tag

#: Shades of a heat map, from none to strongest; style.css has a colour for each.
NUM_SHADES = 6


@dataclasses.dataclass(frozen=True)
class Column:
    """A column's header.

    Attributes:
        title: what stands in the header.
        numeric: numbers: aligned to the right, sorted as numbers.
        sorts: the reader may sort by it, in a table that is sortable.
        hint: what the title stands for, where it is short.
    """

    title: str
    numeric: bool = True
    sorts: bool = True
    hint: str | None = None


def cell(content, value=None, kind: str = "", element: str = "td", **attributes) -> Html:
    """A cell; `value` is what its column is sorted by, where that is not its text."""
    if is_number(value):
        attributes["data_value"] = repr(value)
    return tag(element, content, class_=kind or None, **attributes)


def number(content, value=None, kind: str = "", **attributes) -> Html:
    """A cell with a number."""
    return cell(content, value, f"number {kind}".strip(), **attributes)


def row_header(content, kind: str = "", **attributes) -> Html:
    """The header cell of a row."""
    return cell(content, kind=kind, element="th", scope="row", **attributes)


def row(*cells, kind: str = "") -> Html:
    """A table row."""
    return tag("tr", *cells, class_=kind or None)


def table(
    anchor: str,
    caption,
    columns: Sequence[Column],
    bodies: Iterable[Sequence],
    sortable: bool = False,
    kind: str = "",
) -> Html:
    """A table in a box of its own that scrolls where the page is too narrow.

    Args:
        anchor: name of the table on the page.
        caption: what the table shows.
        columns: its header.
        bodies: groups of rows; a sortable table with several groups is sorted by their first rows,
            which keeps each group together.
        sortable: script.js makes buttons of the headers.
        kind: class of the table.
    """
    head = row(*(_header(column, sortable) for column in columns))
    inner = tag(
        "table",
        # Stays in sight where the table is wider than its box.
        tag("caption", tag("span", caption), id=f"{anchor}-caption"),
        tag("thead", head),
        *(tag("tbody", *rows) for rows in bodies),
        id=anchor,
        class_=kind or None,
        data_sortable=sortable,
    )
    return scroll_box(inner, f"{anchor}-caption")


def scroll_box(content, label_id: str) -> Html:
    """A region that scrolls by touch, mouse and arrow keys."""
    return tag(
        "div", content, class_="scroll", role="region", aria_labelledby=label_id, tabindex="0"
    )


def glossary(columns: Sequence[Column]) -> Html:
    """Says what the columns with short titles mean, to those who cannot point at a header too."""
    entries = [
        join([tag("dt", column.title), tag("dd", column.hint)]) for column in columns if column.hint
    ]
    words = tag("summary", "What the columns mean")
    return tag("details", words, tag("dl", *entries, class_="glossary"))


def _header(column: Column, sortable: bool) -> Html:
    sorts = ("number" if column.numeric else "text") if sortable and column.sorts else None
    return tag(
        "th",
        column.title,
        scope="col",
        class_="number" if column.numeric else None,
        title=column.hint,
        data_sorts=sorts,
    )


def shade(strength: float) -> str:
    """The class of a heat-map cell; `strength` runs from 0 to 1."""
    if not is_number(strength):
        return "shade-0"
    level = round(min(max(strength, 0.0), 1.0) * (NUM_SHADES - 1))
    return f"shade-{level}"


def legend(low: str, high: str) -> Html:
    """Says what the shades of a heat map mean."""
    swatches = [
        tag("span", class_=f"swatch shade-{level}", aria_hidden="true")
        for level in range(NUM_SHADES)
    ]
    return tag("p", tag("span", low), *swatches, tag("span", high), class_="legend")


def accuracy_bar(share, bounds=None) -> Html | None:
    """A bar with a whisker for the interval; decoration beside the number, which says the same."""
    if not is_number(share):
        return None
    style = f"--share:{100.0 * share:.2f}%"
    whisker = None
    if bounds and len(bounds) == 2 and all(map(is_number, bounds)):
        low, high = bounds
        style += f";--low:{100.0 * low:.2f}%;--spread:{100.0 * (high - low):.2f}%"
        whisker = tag("span", class_="whisker")
    return tag("span", whisker, class_="bar", style=style, aria_hidden="true")


def paragraphs(*texts) -> Html:
    """One paragraph for each text."""
    return join(tag("p", each) for each in texts if each is not None)
