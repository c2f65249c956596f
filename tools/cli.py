"""`he-keras train|evaluate|search|...`: the programs of this folder under one name."""

import contextlib
import functools
import importlib
import os
import shlex
import signal
import sys
import threading

from he_keras_tools import interrupts

# Before anything imports TensorFlow, which reads it then.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

_PROGRAMS = (
    "train",
    "evaluate",
    "analyze",
    "search",
    "export",
    "serve",
    "quickstart",
    "benchmark",
)
_USAGE = f"usage: he-keras {'|'.join(_PROGRAMS)} --flags (he-keras PROGRAM --help lists them)"
_INTERRUPTED = "Interrupted"
_INTERRUPTED_CODE = 130


@contextlib.contextmanager
def one_line_errors():
    """Turns errors about the user's input into one line and exit code 2."""
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        fail(str(error) or type(error).__name__)


def fail(message: str, exit_code: int = 2) -> None:
    """Prints one line and exits."""
    if interrupts.was_asked():
        interrupted(_INTERRUPTED)
    print(f"error: {' '.join(str(message).split())}", file=sys.stderr)
    raise SystemExit(exit_code)


def override_data_and_threat(config, data, data_dir, norm, epsilon) -> None:
    """Puts flags into a configuration; those that are None or empty change nothing."""
    with config.unlocked():
        if data:
            config.data.update({"name": data, "synthetic": False, "test_examples": 0})
        config.data.data_dir = data_dir or config.data.data_dir
        config.threat.norm = norm or config.threat.norm
        config.threat.epsilon = epsilon or config.threat.epsilon


def interrupted(message: str) -> None:
    """Prints one line and exits as a program that Ctrl-C ends."""
    print(message)
    raise SystemExit(_INTERRUPTED_CODE)


def end_at_once_on_interrupt(message: str) -> None:
    """Makes Ctrl-C end the program at once, even while TensorFlow computes for minutes.

    Python runs its own handler only between two calls into native code; a thread that waits for
    the signal need not wait for them. Only for programs that leave nothing half-written.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    # Without a handler in Python nothing is written to the pipe.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)

    def wait() -> None:
        os.read(read_end, 1)
        print(f"\n{message}", flush=True)
        os._exit(_INTERRUPTED_CODE)

    threading.Thread(target=wait, daemon=True).start()


def command_line() -> str:
    """The command that runs this program again."""
    program = sys.argv[0]
    start = program if program.startswith("he-keras ") else shlex.join(["python", program])
    return " ".join([start, shlex.join(sys.argv[1:])])


def run(main) -> None:
    """Runs an absl program; mistakes in its flags end in one line and exit code 2."""
    from absl import app

    with interrupts.kept():
        try:
            app.run(main, flags_parser=functools.partial(parse_flags, main))
        except KeyboardInterrupt:
            interrupted(_INTERRUPTED)
        except Exception:
            if not interrupts.was_asked():
                raise
            interrupted(_INTERRUPTED)


def parse_flags(main, argv) -> list[str]:
    """Parses the flags, loads the configuration file if there is one, and imports he_keras."""
    from absl import flags, logging

    if {"--help", "-h", "--helpshort"} & set(argv[1:]):
        _print_help(main)
        raise SystemExit(0)
    with one_line_errors(), native_messages_hidden():
        try:
            arguments = flags.FLAGS(argv)
        except flags.Error as error:
            raise ValueError(error) from error
        # A configuration file is a program: anything can go wrong in it.
        except Exception as error:
            message = _unknown_key(argv) or f"{type(error).__name__}: {error}"
            raise ValueError(message) from error
        import he_keras  # noqa: F401
    if flags.FLAGS["verbosity"].using_default_value:
        flags.FLAGS.verbosity = logging.ERROR
    extra = arguments[1 + getattr(sys.modules[main.__module__], "POSITIONAL", 0) :]
    if extra:
        fail(f"Unknown argument; expected only --flags; received {' '.join(extra)}")
    return arguments


def _print_help(main) -> None:
    from absl import flags

    # absl files the flags of a script under its path.
    module = sys.argv[0] if main.__module__ == "__main__" else main.__module__
    print(sys.modules[main.__module__].__doc__)
    print(flags.FLAGS.module_help(module))


def _unknown_key(argv) -> str | None:
    """Says which keys are valid if an override names none of them."""
    from absl import flags
    from ml_collections import config_flags

    without_overrides = flags.FlagValues()
    config_flags.DEFINE_config_file("config", flag_values=without_overrides, sys_argv=argv[:1])
    try:
        without_overrides(argv, known_only=True)
    except Exception:
        return None
    overrides = [each for each in argv if each.startswith("--config.")]
    keys = [each.partition("=")[0].removeprefix("--config.") for each in overrides]
    return next(filter(None, (_mistake(without_overrides.config, key) for key in keys)), None)


def _mistake(config, key: str) -> str | None:
    section, parents = config, ""
    for part in key.split("."):
        if not hasattr(section, "keys"):
            return f"Not a section; expected --config.{parents}=...; received {key}"
        if part not in section:
            valid = ", ".join(section)
            return f"Unknown configuration key; expected one of {valid}; received {key}"
        section, parents = section[part], f"{parents}.{part}".strip(".")
    return None


@contextlib.contextmanager
def native_messages_hidden():
    """Hides what TensorFlow's libraries print while they are loaded, before they heed any level."""
    sys.stderr.flush()
    stderr = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(stderr, 2)
        os.close(nowhere)
        os.close(stderr)


def main() -> None:
    """Entry point of the installed command."""
    name = sys.argv[1] if len(sys.argv) > 1 else "nothing"
    if name in ("--help", "-h", "help"):
        print(_USAGE)
        return
    if name not in _PROGRAMS:
        fail(f"Unknown program; expected he-keras {'|'.join(_PROGRAMS)}; received {name}")
    sys.argv = [f"he-keras {name}", *sys.argv[2:]]
    run(importlib.import_module(f"he_keras_tools.{name}").main)
