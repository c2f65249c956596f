"""Runs the command-line programs for tests, in this process or in one of their own."""

import contextlib
import importlib
import pathlib
import subprocess
import sys

import numpy as np
from absl import flags

import he_keras_cli
from he_keras import programs
from he_keras.programs import cli

ROOT = pathlib.Path(__file__).resolve().parents[2]


def _forget_programs():
    """A program defines its flags on import; "config_config" is the last configuration file."""
    sys.modules.pop("config_config", None)
    for name in [name for name in sys.modules if name.startswith("he_keras.programs.")]:
        if sys.modules[name] is not cli:
            del sys.modules[name]
            delattr(programs, name.rpartition(".")[2])
    for name in list(flags.FLAGS):
        if str(flags.FLAGS.find_module_defining_flag(name)).startswith("he_keras.programs."):
            delattr(flags.FLAGS, name)


def run_here(monkeypatch, capfd, program, *arguments):
    """Returns exit code, standard output and standard error of a program run in this process."""
    arguments = [str(argument) for argument in arguments]
    program, argv = he_keras_cli.present_form(program, [f"he-keras {program}", *arguments])
    monkeypatch.setattr(sys, "argv", argv)
    # It would end the process of all tests at the next test's Ctrl-C.
    monkeypatch.setattr(cli, "end_at_once_on_interrupt", lambda message: None)
    code = 0
    try:
        with loaded(program) as module:
            module.main(cli.parse_flags(module.main, sys.argv))
    except SystemExit as end:
        code = end.code
    return code, *capfd.readouterr()


@contextlib.contextmanager
def loaded(program):
    """The module of a program with its flags defined, which are gone afterwards."""
    _forget_programs()
    before = set(flags.FLAGS)
    try:
        yield importlib.import_module(f"he_keras.programs.{program}")
    finally:
        # Every program has an --output_dir of its own.
        for name in set(flags.FLAGS) - before:
            delattr(flags.FLAGS, name)


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
    # What was found out about an ordinary classifier is said before it is attacked.
    assert [line for line in out.splitlines() if not line.startswith("Model: ")] == []
    assert len(err.splitlines()) == 1, err
    assert err.startswith("error: ")
    for part in parts:
        assert part in err


def save_npz(path, shape=(40, 8, 8, 1), num_classes=10, spoil=False):
    images = np.random.RandomState(0).rand(*shape).astype("float32")
    if spoil:
        images[3, 2, 1, 0] = np.nan
    labels = np.arange(len(images)) % num_classes
    np.savez(path, x_train=images, y_train=labels, x_test=images, y_test=labels)
    return path
