"""Translates the names of a checkpoint's layers to those of our networks, by patterns."""

import re
from collections.abc import Mapping

_PLACE = re.compile(r"\\{(\w+)(\\-)?\\}")


def translate(name: str, patterns: Mapping[str, str]) -> str | None:
    """Returns our name of a layer, or None if no pattern fits.

    Example:
        >>> from he_keras.zoo.layer_names import translate
        >>> translate("layer2.0.bn1", {"layer{stage}.{block-}.bn{n}": "s{stage}_b{block}_{n}"})
        's2_b1_1'
    """
    for pattern, ours in patterns.items():
        numbers = _numbers(pattern, name)
        if numbers is not None:
            return ours.format(**numbers)
    return None


def _numbers(pattern: str, name: str) -> dict[str, int] | None:
    from_zero = set()

    def place(match: re.Match) -> str:
        if match[2]:
            from_zero.add(match[1])
        return f"(?P<{match[1]}>[0-9]+)"

    match = re.fullmatch(_PLACE.sub(place, re.escape(pattern)), name)
    if match is None:
        return None
    return {key: int(digits) + (key in from_zero) for key, digits in match.groupdict().items()}
