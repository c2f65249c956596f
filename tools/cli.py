"""`he-keras train|evaluate|export`: the programs of this folder under one name."""

import contextlib
import importlib
import sys

_PROGRAMS = ("train", "evaluate", "export", "quickstart", "benchmark")


@contextlib.contextmanager
def one_line_errors():
    """Turns errors about the user's input into one line and exit code 2."""
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
        fail(str(error) or type(error).__name__)


def fail(message: str) -> None:
    """Prints one line and exits with code 2."""
    print(f"error: {' '.join(str(message).split())}", file=sys.stderr)
    raise SystemExit(2)


def run(main, positional: int = 0) -> None:
    """Runs an absl program; mistakes in its flags end in one line and exit code 2.

    `positional` is the number of arguments that are not flags.
    """
    from absl import app

    app.run(main, flags_parser=lambda argv: _parse_flags(argv, positional))


def _parse_flags(argv, positional: int):
    from absl import flags

    with one_line_errors():
        try:
            arguments = flags.FLAGS(argv)
        except flags.Error as error:
            fail(error)
    if flags.FLAGS.help or flags.FLAGS.helpshort:
        print(flags.FLAGS.main_module_help())
        raise SystemExit(0)
    if len(arguments) > 1 + positional:
        extra = " ".join(arguments[1 + positional :])
        fail(f"Unknown argument; expected only --flags; received {extra}")
    return arguments


def main() -> None:
    """Entry point of the installed command."""
    if len(sys.argv) < 2 or sys.argv[1] not in _PROGRAMS:
        received = sys.argv[1] if len(sys.argv) > 1 else "nothing"
        fail(f"Unknown program; expected he-keras {'|'.join(_PROGRAMS)}; received {received}")
    name = sys.argv.pop(1)
    program = importlib.import_module(f"he_keras_tools.{name}")
    run(program.main, getattr(program, "POSITIONAL", 0))
