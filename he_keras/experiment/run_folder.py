"""A run folder: configuration, environment, and files that are complete or absent.

A folder belongs to one configuration; using it with another is an error that names the differences.
"""

import json
import os
import pathlib
import platform
import subprocess

import keras
import numpy as np
import tensorflow as tf

from he_keras.version import __version__


def prepare(folder: pathlib.Path, config: dict) -> None:
    """Creates the folder, or checks that it holds the same configuration."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(
            f"Cannot write to the output folder; expected a writable folder; received {folder}: "
            f"{error}"
        ) from error
    stored = folder / "config.json"
    if stored.exists():
        _check_same(json.loads(stored.read_text()), config, folder)
    write_json(stored, config)
    write_json(folder / "environment.json", environment(config.get("seed", 0)))


def environment(seed: int) -> dict:
    """Versions, machine and commit behind a result."""
    return {
        "he_keras": __version__,
        "keras": keras.__version__,
        "tensorflow": tf.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu_count": os.cpu_count(),
        "devices": [device.name for device in tf.config.list_physical_devices()],
        "seed": seed,
        "commit": _commit(),
    }


def write_json(path: pathlib.Path, content) -> None:
    """Writes JSON under a temporary name, then renames the file."""
    temporary = path.with_name(path.name + ".partial")
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(temporary, path)


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


def _commit() -> str | None:
    """The commit of the source tree that this package runs from, if it is one."""
    root = pathlib.Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    answer = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=40"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    return answer.stdout.strip() or None
