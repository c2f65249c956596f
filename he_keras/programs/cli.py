"""What all programs share: flags, errors of one line, Ctrl-C."""

import contextlib
import functools
import importlib
import os
import pathlib
import re
import shlex
import signal
import sys
import threading
import warnings

from he_keras.arguments import BOLD_TYPE, suggestion, unknown_name
from he_keras.interrupts import KeptInterrupts
from he_keras.programs import own_parts, registered

_INTERRUPTED = "Interrupted"
_INTERRUPTED_CODE = 130
_CONFIG_FLAGS = ("--config", "-config")
#: Words in the errors of absl about the value of a flag, and what was wanted.
_WANTED = {
    "int()": "an integer",
    "to float": "a number",
    "boolean": "true or false",
    "positive integer": "a positive integer",
}
#: The flag for which a file of this kind is meant.
_FLAG_OF_SUFFIX = {".keras": "model", ".py": "config", ".npz": "data"}
_NO_CONFIG = "No configuration; expected --config=FILE, or a name that --list shows; received none"
_interrupts = KeptInterrupts()


@contextlib.contextmanager
def one_line_errors():
    """Turns errors about the user's input into one line and exit code 2."""
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        fail(error)


def fail(message: str | Exception, exit_code: int = 2) -> None:
    """Prints one line and exits."""
    if was_interrupted():
        interrupted(_INTERRUPTED)
    own = own_parts.sentence_of(message) if isinstance(message, Exception) else ""
    text = own or str(message) or type(message).__name__
    print(f"error: {' '.join(BOLD_TYPE.sub('', text).split())}", file=sys.stderr)
    raise SystemExit(exit_code)


def was_interrupted() -> bool:
    """Whether Ctrl-C was pressed: any error may be what became of it."""
    return _interrupts.was_asked


def interrupted(message: str) -> None:
    """Prints one line and exits as a program that Ctrl-C ends."""
    print(message)
    raise SystemExit(_INTERRUPTED_CODE)


def end_at_once_on_interrupt(message: str) -> None:
    """Makes Ctrl-C end the program at once, even while TensorFlow computes for minutes.

    Python runs its own handler only between two calls into native code. A thread that waits for
    the signal does not have to wait for them. Use it only if nothing can be left half-written.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    # Python writes to the pipe only if it has a handler of its own.
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


def check_command(program: str) -> list[str]:
    """Parses the flags of a program of this folder without loading TensorFlow.

    Mistakes end in one line and exit code 2. Returns the arguments that `run_program` takes.
    """
    return _parse_plain_flags(_main_of(program), sys.argv)


def run_program(program: str, arguments: list[str]) -> None:
    """Runs a program of this folder, whose flags `check_command` has parsed."""
    main = _main_of(program)

    def finish(argv: list[str]) -> list[str]:
        _load_parts(main, argv)
        return arguments

    run(main, finish)


def _main_of(program: str):
    return importlib.import_module(f"he_keras.programs.{program}").main


def run(main, parse=None) -> None:
    """Runs an absl program; mistakes in its flags end in one line and exit code 2."""
    from absl import app

    warnings.formatwarning = lambda message, *_, **__: f"note: {message}\n"
    with _interrupts:
        try:
            app.run(main, flags_parser=parse or functools.partial(parse_flags, main))
        except KeyboardInterrupt:
            interrupted(_INTERRUPTED)
        except Exception as error:
            if was_interrupted():
                interrupted(_INTERRUPTED)
            if not own_parts.sentence_of(error):
                raise
            fail(error, exit_code=1)


def parse_flags(main, argv) -> list[str]:
    """Parses the flags, and loads own parts and the configuration file if there are any."""
    arguments = _parse_plain_flags(main, argv)
    _load_parts(main, argv)
    return arguments


def _parse_plain_flags(main, argv) -> list[str]:
    """Parses all flags but those of a configuration, and makes the program's own checks of them."""
    from absl import flags, logging

    if {"--help", "-h", "--helpshort"} & set(argv[1:]):
        _print_help(main)
        raise SystemExit(0)
    program = sys.modules[main.__module__]
    with one_line_errors():
        plain, config = _without_config(own_parts.split(argv)[0])
        try:
            arguments = flags.FLAGS(plain)
        except flags.UnrecognizedFlagError as error:
            raise unknown_name("flag", f"--{error.flagname}", _flags_of(main)) from error
        except flags.Error as error:
            raise ValueError(_choices(str(error))) from error
        if flags.FLAGS["verbosity"].using_default_value:
            flags.FLAGS.verbosity = logging.ERROR
        extra = arguments[1 + getattr(program, "POSITIONAL", 0) :]
        if extra:
            meant = _meant(extra[0])
            raise ValueError(
                f"Unknown argument; expected only --flags; received {' '.join(extra)}{meant}"
            )
        _check_config_names(config)
        registered.check_overrides(config)
        getattr(program, "check_flags", lambda arguments: None)(arguments)
    return arguments


def _without_config(argv: list[str]) -> tuple[list[str], list[str]]:
    """Returns the arguments without --config and its overrides, and these by themselves."""
    from absl import flags

    plain: list[str] = []
    config: list[str] = []
    if "config" not in flags.FLAGS:
        return argv, []
    for place, argument in enumerate(argv):
        follows = place > 0 and argv[place - 1] in _CONFIG_FLAGS
        is_config = follows or re.match(r"--?config(=|\.|$)", argument)
        (config if is_config else plain).append(argument)
    return plain, config


def check_config_is_given() -> None:
    """Raises a ValueError for a command line without --config."""
    if not _without_config(sys.argv)[1]:
        raise ValueError(_NO_CONFIG)


