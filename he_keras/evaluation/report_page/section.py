"""What a page is made of."""

import dataclasses

from he_keras.evaluation.report_page.markup import Html


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of the page under a heading of its own, which the list of contents links to.

    Attributes:
        anchor: its name in links.
        title: its heading.
        body: its content.
    """

    anchor: str
    title: str
    body: Html
