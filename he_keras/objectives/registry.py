"""Names of training objectives."""

from he_keras.objectives.objective import Objective
from he_keras.threat import ThreatModel

_OBJECTIVES: dict[str, type[Objective]] = {}


def register(name: str):
    """Registers an objective class under a name."""

    def decorate(objective):
        if name in _OBJECTIVES:
            raise ValueError(f"Objective registered twice; expected a new name; received {name!r}")
        _OBJECTIVES[name] = objective
        return objective

    return decorate


def names() -> list[str]:
    """Returns the registered names."""
    return sorted(_OBJECTIVES)


def get(name: str, threat: ThreatModel | None = None, **options) -> Objective:
    """Builds an objective by name.

    Example:
        >>> import he_keras as he
        >>> he.objectives.get("trades", he.ThreatModel(), beta=6.0).beta
        6.0
    """
    if name not in _OBJECTIVES:
        raise ValueError(
            f"Unknown objective; expected one of {', '.join(names())}; received {name!r}"
        )
    return _OBJECTIVES[name](threat, **options)
