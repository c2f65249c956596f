"""Files that are complete or not there at all, whenever the program is killed."""

import contextlib
import json
import os
import pathlib
from collections.abc import Iterator

import numpy as np


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a temporary path beside `path`, with its suffix, and renames it when all went well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"partial-{path.name}")
    try:
        yield temporary
        os.replace(temporary, path)
    except OSError:
        # A full disk: give back what was taken.
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: pathlib.Path, content) -> None:
    """Writes plain data as JSON."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(content, indent=2) + "\n")


def write_npz(path: pathlib.Path, arrays: dict[str, np.ndarray]) -> None:
    """Writes an .npz file that has reached the disk before it takes the name."""
    with replacing(path) as temporary, open(temporary, "wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
        file.flush()
        os.fsync(file.fileno())


def make_writable(folder: pathlib.Path, purpose: str) -> pathlib.Path:
    """Creates a folder before the work whose result goes there; says so if that cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        # Another program may be at the same and have removed it.
        probe.unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(
            f"Cannot write {purpose}; expected a writable folder; received {folder}: {error}"
        ) from error
    return folder
