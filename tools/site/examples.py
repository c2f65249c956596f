"""An extension of griffe: the section "Example:" of a docstring is code, as "Examples:" is."""

import griffe


class Examples(griffe.Extension):
    """Renames the section, which griffe otherwise takes for plain text."""

    def on_object(self, *, obj, **_) -> None:
        """Called for every object that griffe has read."""
        if obj.docstring is not None:
            text = obj.docstring.value
            obj.docstring.value = text.replace("\nExample:\n", "\nExamples:\n")
