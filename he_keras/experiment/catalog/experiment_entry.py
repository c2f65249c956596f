"""What is known of one experiment: its header, and how its argument is read."""

import textwrap
from typing import NamedTuple

_WIDTH = 100
_INDENT = " " * 10


class ExperimentEntry(NamedTuple):
    """One experiment of a file.

    Args:
        name: the configuration's name, and so the run folder's.
        file: the file that has it.
        argument: what follows the colon of --config; "" if the file has one experiment.
        title: one sentence: what is trained, and whose experiment it is.
        published: the numbers that the source gives; "" if it is an experiment of this project.
        time: how long it takes.
        notes: what differs from the source, and what has been chosen, one statement a line.
        options: what the command may be given in addition to the configuration.
        has_search: whether the file has `get_search` and is meant for `he-keras search`.
    """

    name: str
    file: str
    argument: str
    title: str
    published: str = ""
    time: str = ""
    notes: tuple[str, ...] = ()
    options: str = ""
    has_search: bool = False

    def reference(self) -> str:
        """Returns what --config is given."""
        return f"{self.file}:{self.argument}" if self.argument else self.file

    def command(self) -> str:
        """Returns the command that runs the experiment."""
        program = "search" if self.has_search else "train"
        return f"he-keras {program} --config={self.reference()}"

    def summary(self) -> str:
        """Returns the entry of `--list`."""
        lines = [f"{self.name}: {self.title}"]
        if self.published:
            lines.append(f"    published: {self.published}")
        return "\n".join([*lines, f"    {self.command()}"])

    def header(self) -> str:
        """Returns all that is known: title, command, published numbers, time, notes."""
        facts = {
            "Command": self.command(),
            "Options": self.options,
            "Paper": self.published,
            "Time": self.time,
        }
        lines = [
            textwrap.fill(
                text, _WIDTH, initial_indent=f"{name + ':':<10}", subsequent_indent=_INDENT
            )
            for name, text in facts.items()
            if text
        ]
        return "\n".join([self.title, "", *lines, *([""] if self.notes else []), *self.notes])


def parse_argument(file: str, argument: str, **choices: tuple[str, ...]) -> list[str]:
    """Splits an argument at its commas and checks every part.

    Args:
        file: the configuration file, for the error.
        argument: what followed the colon.
        choices: for each part in its order a name and the values that it may have.

    Example:
        >>> from he_keras.experiment.catalog.experiment_entry import parse_argument
        >>> parse_argument("toy", "red,large", colour=("red", "blue"), size=("small", "large"))
        ['red', 'large']
        >>> parse_argument("toy", "green", colour=("red", "blue"))
        Traceback (most recent call last):
        ValueError: Invalid argument of toy; expected --config=toy:COLOUR with COLOUR one of red,
        blue; received toy:green
    """
    parts = argument.split(",")
    valid = len(parts) == len(choices) and all(
        part in values for part, values in zip(parts, choices.values(), strict=True)
    )
    if not valid:
        form = ",".join(choices).upper()
        meaning = "; ".join(
            f"{name.upper()} one of {', '.join(values)}" for name, values in choices.items()
        )
        raise ValueError(
            f"Invalid argument of {file}; expected --config={file}:{form} with {meaning}; "
            f"received {file}:{argument}"
        )
    return parts
