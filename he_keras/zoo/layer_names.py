"""Translates the names of a checkpoint's layers to those of our networks, by patterns, and back."""

import re
from collections.abc import Mapping

_PLACE = re.compile(r"\{(\w+)(-?)\}")


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


def original(ours: str, patterns: Mapping[str, str]) -> str | None:
    """Returns the name in the file of one of our layers, or None if no pattern fits.

    Example:
        >>> from he_keras.zoo.layer_names import original
        >>> original("s2_b1_1", {"layer{stage}.{block-}.bn{n}": "s{stage}_b{block}_{n}"})
        'layer2.0.bn1'
    """
    for pattern, template in patterns.items():
        numbers = _numbers(template, ours)
        if numbers is not None:
            from_zero = dict(_PLACE.findall(pattern))
            counted = {place: count - bool(from_zero[place]) for place, count in numbers.items()}
            return _PLACE.sub(r"{\1}", pattern).format(**counted)
    return None


def _numbers(pattern: str, name: str) -> dict[str, int] | None:
    """Returns the numbers at the pattern's places, counted from 1; None if it does not fit."""
    places = dict(_PLACE.findall(pattern))
    texts = _PLACE.split(pattern)[::3]
    groups = (f"(?P<{place}>[0-9]+)" for place in places)
    parts = [re.escape(texts[0])]
    for group, text in zip(groups, texts[1:], strict=True):
        parts += [group, re.escape(text)]
    match = re.fullmatch("".join(parts), name)
    if match is None:
        return None
    return {key: int(digits) + bool(places[key]) for key, digits in match.groupdict().items()}
