"""Names of attacks: "pgd-20" is the attack registered as "pgd" with its budget set to 20."""

from collections.abc import Callable

from he_keras.attacks.attack import Attack
from he_keras.threat import ThreatModel

_FACTORIES: dict[str, tuple[Callable[..., Attack], str | None]] = {}


def register(name: str, budget: str | None = None):
    """Registers an attack factory; `budget` names the argument that a number in the name sets.

    Example:
        >>> from he_keras.attacks import get
        >>> import he_keras as he
        >>> get("pgd-20", he.ThreatModel()).num_steps
        20
    """

    def decorate(factory):
        if name in _FACTORIES:
            raise ValueError(
                f"Attack registered twice; expected a new name; received name={name!r}"
            )
        _FACTORIES[name] = (factory, budget)
        return factory

    return decorate


def names() -> list[str]:
    """Returns the registered names, with K where a number is expected."""
    return sorted(
        name if budget is None else f"{name}-K" for name, (_, budget) in _FACTORIES.items()
    )


def get(attack: str, threat: ThreatModel, **options) -> Attack:
    """Builds an attack by name, for example `get("pgd-20", threat, step_size=0.003)`."""
    base, budget = _split(str(attack).lower())
    if base not in _FACTORIES or (budget is not None and _FACTORIES[base][1] is None):
        raise ValueError(
            f"Unknown attack; expected one of {', '.join(names())} (K: a number); "
            f"received {attack!r}"
        )
    factory, argument = _FACTORIES[base]
    if budget is not None and argument is not None:
        if options.get(argument, budget) != budget:
            raise ValueError(
                f"{argument} is given twice; expected it in the name or as an option; "
                f"received {attack!r} and {argument}={options[argument]!r}"
            )
        options = {**options, argument: budget}
    return factory(threat, **{"name": str(attack).lower(), **options})


def _split(name: str) -> tuple[str, int | None]:
    if name in _FACTORIES:
        return name, None
    base, _, number = name.rpartition("-")
    return (base, int(number)) if number.isdigit() else (name, None)
