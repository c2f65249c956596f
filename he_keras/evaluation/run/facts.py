"""What decides the verdicts of an evaluation, as plain data, and how two of them differ.

The data are the settings of the evaluation, and facts of the model. A difference is a short text.
"""

import hashlib
import inspect
import json
import os
import re
from collections.abc import Iterator

import keras
import numpy as np

from he_keras.attacks import Attack, Ensemble
from he_keras.attacks.framework.ensemble import parts
from he_keras.evaluation.run.examples import PREFIX, Clean
from he_keras.threat import ThreatModel, fraction_of_255
from he_keras.version import __version__

# What a model was built and trained with, such as initial weights, but does not compute with.
_NO_FUNCTION = frozenset(
    {"build_config", "compile_config", "evaluation_attack", "module", "objective"}
    | {"registered_name", "seed", "trainable"}
)
_NO_FUNCTION_SUFFIXES = ("_initializer", "_regularizer", "_constraint")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
# A text of differences names so many, and shows so much of each value.
_MOST_SHOWN = 3
_VALUE_LENGTH = 60
# A long text is cut: this many letters are shown before the first difference.
_SHOWN_BEFORE = 20


def settings_of(
    model, clean: Clean, attacks, threat: ThreatModel, mode: str, batch_size: int, block_size: int
) -> dict:
    """Returns the settings of an evaluation, with a digest of the data and facts of the model."""
    return {
        "attacks": [_attack_facts(attack) for attack in attacks],
        "batch_size": batch_size,
        "block_size": block_size,
        "data": clean.digest,
        "mode": mode,
        "model": model_facts(model),
        "num_examples": len(clean.labels),
        "stages": [stage_names(number, attack) for number, attack in enumerate(attacks)],
        "threat": threat.get_config(),
        "he_keras": __version__,
    }


def stage_names(number: int, attack: Attack) -> list[str]:
    """Returns what the batches of an evaluation's attack, or of an ensemble's parts, are called."""
    name = f"{number:02d}-{attack.name}"
    if not isinstance(attack, Ensemble):
        return [name]
    return [f"{name}.{stage:02d}-{part.name}" for stage, part in enumerate(parts(attack))]


def _attack_facts(attack: Attack) -> dict:
    facts = {"class": type(attack).__name__, **attack.get_config()}
    for part in parts(attack):
        _check_complete(part)
    # The configuration of a transfer attack only names the file of its substitute.
    substitute = getattr(attack, "substitute", None)
    if substitute is not None:
        facts["substitute"] = brief(model_facts(substitute.model))
    return facts


def _check_complete(attack: Attack) -> None:
    """Raises a ValueError if a setting of an attack of one's own would not be seen."""
    config = attack.get_config()
    if type(attack).__module__.startswith("he_keras."):
        # Tests hold their settings; one leaves out what its other settings make meaningless.
        return
    # The metaclass hides the signature of the class.
    for name, argument in inspect.signature(type(attack).__init__).parameters.items():
        is_named = argument.kind in (argument.POSITIONAL_OR_KEYWORD, argument.KEYWORD_ONLY)
        if is_named and name not in ("self", *config):
            raise ValueError(
                f"A setting of {attack.name} that nobody can see; expected every argument of "
                f"{type(attack).__name__} as an attribute of the same name; received none named "
                f"{name!r}: keep it, so that two attacks can be told apart"
            )


def model_facts(model) -> dict:
    """Returns a model's class, and its configuration and a digest of its weights if it has them.

    The configuration leaves out names, which Keras numbers, and what only training uses.

    Example:
        >>> import keras
        >>> from he_keras.evaluation.run.facts import model_facts
        >>> layers = [keras.Input((2,)), keras.layers.Rescaling(0.5)]
        >>> model_facts(keras.Sequential(layers))["config"]["layers"][1]["config"]["scale"]
        0.5
    """
    facts: dict = {"class": type(model).__name__}
    if getattr(model, "conversion", ""):
        facts["conversion"] = model.conversion
    if isinstance(model, keras.Model):
        try:
            facts["config"] = _function_config(model.get_config())
        # A user's model need not have one; its answers are recorded in any case.
        except Exception:  # noqa: BLE001
            facts["config"] = None
    weights = weights_digest(model)
    return facts if weights is None else {**facts, "weights": weights}


def weights_digest(model) -> str | None:
    """Returns a digest of a model's weights and statistics; None for a function without any."""
    # A function has neither attribute; a model of another library may have the second one.
    variables = getattr(model, "weights", None) or getattr(model, "variables", None)
    if not variables or callable(variables):
        return None
    digest = hashlib.sha256()
    for variable in variables:
        digest.update(np.asarray(variable).tobytes())
    return digest.hexdigest()


def for_report(settings: dict) -> dict:
    """Returns the settings without how the record is divided, and with brief facts of the model."""
    kept = {key: settings[key] for key in settings.keys() - {"block_size", "stages"}}
    return {**{key: kept[key] for key in sorted(kept)}, "model": brief(kept["model"])}


def _function_config(config: dict) -> dict:
    names: dict[str, str] = {}
    for name in _names_in(config):
        names.setdefault(name, f"#{len(names)}")
    return json.loads(json.dumps(_without_names(config, names), default=_text, sort_keys=True))


def _text(value) -> str:
    return _ADDRESS.sub("", repr(value))


def _names_in(value) -> Iterator[str]:
    if isinstance(value, dict) and value.get("class_name") != "DTypePolicy":
        if isinstance(value.get("name"), str):
            yield value["name"]
        for each in value.values():
            yield from _names_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _names_in(each)


def _without_names(value, names: dict[str, str]):
    if isinstance(value, dict):
        if value.get("class_name") == "DTypePolicy":
            return value["config"]["name"]
        if value.get("class_name") == "__lambda__":
            # Its bytes change with its line number; its answers are recorded.
            return "lambda"
        return {
            key: _without_names(each, names)
            for key, each in value.items()
            if key != "name" and key not in _NO_FUNCTION and not key.endswith(_NO_FUNCTION_SUFFIXES)
        }
    if isinstance(value, list | tuple):
        return [_without_names(each, names) for each in value]
    return names.get(value, value) if isinstance(value, str) else value


def brief(facts: dict) -> dict:
    """Returns a model's facts with a digest of its configuration in place of all of it."""
    if facts.get("config") is None or isinstance(facts["config"], str):
        return facts
    text = json.dumps(facts["config"], sort_keys=True)
    return {**facts, "config": hashlib.sha256(text.encode()).hexdigest()}


def differences(recorded: dict, now: dict) -> list[str]:
    """Returns how two evaluations' settings differ, one short text each.

    Example:
        >>> from he_keras.evaluation.run.facts import differences
        >>> recorded = {"mode": "survivors", "attacks": [{"name": "fast"}]}
        >>> differences(recorded, {"mode": "survivors", "attacks": [{"name": "pgd-10"}]})
        ['attacks: fast -> pgd-10']
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
    if not isinstance(value, float):
        return str(value)
    text = f"{value:.6g}"
    fraction = fraction_of_255(value) if name in ("epsilon", "step_size") else None
    return min(fraction or text, text, key=len)


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
