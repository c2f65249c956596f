"""Names of attacks: "pgd-20" is the attack registered as "pgd" with its budget set to 20."""

from he_keras.arguments import check_options, check_takes
from he_keras.attacks.attack_names import Entry, look_up, patterns, with_given
from he_keras.attacks.framework.attack import Attack
from he_keras.configurable import check_built, constructor_arguments
from he_keras.registry import Registry
from he_keras.threat import ThreatModel

_ENTRIES: Registry[Entry] = Registry("attack")


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
        _ENTRIES[name] = Entry(factory, budget, argument)
        return factory

    return decorate


def names() -> list[str]:
    """Returns the registered names, with K for a number and the name of a text after a colon."""
    return patterns(_ENTRIES)


def check_name(attack: str) -> None:
    """Raises a ValueError unless an attack has the name; it builds none.

    Example:
        >>> from he_keras import attacks
        >>> attacks.check_name("pgd-20")
    """
    look_up(str(attack), _ENTRIES)


def get(attack: str, threat: ThreatModel, **options) -> Attack:
    """Builds an attack by name, for example `get("pgd-20", threat, step_size=0.003)`."""
    entry, given = look_up(str(attack), _ENTRIES)
    name = str(attack) if entry.argument else str(attack).lower()
    options = with_given(attack, given, {"name": name, **options})
    if isinstance(entry.factory, type):
        check_attack_options(attack, entry.factory, options)
    else:
        check_takes(entry.factory, entry.factory.__name__, "threat", **options)
    built = entry.factory(threat, **options)
    check_built(built, f"the attack {attack!r}", Attack, "_compiled")
    return built


def check_attack_options(attack: str, kind: type[Attack], options: dict) -> None:
    """Raises an error unless an attack's class takes these options."""
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