def refuse(program: str, *names: str) -> None:
    """Raises a ValueError for a flag of another program that this one shares and does not heed."""
    from absl import flags

    given = [f"--{name}" for name in names if not flags.FLAGS[name].using_default_value]
    if given:
        raise ValueError(
            f"Not a flag of {program}; expected it with he-keras evaluate; received {given[0]}"
        )


def _check_config_names(arguments: list[str]) -> None:
    from he_keras.experiment import catalog

    for place, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if flag in _CONFIG_FLAGS and (equals or arguments[place + 1 :]):
            catalog.check_name(value if equals else arguments[place + 1])


def _load_parts(main, argv: list[str]) -> None:
    """Imports parts of one's own, and loads the configuration file if there is one."""
    from absl import flags

    with one_line_errors():
        argv, modules = own_parts.split(argv)
        own_parts.import_all(modules)
        config = _without_config(argv)[1]
        if not config:
            return
        argv = _with_config_paths([argv[0], *config])
        try:
            flags.FLAGS(argv)
        except flags.UnrecognizedFlagError as error:
            unknown = unknown_name("flag", f"--{error.flagname}", _flags_of(main))
            raise ValueError(_unknown_key(argv) or str(unknown)) from error
        except (flags.Error, ValueError) as error:
            message = _unknown_key(argv) or _superfluous_argument(error, argv)
            message = message or _without_traceback(_choices(str(error)))
            raise ValueError(message) from error
        # A configuration file is a program: anything can go wrong in it.
        except Exception as error:
            message = _unknown_key(argv) or f"{type(error).__name__}: {error}"
            raise ValueError(message) from error


def _superfluous_argument(error: Exception, argv: list[str]) -> str:
    """What to say where --config=FILE:ARGUMENT names a file whose `get_config` takes none."""
    if "get_config() takes 0 positional arguments" not in str(error):
        return ""
    file, _, argument = " ".join(argv[1:]).partition(":")
    name = pathlib.Path(file).stem
    return f"{name} takes no argument; expected --config={name}; received {name}:{argument}"


def _flags_of(main) -> list[str]:
    from absl import flags

    found = flags.FLAGS.get_key_flags_for_module(main.__module__)
    return [f"--{flag.name}" for flag in found] + [own_parts.FLAG]


def _choices(error: str) -> str:
    """An error of absl about the value of a flag, as ours are written."""
    found = re.fullmatch(r"flag --([\w.]+)=(.*?): (.*)", error)
    if not found:
        return error
    name, value, reason = found.groups()
    choices = re.fullmatch(r"value should be one of <(.*)>", reason)
    if choices:
        return str(unknown_name(f"--{name}", value, choices[1].split("|")))
    wanted = next((text for word, text in _WANTED.items() if word in reason), "")
    return f"Invalid --{name}; expected {wanted}; received --{name}={value}" if wanted else error


def _meant(argument: str) -> str:
    """The flag that an argument without one was probably meant for."""
    from absl import flags

    path = pathlib.Path(argument)
    if (path / "config.json").is_file():
        names = ["run", "model"]
    elif path.suffix in _FLAG_OF_SUFFIX:
        names = [_FLAG_OF_SUFFIX[path.suffix]]
    else:
        is_model = path.exists() and argument not in _experiments()
        names = ["model"] if is_model else ["config", "data"]
    meant = next((name for name in names if name in flags.FLAGS), None)
    return f"; did you mean --{meant}={argument}?" if meant else ""


def _experiments() -> tuple[str, ...]:
    from he_keras.experiment import catalog

    return tuple(catalog.FILES)


def _print_help(main) -> None:
    from absl import flags

    print(sys.modules[main.__module__].__doc__)
    print(flags.FLAGS.module_help(main.__module__))
    print(
        f"  {own_parts.FLAG}: Modules with parts of your own, by name or file: "
        "docs/how-to/own_parts.md."
    )


def _with_config_paths(argv: list[str]) -> list[str]:
    """Replaces the name of an experiment, as in --config=he_cifar10:trades,he, by its file."""
    from he_keras.experiment import catalog

    found = list(argv)
    for place, argument in enumerate(argv[1:], 1):
        flag, equals, value = argument.partition("=")
        if flag in _CONFIG_FLAGS and equals:
            found[place] = f"{flag}={catalog.path_of(value)}"
        elif argv[place - 1] in _CONFIG_FLAGS:
            found[place] = catalog.path_of(argument)
    return found


def _without_traceback(text: str) -> str:
    """Returns the error inside a traceback; the place of it too if it is a mistake in the file."""
    errors = list(re.finditer(r"^\w*Error: ", text, re.MULTILINE))
    if "Traceback" not in text or not errors:
        return text
    message = text[errors[-1].start() :].strip()
    if message.startswith("ValueError: "):
        return message.removeprefix("ValueError: ")
    places = re.findall(r'File "(.+?)", line (\d+)', text)
    return f"{message} ({places[-1][0]}, line {places[-1][1]})" if places else message


def chosen_config(config, is_smoke: bool):
    """Returns the configuration of --config, or its smoke variant."""
    from he_keras import experiment

    if config is None:
        raise ValueError(_NO_CONFIG)
    with config.unlocked():
        config.imports = tuple(own_parts.imported)
    return experiment.smoke_variant(config) if is_smoke else config


def print_experiments(config=None, searches_only: bool = False) -> None:
    """Prints what --list shows: every experiment in short, or all about the one of --config."""
    from he_keras.experiment import catalog

    print(catalog.find(config.name).header() if config else catalog.listing(searches_only))


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
            near = suggestion(part, section)
            return f"Unknown configuration key; expected one of {valid}; received {key}{near}"
        section, parents = section[part], f"{parents}.{part}".strip(".")
    return None
