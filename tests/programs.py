"""Runs the command-line programs for tests, in this process or in one of their own."""

import importlib
import pathlib
import subprocess
import sys

import numpy as np
from absl import flags

from he_keras_tools import cli

ROOT = pathlib.Path(__file__).resolve().parents[1]


def run_here(monkeypatch, capfd, program, *arguments):
    """Returns exit code, standard output and standard error of a program run in this process."""
    before = set(flags.FLAGS)
    arguments = [str(argument) for argument in arguments]
    monkeypatch.setattr(sys, "argv", [f"he-keras {program}", *arguments])
    # "config_config": what the last configuration file defined.
    for module_name in (f"he_keras_tools.{program}", "config_config"):
        sys.modules.pop(module_name, None)
    code = 0
    try:
        module = importlib.import_module(f"he_keras_tools.{program}")
        module.main(cli.parse_flags(module.main, sys.argv))
    except SystemExit as end:
        code = end.code
    finally:
        # Every program has an --output_dir of its own.
        for name in set(flags.FLAGS) - before:
            delattr(flags.FLAGS, name)
    return code, *capfd.readouterr()


def run_process(*command, **options):
    return subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        **options,
    )


def assert_one_line_error(answer, *parts):
    code, out, err = answer
    assert code == 2, err
    assert out == ""
    assert len(err.splitlines()) == 1, err
    assert err.startswith("error: ")
    for part in parts:
        assert part in err


def save_npz(path, shape=(40, 8, 8, 1), num_classes=10, spoil=False):
    images = np.random.RandomState(0).rand(*shape).astype("float32")
    if spoil:
        images[3, 2, 1, 0] = np.nan
    np.savez(path, images=images, labels=np.arange(len(images)) % num_classes)
    return path
