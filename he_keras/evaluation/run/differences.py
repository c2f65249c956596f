"""How the settings of two evaluations differ, or the facts of two models: one short text each."""

import hashlib
import json
import os

from he_keras.evaluation.report.page import epsilon_in_pixels
from he_keras.evaluation.run.examples import PREFIX

_MOST_SHOWN = 3
_VALUE_LENGTH = 60
# Of a long text, so much of what is alike is shown before the first difference.
_SHOWN_BEFORE = 20


def brief(facts: dict) -> dict:
    """Returns a model's facts with a digest of its configuration in place of all of it."""
    if facts.get("config") is None or isinstance(facts["config"], str):
        return facts
    text = json.dumps(facts["config"], sort_keys=True)
    return {**facts, "config": hashlib.sha256(text.encode()).hexdigest()}


def differences(recorded: dict, now: dict) -> list[str]:
    """Returns how two evaluations' settings differ, one short text each.

    Example:
        >>> from he_keras.evaluation.run.differences import differences
        >>> recorded = {"mode": "survivors", "attacks": [{"name": "screen"}]}
        >>> differences(recorded, {"mode": "survivors", "attacks": [{"name": "pgd-10"}]})
        ['attacks: screen -> pgd-10']
    """
    if recorded.get("he_keras") != now.get("he_keras"):
        return [f"he_keras: {recorded.get('he_keras')} -> {now.get('he_keras')}"]
    found = _changes(recorded.get("threat"), now.get("threat"), ())
    for key in ("num_examples", "mode", "batch_size"):
        found += _changes(recorded.get(key), now.get(key), (key,))
    is_as_long = recorded.get("num_examples") == now.get("num_examples")
    if is_as_long and recorded.get("data") != now.get("data"):
        found.append("data: other images or labels")
    if "model" in recorded and "model" in now:
        found += model_differences(recorded["model"], now["model"])
    return found + _attack_changes(recorded["attacks"], now["attacks"], found)


def model_differences(recorded: dict, now: dict) -> list[str]:
    """Returns how two models' facts differ, of which either may be `brief`."""
    if recorded["class"] != now["class"]:
        return [f"model: {recorded['class']} -> {now['class']}"]
    if isinstance(recorded.get("config"), str) or isinstance(now.get("config"), str):
        recorded, now = brief(recorded), brief(now)
    return _changes(recorded, now, ())


def section_differences(report: dict, section: dict) -> list[str]:
    """Returns how results that are to go into a report differ from it, as far as both say."""
    settings = report.get("settings") or {}
    found = []
    if "threat" in section and "threat" in report:
        found += _changes(report["threat"], section["threat"], ())
    pair = str(settings.get("data")), str(section.get("data"))
    if all(each.startswith(PREFIX) for each in pair) and pair[0] != pair[1]:
        found.append("data: other images or labels")
    recorded, now = settings.get("model"), section.get("model")
    if isinstance(recorded, dict) and isinstance(now, dict):
        found += model_differences(recorded, now)
    return found


def shown(found: list[str]) -> str:
    """Returns the first differences as text, and how many more there are."""
    rest = len(found) - _MOST_SHOWN
    return ", ".join(found[:_MOST_SHOWN]) + (f", and {rest} more" if rest > 0 else "")


def _attack_changes(before: list[dict], after: list[dict], others: list[str]) -> list[str]:
    names = [", ".join(each["name"] for each in attacks) for attacks in (before, after)]
    if names[0] != names[1]:
        return [f"attacks: {names[0]} -> {names[1]}"]
    # Every attack repeats the threat model, and most the batch size.
    repeated = {"threat", *(("batch_size",) if others else ())}
    found = []
    for one, other in zip(before, after, strict=True):
        found += _changes(_without(one, repeated), _without(other, repeated), (one["name"],))
    return found


def _without(value, keys: set[str]):
    if isinstance(value, dict):
        return {key: _without(value[key], keys) for key in value.keys() - keys}
    return [_without(each, keys) for each in value] if isinstance(value, list) else value


def _changes(before, after, path: tuple[str, ...]) -> list[str]:
    found: list[str] = []
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys()):
            pair = before.get(key), after.get(key)
            # These keys say nothing that their content does not; a digest has no content to show.
            is_passed = key in ("config", "components") and not isinstance(pair[1], str)
            found += _changes(*pair, path if is_passed else (*path, key))
        return list(dict.fromkeys(found))
    if _are_lists_of_dicts(before, after):
        if len(before) != len(after):
            return [f"{' '.join(path)}: {len(before)} -> {len(after)}"]
        for number, (one, other) in enumerate(zip(before, after, strict=True)):
            found += _changes(one, other, (*path, _called(number, one)))
        return found
    if before == after:
        return []
    if path[-1:] in (("weights",), ("config",)) or (not path):
        return [f"{' '.join(path) or 'configuration'}: others"]
    texts = _value(path[-1], before), _value(path[-1], after)
    return [f"{' '.join(path)}: {' -> '.join(_shortened(*texts))}"]


def _called(number: int, each: dict) -> str:
    """An attack has a name; a layer, whose name Keras counts up, a place and a class."""
    name, kind = each.get("config", each).get("name"), each.get("class_name")
    return name or (f"{number} ({kind})" if kind else str(number))


def _are_lists_of_dicts(before, after) -> bool:
    are_lists = isinstance(before, list) and isinstance(after, list)
    return are_lists and all(isinstance(each, dict) for each in (*before, *after))


def _value(name: str, value) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    if name in ("epsilon", "step_size"):
        text = min(epsilon_in_pixels(value, (0, 1)) or text, text, key=len)
    return text


def _shortened(before: str, after: str) -> tuple[str, str]:
    """Cuts two texts to what shows the first difference between them."""
    if max(len(before), len(after)) <= _VALUE_LENGTH:
        return before, after
    alike = len(os.path.commonprefix([before, after]))
    first = max(alike - _SHOWN_BEFORE, 0)
    return _cut(before, first), _cut(after, first)


def _cut(text: str, first: int) -> str:
    rest = text[first : first + _VALUE_LENGTH]
    end = "..." if len(text) > first + _VALUE_LENGTH else ""
    return f"{'...' if first else ''}{rest}{end}"
