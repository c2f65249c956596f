"""Names of attacks: "pgd-20" is the attack registered as "pgd" with its budget set to 20."""

import re
from collections.abc import Callable
from typing import NamedTuple

from he_keras.arguments import check_options, check_takes, suggestion
from he_keras.attacks.framework.attack import Attack
from he_keras.configurable import check_built, constructor_arguments
from he_keras.registry import Registry
from he_keras.threat import ThreatModel


class _Entry(NamedTuple):
    """A factory, and the names of the arguments that a number or a text in the name sets."""

    factory: Callable[..., Attack]
    budget: str | None
    argument: str | None


_ENTRIES: Registry[_Entry] = Registry("attack")


def register(name: str, budget: str | None = None, argument: str | None = None):
    """Registers an attack factory.

    Args:
        name: the attack's name.
        budget: the argument that a number after the name sets, as in "pgd-20".
        argument: the argument that a text after the name must set, as in "transfer:model.keras".

    Example:
        >>> from he_keras.attacks import get
        >>> import he_keras as he
        >>> get("pgd-20", he.ThreatModel()).num_steps
        20
    """
    _ENTRIES.check_name(name)

    def decorate(factory):
        _ENTRIES[name] = _Entry(factory, budget, argument)
        return factory

    return decorate


def names() -> list[str]:
    """Returns the registered names, with K for a number and the name of a text after a colon."""
    return sorted(_pattern(name, entry) for name, entry in _ENTRIES.items())


def check_name(attack: str) -> None:
    """Raises a ValueError unless an attack has the name; it builds none.

    Example:
        >>> from he_keras import attacks
        >>> attacks.check_name("pgd-20")
    """
    _look_up(str(attack))


def get(attack: str, threat: ThreatModel, **options) -> Attack:
    """Builds an attack by name, for example `get("pgd-20", threat, step_size=0.003)`."""
    entry, given = _look_up(str(attack))
    for argument, value in given.items():
        if options.get(argument, value) != value:
            raise ValueError(
                f"{argument} is given twice; expected it in the name or as an option; "
                f"received {attack!r} and {argument}={options[argument]!r}"
            )
    name = str(attack) if entry.argument else str(attack).lower()
    options = {"name": name, **options, **given}
    if isinstance(entry.factory, type):
        _check_options(attack, entry.factory, options)
    else:
        check_takes(entry.factory, entry.factory.__name__, "threat", **options)
    built = entry.factory(threat, **options)
    check_built(built, f"the attack {attack!r}", Attack, "_compiled")
    return built


def _check_options(attack: str, kind: type[Attack], options: dict) -> None:
    valid = [each for each in constructor_arguments(kind) if each != "threat"]
    if "name" not in valid:
        raise TypeError(
            f"The attack {attack!r} takes no name; expected {kind.__name__}.__init__(self, threat, "
            f"name=..., **kwargs), which hands both on; received no argument of that name"
        )
    check_options(f"attack {attack!r}", options, valid)


def for_evaluation(
    attack: Attack | str | None, threat: ThreatModel | None, seed: int
) -> Attack | None:
    """Returns an attack that can run inside `evaluate`, or None.

    Args:
        attack: an `Attack`, a name, None for none, or "default": PGD-20 on the margin, which a
            large scale cannot fool (none without a threat model).
        threat: the threat model of a name.
        seed: the seed of a name.
    """
    if isinstance(attack, str):
        if threat is None and attack != "default":
            raise ValueError(
                "An evaluation attack by name needs a threat model; expected an objective with "
                f"one, or an Attack; received evaluation_attack={attack!r}"
            )
        default = ("pgd-20", {"loss": "cw", "name": "margin-pgd-20"})
        name, options = default if attack == "default" else (attack, {})
        attack = None if threat is None else get(name, threat, seed=seed, **options)
    if attack is not None:
        attack.check_runs_inside_graphs()
    return attack


def _pattern(name: str, entry: _Entry) -> str:
    if entry.argument:
        return f"{name}:{entry.argument.upper()}"
    return f"{name}-K" if entry.budget else name


def _look_up(attack: str) -> tuple[_Entry, dict]:
    """Returns the entry that is named, and the arguments that the name sets."""
    base, colon, text = attack.partition(":")
    entry = _ENTRIES.get(base.lower())
    if colon:
        if entry is not None and entry.argument and text:
            return entry, {entry.argument: text}
    elif entry is not None and not entry.argument:
        return entry, {}
    else:
        base, _, number = attack.lower().rpartition("-")
        entry = _ENTRIES.get(base)
        if entry is not None and entry.budget and number.isdigit():
            return entry, {entry.budget: int(number)}
    digits = re.search(r"-\d+$", attack)
    known = [each.replace("-K", digits.group() if digits else "-K") for each in names()]
    raise ValueError(
        f"Unknown attack; expected one of {', '.join(names())} (K: a number); received {attack!r}"
        f"{suggestion(attack, known)}"
    )
