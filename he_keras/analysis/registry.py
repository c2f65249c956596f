"""Names of analyses. Adding one is adding one file to this folder: the files are found by name."""

import importlib
import inspect
import pathlib
import pkgutil
from collections.abc import Iterable
from typing import Any

from he_keras.analysis.analysis import Analysis, option_defaults
from he_keras.arguments import check_options, parse_epsilon
from he_keras.registry import Registry

_ANALYSES: Registry[type[Analysis]] = Registry("analysis")
_TRUTHS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def register(name: str):
    """Registers an analysis class under a name, which becomes its attribute `name`.

    Example:
        >>> from he_keras.analysis import names
        >>> "class-weights" in names()
        True
    """
    _ANALYSES.check_name(name)

    def decorate(analysis: type[Analysis]) -> type[Analysis]:
        known = _ANALYSES.get(name)
        # A module that is imported again defines the same class again.
        if known is not None and known.__qualname__ == analysis.__qualname__:
            del _ANALYSES[name]
        analysis.name = name
        _ANALYSES[name] = analysis
        return analysis

    return decorate


def names() -> list[str]:
    """Returns the registered names."""
    _import_all()
    return _ANALYSES.names()


def get(name: str, **options) -> Analysis:
    """Builds an analysis by name.

    Example:
        >>> from he_keras import analysis
        >>> analysis.get("gradient-norms", num_steps=5).num_steps
        5
    """
    chosen = _look_up(name)
    _check_names(name, chosen, options)
    return chosen(**options)


def from_text(name: str, assignments: Iterable[str]) -> Analysis:
    """Builds an analysis from options as a command line has them, such as "num_steps=5".

    A text becomes what the option's default is: True or False, or a number (whole, or with
    fractions such as "8/255"). It may be a tuple of these, between commas.
    """
    chosen = _look_up(name)
    texts: dict[str, str] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or key in texts:
            raise ValueError(
                f"Invalid option; expected key=value, each key once; received {assignment!r}"
            )
        texts[key] = text
    _check_names(name, chosen, texts)
    defaults = option_defaults(chosen)
    return chosen(**{key: _parsed(key, text, defaults[key]) for key, text in texts.items()})


def summaries() -> dict[str, str]:
    """Returns for each name the first line of what the analysis says about itself."""
    found = names()
    return {name: (inspect.getdoc(_ANALYSES[name]) or "").partition("\n")[0] for name in found}


def _import_all() -> None:
    package = __name__.rpartition(".")[0]
    for module in pkgutil.iter_modules([str(pathlib.Path(__file__).parent)]):
        importlib.import_module(f"{package}.{module.name}")


def _look_up(name: str) -> type[Analysis]:
    _import_all()
    return _ANALYSES[name]


def _check_names(name: str, analysis: type[Analysis], given) -> None:
    check_options(name, given, option_defaults(analysis))


def _parsed(key: str, text: str, default) -> Any:
    try:
        if isinstance(default, bool):
            return _TRUTHS[text.lower()]
        if isinstance(default, int):
            return int(text)
        if isinstance(default, float):
            return parse_epsilon(text)
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"Invalid option; expected {key} of type {type(default).__name__}; "
            f"received {key}={text!r}"
        ) from error
    if isinstance(default, tuple):
        kind = default[0] if default else ""
        return tuple(_parsed(key, part, kind) for part in text.split(",") if part)
    return text
