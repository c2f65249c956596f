"""What the runs that an analysis compares were trained with, read from their configurations."""

from collections.abc import Mapping, Sequence
from typing import Any

from he_keras.analysis.analysis import Subject

_MISSING = object()
#: In the order in which pictures show them.
HEAD_ORDER = ("linear", "no norm", "FN", "WN", "FN+AM", "WN+AM", "FN+WN", "FN+WN+AM", "m-HE")


def setting(subject: Subject, key: str) -> Any:
    """Returns an entry of the configuration, such as "objective.num_steps"."""
    value: Any = subject.settings
    for part in key.split("."):
        value = value.get(part, _MISSING) if isinstance(value, Mapping) else _MISSING
    if value is _MISSING:
        section = subject.settings.get(key.partition(".")[0])
        raise ValueError(
            "This analysis compares ways of training; expected run folders whose configuration has "
            f"{key}; received {subject.name} with {key.partition('.')[0]}={section!r}"
        )
    return value


def head_label(subject: Subject) -> str:
    """Names the head: "linear", "m-HE", or which of FN, WN and AM (the margin) it has."""
    kind = setting(subject, "head.kind")
    if kind == "linear":
        return "linear"
    if kind == "m_he":
        return "m-HE"
    switches = {"feature_norm": "FN", "weight_norm": "WN"}
    parts = [label for key, label in switches.items() if setting(subject, f"head.{key}")]
    parts += ["AM"] if setting(subject, "head.margin") > 0 else []
    return "+".join(parts) or "no norm"


def head_place(label: str) -> int:
    """Place of a head's label in pictures."""
    return HEAD_ORDER.index(label) if label in HEAD_ORDER else len(HEAD_ORDER)


def require_different(subjects: Sequence[Subject], values: Sequence, what: str) -> None:
    """Raises a ValueError where all runs were trained alike in what is to be compared."""
    if len(set(values)) < 2:
        raise ValueError(
            f"Nothing to compare; expected runs that differ in {what}; received "
            f"{[subject.name for subject in subjects]}, all with {values[0]}"
        )
