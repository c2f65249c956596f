"""Things that are found by their names: attacks, objectives, networks, schedules, ..."""

from collections.abc import Mapping
from typing import TypeVar

from he_keras.arguments import unknown_name

Entry = TypeVar("Entry")


class Registry(dict[str, Entry]):
    """A dictionary that refuses a name given twice, and lists its names if one is unknown.

    Args:
        kind: what the entries are, as errors say it.
        entries: the first entries.

    Example:
        >>> from he_keras.registry import Registry
        >>> colours = Registry("colour", {"red": 0xFF0000})
        >>> colours["green"] = 0x00FF00
        >>> colours["gren"]
        Traceback (most recent call last):
        ValueError: Unknown colour; expected one of green, red; received 'gren'; did you mean ...
        >>> colours["red"] = 0xAA0000
        Traceback (most recent call last):
        ValueError: Colour registered twice; expected a new name; received 'red'
    """

    def __init__(self, kind: str, entries: Mapping[str, Entry] | None = None):
        super().__init__(entries or {})
        self.kind = kind

    def __setitem__(self, name: str, entry: Entry) -> None:
        if name in self:
            raise ValueError(
                f"{self.kind.capitalize()} registered twice; expected a new name; received {name!r}"
            )
        super().__setitem__(name, entry)

    def __missing__(self, name: str) -> Entry:
        raise unknown_name(self.kind, name, self.names())

    def copy(self) -> "Registry[Entry]":
        """Returns a registry of the same entries."""
        return Registry(self.kind, self)

    def names(self) -> list[str]:
        """Returns the names, sorted."""
        return sorted(self)
