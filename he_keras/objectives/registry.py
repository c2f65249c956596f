"""Names of training objectives."""

from he_keras.arguments import check_options, check_takes
from he_keras.configurable import check_built, constructor_arguments
from he_keras.objectives.objective import Objective
from he_keras.registry import Registry
from he_keras.threat import ThreatModel

_OBJECTIVES: Registry[type[Objective]] = Registry("objective")


def register(name: str):
    """Registers an objective class under a name."""
    return _OBJECTIVES.register(name)


def names() -> list[str]:
    """Returns the registered names."""
    return _OBJECTIVES.names()


def get(name: str, threat: ThreatModel | None = None, **options) -> Objective:
    """Builds an objective by name.

    Example:
        >>> import he_keras as he
        >>> he.objectives.get("trades", he.ThreatModel(), beta=6.0).beta
        6.0
    """
    kind = _OBJECTIVES[name]
    if isinstance(kind, type):
        if not getattr(kind, "passes_arguments_on", False):
            check_options(f"objective {name!r}", options, constructor_arguments(kind))
        check_takes(kind.__init__, f"{kind.__name__}.__init__", "self", "threat", **options)
    else:
        check_takes(kind, kind.__name__, "threat", **options)
    built = kind(threat, **options)
    check_built(built, f"the objective {name!r}", Objective, "label_smoothing")
    return built
