"""A run folder: configuration, environment, and files that are complete or absent.

A folder belongs to one configuration; using it with another is an error that names the differences.
"""

import contextlib
import pathlib
from collections.abc import Iterator

from he_keras.configurable import flat_settings
from he_keras.environment import environment
from he_keras.files import lock, make_writable, read_json, write_json


def prepare(folder: pathlib.Path, config: dict, defaults: dict) -> None:
    """Creates the folder, or checks that it holds the same configuration.

    `defaults` has the values of keys that were introduced after the folder was made.
    """
    make_writable(folder, "to the output folder")
    stored = folder / "config.json"
    if stored.exists():
        before = {**flat_settings(defaults), **flat_settings(read_json(stored))}
        _check_same(before, flat_settings(config), folder)
    write_json(stored, config)
    _record_environment(folder / "environment.json", {**environment(), "seed": config.get("seed")})


@contextlib.contextmanager
def held(folder: pathlib.Path, verb: str) -> Iterator[None]:
    """Makes a folder and holds it for this process; refuses a folder that another process holds.

    Nothing is held if the system or the file system has no locks. `verb` is what one process at a
    time may do there: "trains".
    """
    make_writable(folder, "to the output folder")
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock(folder / ".lock"))
        except BlockingIOError as error:
            raise ValueError(
                f"Another process {verb} into this folder; expected a folder of its own, or to "
                f"wait until that one has ended; received {folder}"
            ) from error
        yield


def _record_environment(path: pathlib.Path, now: dict) -> None:
    """Records the environment that the run began in, and adds those that resumed it."""
    if not path.exists():
        write_json(path, now)
        return
    first = read_json(path)
    later = first.pop("resumed_in", [])
    if now not in (first, *later):
        write_json(path, {**first, "resumed_in": [*later, now]})


def _check_same(before: dict, now: dict, folder: pathlib.Path) -> None:
    different = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    if different:
        changes = ", ".join(f"{key}: {before.get(key)!r} -> {now.get(key)!r}" for key in different)
        raise ValueError(
            "The output folder holds a run with another configuration; expected the same one or "
            "a new folder; "
            f"received {folder} with {changes}"
        )
