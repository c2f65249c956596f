"""An extension of griffe: docstrings of this package as mkdocstrings shows them."""

import re

import griffe

#: Sections that griffe knows; it takes any other label for plain text or for a box.
_KNOWN = ("Args", "Attributes", "Examples", "Raises", "Returns", "Yields")
_LABEL = re.compile(r"(?P<label>[A-Z][a-z]+): (?P<text>\S.*)")


class Examples(griffe.Extension):
    """Makes code of the section "Example:", and a paragraph of "Paper: ..." and the like."""

    def on_object(self, *, obj, **_) -> None:
        """Called for every object that griffe has read."""
        if obj.docstring is not None:
            text = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
            obj.docstring.value = _with_paragraphs(text)


def _with_paragraphs(text: str) -> str:
    lines, is_labelled = [], False
    for line in text.splitlines():
        found = _LABEL.fullmatch(line)
        if found and found["label"] not in _KNOWN:
            lines += ["", f"**{found['label']}:** {found['text']}"]
            is_labelled = True
        elif is_labelled and line.startswith("    "):
            lines.append(line.strip())
        else:
            is_labelled = False
            lines.append(line)
    return "\n".join(lines)
