"""`get_config` and `from_config` from the constructor's signature; objects that do not change."""

import inspect
from typing import Any

import keras


class Configurable:
    """Mix-in whose configuration is what the constructor took, read from the attributes.

    Every argument of the constructor must be kept as an attribute of the same name. Objects that
    have a configuration of their own, such as a threat model, are serialized with it. A constructor
    with `**options` passes them on to the class above it, whose arguments count too.

    A class overrides `get_config` only if an attribute differs from its argument:
    `{**super().get_config(), "optimizer": ...}`. The mix-in stands before a class of Keras:
    `class CosineHead(Configurable, keras.layers.Layer)`. A layer's name and dtype are included.

    Example:
        >>> from he_keras.configurable import Configurable
        >>> class Step(Configurable):
        ...     def __init__(self, length, name="step"):
        ...         self.length, self.name = length, name
        >>> class Walk(Step):
        ...     def __init__(self, length, count=2, **options):
        ...         super().__init__(length, **options)
        ...         self.count = count
        >>> Walk(0.5, name="walk").get_config()
        {'length': 0.5, 'count': 2, 'name': 'walk'}
        >>> Walk.from_config({"length": 0.5, "count": 3}).count
        3
    """

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor as plain data."""
        # `Any`: the next class is that of Keras.
        above: Any = super()
        inherited = above.get_config() if isinstance(self, keras.layers.Layer) else {}
        names = constructor_arguments(type(self))
        missing = [name for name in names if not hasattr(self, name)]
        if missing:
            raise TypeError(
                f"{type(self).__name__} forgets an argument; expected each argument of __init__ as "
                f"an attribute of the same name: self.{missing[0]} = {missing[0]}; received none"
            )
        return {**inherited, **{name: _plain(getattr(self, name)) for name in names}}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Builds an object from what `get_config` returned."""
        return cls(**{name: _built(value) for name, value in config.items()})


class _Sealing(type):
    """Seals an object when its `__init__` is done, that of a subclass included."""

    def __call__(cls, *args, **kwargs):
        built = super().__call__(*args, **kwargs)
        vars(built)["_set_in_init"] = frozenset(vars(built))
        return built


class Sealed(metaclass=_Sealing):
    """Attributes are set in `__init__`; later only those whose name begins with an underscore.

    A class with `may_grow` also takes attributes that its `__init__` has not set, such as state.

    Example:
        >>> from he_keras.configurable import Sealed
        >>> class Steps(Sealed):
        ...     def __init__(self, number):
        ...         self.number = number
        >>> Steps(7).number = 20
        Traceback (most recent call last):
        AttributeError: Steps does not change after it is built; expected a new one, built with \
number=20; received an assignment to number
    """

    may_grow = False

    def __setattr__(self, name: str, value) -> None:
        """Refuses to change a setting: compiled code and stored results belong to the old one."""
        settings: frozenset[str] | None = vars(self).get("_set_in_init")
        is_sealed = settings is not None and (name in settings or not self.may_grow)
        if is_sealed and not name.startswith("_"):
            raise AttributeError(
                f"{type(self).__name__} does not change after it is built; expected a new one, "
                f"built with {name}={value!r:.60}; received an assignment to {name}"
            )
        super().__setattr__(name, value)


def is_own(part) -> bool:
    """Whether an attack, an objective, ... is somebody's own, and not of this package.

    Example:
        >>> import fractions
        >>> import he_keras as he
        >>> from he_keras.configurable import is_own
        >>> is_own(he.ThreatModel("linf", 0.1)), is_own(fractions.Fraction(1))
        (False, True)
    """
    return not type(part).__module__.startswith("he_keras.")


def check_built(part, what: str, kind: type, attribute: str) -> None:
    """Raises a TypeError unless a part found by its name is of a kind, and was set up by it.

    Args:
        part: what was built.
        what: what the error calls it, such as "the attack 'mine'".
        kind: the base class.
        attribute: one that the `__init__` of the base class sets.
    """
    if not isinstance(part, kind):
        raise TypeError(
            f"Something else stands for {what}; expected a subclass of {kind.__name__}, or a "
            f"function that returns one built; received {type(part).__name__}"
        )
    if not hasattr(part, attribute):
        name = type(part).__name__
        raise TypeError(
            f"The class {name} is not set up; expected super().__init__(threat, ...) in its "
            f"__init__; received {what}, whose class does not call it"
        )


def constructor_arguments(kind: type) -> list[str]:
    """Returns the names of the constructor's arguments, also those passed on by `**options`."""
    found: dict[str, None] = {}
    for each in kind.__mro__:
        if each is Configurable:
            break
        if "__init__" not in vars(each):
            continue
        parameters = [*inspect.signature(vars(each)["__init__"]).parameters.values()][1:]
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        found |= {each.name: None for each in parameters if each.kind in named}
        if not any(each.kind == each.VAR_KEYWORD for each in parameters):
            break
    return list(found)


def _plain(value: Any) -> Any:
    return keras.saving.serialize_keras_object(value) if hasattr(value, "get_config") else value


def _built(value: Any) -> Any:
    is_object = isinstance(value, dict) and "class_name" in value
    return keras.saving.deserialize_keras_object(value) if is_object else value


def flat_settings(tree: dict, prefix: str = "") -> dict[str, Any]:
    """Returns the settings of nested sections by their dotted names.

    Example:
        >>> from he_keras.configurable import flat_settings
        >>> flat_settings({"seed": 0, "head": {"scale": 15.0}})
        {'seed': 0, 'head.scale': 15.0}
    """
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found |= flat_settings(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
