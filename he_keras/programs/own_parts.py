"""`--import=MODULE`, which every program takes: parts of one's own, known by their names.

A module registers its attacks, objectives, networks, schedules and data sets when it is imported.
"""

import importlib
import importlib.util
import pathlib
import sys
import traceback

from he_keras.arguments import PLACE, reason_of

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
    except SystemExit as error:
        raise ValueError(
            f"Cannot import {name}; expected a module that registers its parts; received one that "
            "ends the program: put what shall run as a program under if __name__ == '__main__'"
        ) from error
    # A module is a program: anything can go wrong in it.
    except Exception as error:
        raise ValueError(
            f"Cannot import {name}; expected a module that registers its parts; received "
            f"{type(error).__name__}: {reason_of(error)}"
        ) from error
    finally:
        sys.path.remove(folder)


def sentence_of(error: BaseException) -> str:
    """Returns what to say of an error that comes from an imported module; "" for any other."""
    place = _place(error) if imported else ""
    if not place or "; expected" in str(error):
        return ""
    return (
        "A part of your own does not run; expected an attack, an objective, ... without errors; "
        f"received {type(error).__name__}: {_reason(error)} ({place})"
    )


def _place(error: BaseException) -> str:
    """The innermost line of an imported module that an error came through."""
    found: list[tuple[str, int | str]] = []
    cause: BaseException | None = error
    while cause is not None:
        frames = traceback.extract_tb(cause.__traceback__)
        found += [(frame.filename, frame.lineno or 0) for frame in frames]
        # TensorFlow's errors tell in their text where their operations were made.
        found += PLACE.findall(str(cause))
        cause = cause.__cause__
    own = [(file, line) for file, line in found if _is_own(file)]
    return f"{own[-1][0]}, line {own[-1][1]}" if own else ""


def _is_own(file: str) -> bool:
    modules = [sys.modules.get(module_of(name)) for name in imported]
    files = [pathlib.Path(each.__file__) for each in modules if each and each.__file__]
    path = pathlib.Path(file)
    return any(
        path == each or (each.name == "__init__.py" and each.parent in path.parents)
        for each in files
    )


def _reason(error: BaseException) -> str:
    """The error in a line; TensorFlow's comes after the places of all operations around it."""
    if not PLACE.search(str(error)):
        return reason_of(error)
    lines = [line.strip() for line in str(error).splitlines()]
    told = "\n".join(line for line in lines if not line.startswith("[[{{")).strip()
    return reason_of(ValueError(told.rpartition("\n\n")[2]))
