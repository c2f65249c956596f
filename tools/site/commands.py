"""The page of all commands, read from their flags."""

import importlib
import inspect
import re
import sys

from absl import flags
from arguments import cell

import he_keras_cli
from he_keras import programs
from he_keras.programs import cli, own_parts


def commands_page() -> str:
    """Every program, with what it says about itself and every flag."""
    lines = [
        "# Commands",
        "",
        "Generated from the code. `he-keras PROGRAM --help` prints the same. Every program takes "
        f"`{own_parts.FLAG}=MODULES`: [parts of your own](../how-to/own_parts.md).",
        "",
        "| program | what it does |",
        "|---|---|",
    ]
    lines += [f"| [`{name}`](#{name}) | {text} |" for name, text in he_keras_cli.PROGRAMS.items()]
    for name in he_keras_cli.PROGRAMS:
        lines += ["", f"## {name}", "", *_program(name)]
    return "\n".join(lines)


def _program(name: str) -> list[str]:
    """What a program says about itself, and its flags."""
    _forget()
    before = set(flags.FLAGS)
    try:
        module = importlib.import_module(f"he_keras.programs.{name}")
        found = flags.FLAGS.get_key_flags_for_module(module.__name__)
        rows = [_row(flag) for flag in sorted(found, key=lambda flag: flag.name)]
    finally:
        for each in set(flags.FLAGS) - before:
            delattr(flags.FLAGS, each)
    table = ["| flag | default | meaning |", "|---|---|---|", *rows] if rows else ["No flags."]
    return [*_manual(inspect.getdoc(module) or ""), "", *table]


def _forget() -> None:
    """Makes the programs define their flags anew: every one has an --output_dir of its own."""
    for name in [name for name in sys.modules if name.startswith("he_keras.programs.")]:
        if sys.modules[name] not in (cli, own_parts):
            del sys.modules[name]
            delattr(programs, name.rpartition(".")[2])


def _manual(text: str) -> list[str]:
    """A docstring as Markdown: its commands become a block."""
    lines, is_block = [], False
    for line in re.sub(r" {4,}(?=--)", " ", text).splitlines():
        is_command = line.startswith(("he-keras ", "python "))
        if is_command != is_block:
            lines += ["```bash"] if is_command else ["```", ""]
            is_block = is_command
        lines.append(line if is_command else _escaped(line))
    return [*lines, "```"] if is_block else lines


def _escaped(line: str) -> str:
    """A line of plain text: what is in <> or between underscores stays as it is."""
    return re.sub(r"([_*])", r"\\\1", line.replace("<", "&lt;").replace(">", "&gt;"))


def _row(flag) -> str:
    choices = getattr(flag.parser, "enum_values", None)
    default = flag.default_unparsed if flag.default is None else flag.default
    if isinstance(default, list):
        default = ",".join(map(str, default))
    shown = "" if default in (None, "") else f"`{cell(str(default))}`"
    # absl puts the choices before the text.
    text = (flag.help or "").removeprefix(f"<{'|'.join(choices or ())}>: ")
    meaning = _escaped(cell(text))
    if choices:
        meaning = f"{'`' + '`, `'.join(choices) + '`'}. {meaning}"
    name = f"--[no]{flag.name}" if flag.boolean else f"--{flag.name}"
    return f"| `{name}` | {shown} | {meaning} |"
