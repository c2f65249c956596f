"""A run folder: configuration, environment, and files that are complete or absent.

A folder belongs to one configuration; using it with another is an error that names the differences.
"""

import json
import pathlib

from he_keras.atomic_files import make_writable, write_json
from he_keras.environment import environment


def prepare(folder: pathlib.Path, config: dict) -> None:
    """Creates the folder, or checks that it holds the same configuration."""
    make_writable(folder, "to the output folder")
    stored = folder / "config.json"
    if stored.exists():
        _check_same(read_json(stored), config, folder)
    write_json(stored, config)
    _record_environment(folder / "environment.json", {**environment(), "seed": config.get("seed")})


def read_json(path: pathlib.Path) -> dict:
    """Reads a JSON file, with one clear error where there is none or it is damaged."""
    try:
        content = json.loads(path.read_text())
        if not isinstance(content, dict):
            raise ValueError(f"{type(content).__name__} instead of an object")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"Cannot read {path.name}; expected a file written by a run; received {path}: {error}"
        ) from error
    return content


def _record_environment(path: pathlib.Path, now: dict) -> None:
    """Keeps the environment that the run began in; another one that resumes it is added."""
    if not path.exists():
        write_json(path, now)
        return
    first = read_json(path)
    later = first.pop("resumed_in", [])
    if now not in (first, *later):
        write_json(path, {**first, "resumed_in": [*later, now]})


def _check_same(stored: dict, config: dict, folder: pathlib.Path) -> None:
    before, now = _flatten(stored), _flatten(config)
    different = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    if different:
        changes = ", ".join(f"{key}: {before.get(key)!r} -> {now.get(key)!r}" for key in different)
        raise ValueError(
            "The output folder holds a run with another configuration; expected the same one or "
            "a new folder; "
            f"received {folder} with {changes}"
        )


def _flatten(tree: dict, prefix: str = "") -> dict:
    flat = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
