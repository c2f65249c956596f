"""`--import=MODULE`, which every program takes: parts of one's own, known by their names.

A module registers its attacks, objectives, networks, schedules and data sets when it is imported.
"""

import importlib
import importlib.util
import pathlib
import sys

FLAG = "--import"
#: What was given, in order.
imported: list[str] = []


def without_imports(argv: list[str]) -> list[str]:
    """Imports the modules that the command line names, and returns the other arguments."""
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
    imported[:] = [name for value in given for name in value.split(",") if name]
    for name in imported:
        _import(name)
    return rest


def module_of(name: str) -> str:
    """The name of a module that is given by its name or by its file."""
    return pathlib.Path(name).stem if name.endswith(".py") else name


def _import(name: str) -> None:
    module = module_of(name)
    if module in sys.modules:
        return
    # Behind all others: a file here cannot hide an installed package.
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
            f"{type(error).__name__}: {error}"
        ) from error
    finally:
        sys.path.remove(folder)
