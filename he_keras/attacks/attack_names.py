"""What the name of an attack says: "pgd-20" is "pgd" with its budget set to 20.

This file needs no TensorFlow, so that a program can check names before it is loaded.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from he_keras.arguments import suggestion


class Entry(NamedTuple):
    """A factory, and the names of the arguments that a number or a text in the name sets."""

    factory: Any
    budget: str | None
    argument: str | None


def patterns(entries: Mapping[str, Entry]) -> list[str]:
    """Returns the names, with K for a number and the name of a text after a colon."""
    return sorted(_pattern(name, entry) for name, entry in entries.items())


def _pattern(name: str, entry: Entry) -> str:
    if entry.argument:
        return f"{name}:{entry.argument.upper()}"
    return f"{name}-K" if entry.budget else name


def look_up(attack: str, entries: Mapping[str, Entry], what: str = "attack") -> tuple[Entry, dict]:
    """Returns the entry that is named, and the arguments that the name sets.

    Args:
        attack: the name.
        entries: the entries, by their names without a number.
        what: what an error calls them.

    Example:
        >>> from he_keras.attacks.attack_names import Entry, look_up
        >>> look_up("pgd-20", {"pgd": Entry(None, "num_steps", None)})[1]
        {'num_steps': 20}
    """
    base, colon, text = attack.partition(":")
    entry = entries.get(base.lower())
    if colon:
        if entry is not None and entry.argument and text:
            return entry, {entry.argument: text}
    elif entry is not None and not entry.argument:
        return entry, {}
    else:
        base, _, number = attack.lower().rpartition("-")
        entry = entries.get(base)
        if entry is not None and entry.budget and number.isdigit():
            return entry, {entry.budget: int(number)}
    digits = re.search(r"-\d+$", attack)
    all_names = patterns(entries)
    known = [each.replace("-K", digits.group() if digits else "-K") for each in all_names]
    raise ValueError(
        f"Unknown {what}; expected one of {', '.join(all_names)} (K: a number); received "
        f"{attack!r}{suggestion(attack, known)}"
    )


def with_given(attack: str, given: dict, options: dict) -> dict:
    """Returns options, and what the name sets; an error where an option contradicts the name."""
    for argument, value in given.items():
        if options.get(argument, value) != value:
            raise ValueError(
                f"{argument} is given twice; expected it in the name or as an option; "
                f"received {attack!r} and {argument}={options[argument]!r}"
            )
    return {**options, **given}
