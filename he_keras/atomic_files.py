"""Files that are complete or not there at all, whenever the program is killed."""

import contextlib
import json
import os
import pathlib
from collections.abc import Iterator


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a temporary path beside `path`, with its suffix, and renames it when all went well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"partial-{path.name}")
    yield temporary
    os.replace(temporary, path)


def write_json(path: pathlib.Path, content) -> None:
    """Writes plain data as JSON."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(content, indent=2) + "\n")


def make_writable(folder: pathlib.Path, purpose: str) -> pathlib.Path:
    """Creates a folder before the work whose result goes there; says so if that cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(
            f"Cannot write {purpose}; expected a writable folder; received {folder}: {error}"
        ) from error
    return folder
