"""`--import=MODULE`, which every program takes: parts of one's own, known by their names.

A module registers its attacks, objectives, networks, schedules and data sets when it is imported.
"""

import importlib
import importlib.util
import pathlib
import sys

from he_keras.arguments import reason_of

FLAG = "--import"
#: What was given, in order.
imported: list[str] = []


def split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Returns the arguments without this flag, and the modules that it names."""
    rest, given = [], []
    waits = False
    for argument in argv:
        flag, equals, value = argument.partition("=")
        if waits:
            given.append(argument)
        elif flag in (FLAG, FLAG[1:]):
            given += [value] if equals else []
        else:
            rest.append(argument)
        waits = not waits and flag in (FLAG, FLAG[1:]) and not equals
    return rest, [name for value in given for name in value.split(",") if name]


def import_all(names: list[str]) -> None:
    """Imports the modules that the command line names."""
    imported[:] = names
    for name in names:
        _import(name)


def module_of(name: str) -> str:
    """The name of a module that is given by its name or by its file."""
    return pathlib.Path(name).stem if name.endswith(".py") else name


def _import(name: str) -> None:
    module = module_of(name)
    if module in sys.modules:
        return
    # At the end of the path, where a file here cannot hide an installed package.
    folder = (
        str(pathlib.Path(name).resolve().parent)
        if name.endswith(".py")
        else str(pathlib.Path.cwd())
    )
    sys.path.append(folder)
    try:
        if importlib.util.find_spec(module) is None:
            raise ValueError(
                f"No such module; expected {FLAG}=NAME of a file NAME.py here, or of an installed "
                f"package; received {FLAG}={name}"
            )
        importlib.import_module(module)
    except ValueError:
        raise
    # A module is a program: anything can go wrong in it.
    except Exception as error:
        raise ValueError(
            f"Cannot import {name}; expected a module that registers its parts; received "
            f"{type(error).__name__}: {reason_of(error)}"
        ) from error
    finally:
        sys.path.remove(folder)
