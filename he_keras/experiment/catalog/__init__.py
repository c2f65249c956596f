"""The experiments of the papers, and small ones for a CPU, one file a family.

A file has `get_config(argument)`, which returns the configuration of one experiment, and
`experiments()`, which tells about all of them. `he-keras train --config=FILE:ARGUMENT` takes both
from here; configs/FILE.py of the repository is the same for reading and editing.
"""

import functools
import importlib
import pathlib
import re
import types
from collections.abc import Iterator

from he_keras.arguments import unknown_name
from he_keras.experiment.catalog.experiment_entry import ExperimentEntry
from he_keras.files import beside

FILES = (
    "he_cifar10",
    "he_imagenet",
    "pas_mnist",
    "pas_cifar10",
    "rat",
    "llr",
    "cifar10_small",
    "cifar10_budget",
    "cifar10_large_epsilon",
    "cifar10_search_scale_margin",
    "quickstart_digits",
    "digits_search_scale_margin",
)

_FORMER = re.compile(r"(cifar|imagenet|mnist)")


def entries() -> Iterator[ExperimentEntry]:
    """Yields what is known of every experiment, file by file."""
    for file in FILES:
        yield from _module(file).experiments()


def listing(searches_only: bool = False) -> str:
    """The text of `--list`: every experiment with its source, published result and command."""
    chosen = [entry for entry in entries() if entry.has_search or not searches_only]
    return "\n".join(entry.summary() for entry in chosen)


def find(name: str) -> ExperimentEntry:
    """Returns what is known of an experiment, by its configuration's name."""
    if name not in _by_name():
        raise ValueError(
            f"Not an experiment of a paper; expected a name of --list; received {name}"
        )
    return _by_name()[name]


@functools.cache
def _by_name() -> dict[str, ExperimentEntry]:
    return {entry.name: entry for entry in entries()}


def get_config(name: str):
    """Returns the configuration of an experiment by its name.

    Example:
        >>> from he_keras.experiment import catalog
        >>> catalog.get_config("cifar10_trades_m_he").head.kind
        'm_he'
    """
    entry = find(name)
    module = _module(entry.file)
    return module.get_config(entry.argument) if entry.argument else module.get_config()


def check_name(config: str) -> None:
    """Raises a ValueError for a value of --config that is no file and no experiment's name.

    It loads no experiment. `path_of` knows the names that experiments had earlier, which began with
    a data set.
    """
    file = pathlib.Path(config.partition(":")[0])
    if not (file.suffix or file.is_file() or file.stem in FILES or _FORMER.match(file.stem)):
        raise unknown_name("configuration", file.name, ("FILE.py", *FILES))
    is_known = file.stem in FILES or _FORMER.match(file.stem)
    if not file.is_file() and not is_known:
        raise ValueError(
            f"No configuration file; expected an existing FILE.py; received {file}{beside(file)}"
        )


def path_of(config: str) -> str:
    """Returns the file to load for the value of --config, `FILE:ARGUMENT`.

    A file that exists is taken. Any other name of an experiment's file is looked up here.

    Example:
        >>> from he_keras.experiment import catalog
        >>> catalog.path_of("he_cifar10:trades,m_he").endswith("catalog/he_cifar10.py:trades,m_he")
        True
        >>> catalog.path_of("configs/cifar10_trades_m_he.py")
        Traceback (most recent call last):
        ValueError: configs/cifar10_trades_m_he.py is now --config=he_cifar10:trades,m_he
    """
    check_name(config)
    name, colon, argument = config.partition(":")
    file = pathlib.Path(name)
    if file.is_file():
        return config
    if file.stem in FILES:
        return str(pathlib.Path(__file__).with_name(f"{file.stem}.py")) + colon + argument
    former = f"{file.stem}_{argument}" if argument else file.stem
    for entry in entries():
        if entry.name in (former, former.removesuffix("_none")):
            raise ValueError(f"{config} is now --config={entry.reference()}")
    if not file.suffix:
        raise unknown_name("configuration", name, ("FILE.py", *FILES))
    return config


def _module(file: str) -> types.ModuleType:
    return importlib.import_module(f"he_keras.experiment.catalog.{file}")
