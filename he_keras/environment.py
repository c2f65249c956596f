"""The versions, the machine and the commit that a result depends on."""

import os
import pathlib
import platform
import subprocess

import keras
import numpy as np
import tensorflow as tf

from he_keras.version import __version__


def environment() -> dict:
    """Returns what a result depends on apart from its configuration, as plain data."""
    return {
        "he_keras": __version__,
        "keras": keras.__version__,
        "tensorflow": tf.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu_count": os.cpu_count(),
        "devices": [device.name for device in tf.config.list_physical_devices()],
        "commit": _commit(),
    }


def _commit() -> str | None:
    """The commit of the source tree that this package runs from, if it is one."""
    root = pathlib.Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    try:
        answer = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40"],
            cwd=root,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return None
    return answer.stdout.strip() or None
