"""Checks of names on the command line before TensorFlow is loaded, which takes seconds.

The names are read from the files that register them. A part of one's own may have any name, so
nothing is checked where there is `--import`. Later, the registries check every name once more.
"""

import functools
import pathlib
import re
import sys

from he_keras.arguments import unknown_name
from he_keras.attacks.attack_names import Entry, look_up
from he_keras.programs import own_parts

_PACKAGE = pathlib.Path(__file__).parents[1]
_CALL = re.compile(r"^@?register(?:_pattern)?\(\s*\"([^\"]+)\"(.*)$", re.MULTILINE)
_OPTION = re.compile(r"(\w+)=\"(\w+)\"")
_NUMBER = re.compile(r"\\{\w+\\}")
#: The keys of a configuration that name a part: of which folder, and what it is called.
_KEYS = {
    "--config.network.name": ("networks", "network"),
    "--config.objective.name": ("objectives", "objective"),
}


@functools.cache
def entries(folder: str) -> dict[str, dict[str, str]]:
    """Returns what is registered in a folder of the package, with the texts among its options.

    Example:
        >>> from he_keras.programs.registered import entries
        >>> entries("attacks")["pgd"]
        {'budget': 'num_steps'}
    """
    texts = [path.read_text(encoding="utf-8") for path in sorted((_PACKAGE / folder).glob("*.py"))]
    return {
        name: dict(_OPTION.findall(options))
        for text in texts
        for name, options in _CALL.findall(text)
    }


def _has_own_parts() -> bool:
    return bool(own_parts.split(sys.argv)[1])


def _with_hint(error: ValueError) -> ValueError:
    return ValueError(f"{error} (a part of your own needs --import=MODULE)")


def check_attacks(names) -> None:
    """Raises a ValueError unless attacks of the package have these names."""
    if names is not None and not names:
        raise ValueError("No attacks; expected --attacks=NAME,NAME; received an empty list")
    found = entries("attacks")
    known = {name: Entry(None, o.get("budget"), o.get("argument")) for name, o in found.items()}
    for name in [] if _has_own_parts() else names or ():
        try:
            look_up(name, known)
        except ValueError as error:
            raise _with_hint(error) from None


def check_part(kind: str, folder: str, name: str) -> None:
    """Raises a ValueError unless a part in a folder of the package has this name."""
    known = entries(folder)
    forms = (_NUMBER.sub("[0-9]+", re.escape(each)) for each in known)
    if not _has_own_parts() and not any(re.fullmatch(form, name) for form in forms):
        raise _with_hint(unknown_name(kind, name, known))


def check_overrides(arguments) -> None:
    """Raises a ValueError for an override of a configuration that names no part there is."""
    for argument in arguments:
        key, _, name = argument.partition("=")
        if key in _KEYS and name:
            folder, kind = _KEYS[key]
            check_part(kind, folder, name)
