"""Things that are found by their names: attacks, objectives, networks, schedules, ..."""

from collections.abc import Callable, Mapping
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

    def register(self, name: str) -> Callable[[Entry], Entry]:
        """Returns a decorator that enters a class or function under a name.

        Example:
            >>> from he_keras.registry import Registry
            >>> shapes = Registry("shape")
            >>> @shapes.register
            ... def square(side):
            ...     return side**2
            Traceback (most recent call last):
            TypeError: A shape without a name; expected @register("name"); received the function ...
        """
        self.check_name(name)

        def decorate(entry: Entry) -> Entry:
            self[name] = entry
            return entry

        return decorate

    def check_name(self, name) -> None:
        """Raises a TypeError for a decorator that was not given a name."""
        if isinstance(name, str) and name:
            return
        kind = "class" if isinstance(name, type) else "function"
        received = f"the {kind} {name.__name__}" if hasattr(name, "__name__") else repr(name)
        article = "An" if self.kind[0] in "aeiou" else "A"
        raise TypeError(
            f'{article} {self.kind} without a name; expected @register("name"); received {received}'
        )

    def __missing__(self, name: str) -> Entry:
        raise unknown_name(self.kind, name, self.names())

    def copy(self) -> "Registry[Entry]":
        """Returns a registry of the same entries."""
        return Registry(self.kind, self)

    def names(self) -> list[str]:
        """Returns the names, sorted."""
        return sorted(self)
