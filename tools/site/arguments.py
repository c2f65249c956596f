"""Tables of the arguments of attacks, objectives, networks and schedules, read from the code."""

import inspect

import griffe

import he_keras as he
from he_keras.attacks.registry import _ENTRIES
from he_keras.networks.network import find
from he_keras.objectives.registry import _OBJECTIVES

#: Two radii: a default that differs between them is computed from the radius.
_THREATS = he.ThreatModel("linf", "8/255"), he.ThreatModel("linf", "16/255")
_GIVEN = ("self", "threat", "name", "attack", "path")
_OF_ALL_NETWORKS = ("standardize", "activation", "synchronized")
_OF_THE_RUN = ("total_steps", "steps_per_epoch")


def attacks_page() -> str:
    """Every argument of every registered attack."""
    lines = [
        "# Arguments of attacks",
        "",
        "Generated from the code. `he.attacks.get(NAME, threat, **arguments)` takes these "
        "arguments. [Attacks](attacks.md) says which attack to use, and what it costs.",
        "",
        "## All attacks",
        "",
        *_table(_described(he.attacks.Attack), _defaults(he.attacks.Attack)),
    ]
    for name, entry in sorted(_ENTRIES.items()):
        pattern = f"{name}-K" if entry.budget else name
        pattern = f"{name}:{entry.argument.upper()}" if entry.argument else pattern
        if inspect.isclass(entry.factory):
            lines += _section(pattern, entry.factory, he.attacks.Attack)
        else:
            lines += [f"## `{pattern}`", "", _summary(entry.factory), ""]
            for made in _made_by(entry.factory):
                heading, *rest = _section(made.__name__, made, he.attacks.Attack)
                lines += [f"#{heading}", *rest]
    return "\n".join(lines)


def objectives_page() -> str:
    """Every argument of every registered objective."""
    lines = [
        "# Arguments of objectives",
        "",
        "Generated from the code. `he.objectives.get(NAME, threat, **arguments)` takes these "
        "arguments, and so does `config.objective`. [Objectives](objectives.md) compares them.",
        "",
        "## All objectives",
        "",
        *_table(_described(he.objectives.Objective), _defaults(he.objectives.Objective)),
    ]
    for name, objective in sorted(_OBJECTIVES.items()):
        lines += _section(name, objective, he.objectives.Objective)
    return "\n".join(lines)


def options_page() -> str:
    """Every option of every network and schedule."""
    # After he_keras, which hides what TensorFlow's libraries print while they are loaded.
    from keras.optimizers.schedules import LearningRateSchedule

    shared = inspect.getdoc(he.networks).partition("All of them take")[2]
    lines = [
        "# Options of networks and schedules",
        "",
        "Generated from the code. `config.network.options`, `config.schedule` and "
        "`config.epsilon_schedule` take these options.",
        "",
        "## Networks",
        "",
        f"All networks take:{shared.partition('Convolutions')[0]}",
    ]
    for name in he.networks.names():
        network = find(name, {})
        described = _described(getattr(network, "func", network))
        defaults = {k: v for k, v in _defaults(network).items() if k not in _OF_ALL_NETWORKS}
        family = getattr(network, "func", network)
        lines += [f"### `{name}`", "", _summary(family), "", *_table(described, defaults)]
    lines += ["## Schedules", "", *_schedule_names(), ""]
    for name, schedule in he.schedules.SCHEDULES.items():
        described, defaults = _of_classes(schedule, LearningRateSchedule)
        options = {k: v for k, v in defaults.items() if k not in _OF_THE_RUN}
        lines += [f"### `{name}`", "", _summary(schedule), "", *_table(described, options)]
    return "\n".join(lines)


def _schedule_names() -> list[str]:
    """What the docstring of `schedules.get` says about names and options."""
    text = inspect.getdoc(he.schedules.get).partition("The names")[2].partition("Args:")[0]
    return [f"The names{text}".strip()]


def _made_by(factory) -> list[type]:
    """The attacks of the file in which a function chooses between them."""
    module = inspect.getmodule(factory)
    found = [each for each in vars(module).values() if inspect.isclass(each)]
    return [each for each in found if each.__module__ == module.__name__ and not _is_base(each)]


def _is_base(kind: type) -> bool:
    return not issubclass(kind, he.attacks.Attack) or kind.__name__.startswith("_")


def _section(pattern: str, made, base) -> list[str]:
    """The heading, the first sentence and the table of a class."""
    described, signature = _of_classes(made, base)
    accepted = {name: signature[name] for name in signature if _accepts(made, name, signature)}
    actual = {name: _actual(made, name, default) for name, default in accepted.items()}
    lines = [f"## `{pattern}`", "", _summary(made), ""]
    if not actual:
        return [*lines, "No arguments of its own.", ""]
    return [*lines, *_table(described, actual)]


def _of_classes(made, base) -> tuple[dict[str, str], dict[str, str]]:
    """Meanings and defaults of what a class and its base classes, up to `base`, take."""
    if not inspect.isclass(made):
        return _described(made), _defaults(made)
    described, signature = _described(base), {}
    for each in reversed(made.__mro__):
        if issubclass(each, base) and each is not base:
            described |= _described(each)
            signature |= _defaults(each)
    return described, signature


def _summary(thing) -> str:
    return inspect.cleandoc(thing.__doc__ or "").partition("\n\n")[0].replace("\n", " ")


def _described(thing) -> dict[str, str]:
    """What the docstring says about each argument."""
    docstring = griffe.Docstring(inspect.cleandoc(thing.__doc__ or ""), parser="google")
    found = {}
    for section in docstring.parse(warnings=False):
        if section.kind is griffe.DocstringSectionKind.parameters:
            found |= {item.name: " ".join(item.description.split()) for item in section.value}
    return found


def _defaults(thing) -> dict[str, str]:
    """The arguments that the thing itself names, each with its default."""
    function = thing.__dict__.get("__init__") if inspect.isclass(thing) else thing
    if function is None:
        return {}
    return {
        name: "required" if each.default is each.empty else repr(each.default)
        for name, each in inspect.signature(function).parameters.items()
        if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL) and name not in _GIVEN
    }


def _accepts(made, name: str, signature: dict[str, str]) -> bool:
    """Whether a class leaves an argument of its base class to the caller."""
    if signature[name] == "required":
        return not _is_complete(made)
    try:
        made(_THREATS[0], **{name: object()})
    except TypeError as error:
        return "multiple values" not in str(error) and "unexpected keyword" not in str(error)
    except Exception:
        return True
    return True


def _is_complete(made) -> bool:
    """Whether a class needs no further argument."""
    try:
        made(_THREATS[0])
    except TypeError:
        return False
    return True


def _actual(made, name: str, default: str) -> str:
    """The default of an argument; a class may set another one than its base class."""
    try:
        values = [repr(made(threat).get_config()[name]) for threat in _THREATS]
    except Exception:
        return default
    return values[0] if values[0] == values[1] else default


def _table(described: dict[str, str], defaults: dict[str, str]) -> list[str]:
    if not defaults:
        return ["No arguments.", ""]
    unexplained = [name for name in defaults if not described.get(name)]
    if unexplained:
        raise ValueError(f"Arguments without a meaning in the docstring: {unexplained}")
    rows = [
        f"| `{name}` | {_code(default)} | {cell(described.get(name, ''))} |"
        for name, default in defaults.items()
    ]
    return ["| argument | default | meaning |", "|---|---|---|", *rows, ""]


def _code(default: str) -> str:
    return default if default == "required" else f"`{default}`".replace("|", "\\|")


def cell(text: str) -> str:
    """A text as a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")
