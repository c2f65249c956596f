"""What decides the verdicts of an evaluation, as plain data."""

import hashlib
import inspect
import json
import re
from collections.abc import Iterator

import keras
import numpy as np

from he_keras.attacks import Attack
from he_keras.attacks.framework.ensemble import parts
from he_keras.evaluation.run.attack_runs import stage_names
from he_keras.evaluation.run.differences import brief
from he_keras.evaluation.run.examples import Clean
from he_keras.threat import ThreatModel
from he_keras.version import __version__

# What a model was built and trained with, such as initial weights, but does not compute with.
_NO_FUNCTION = frozenset(
    {"build_config", "compile_config", "evaluation_attack", "module", "objective"}
    | {"registered_name", "seed", "trainable"}
)
_NO_FUNCTION_SUFFIXES = ("_initializer", "_regularizer", "_constraint")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


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
        >>> from he_keras.evaluation.run.fingerprint import model_facts
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
