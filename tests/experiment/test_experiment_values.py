"""Every experiment's values are those of tests/goldens/experiments.json.

`python tests/experiment/test_experiment_values.py` writes the file anew; that is a decision. A key
that was added later must have its default. The file holds the default configuration, and for each
experiment only what differs from it; its smoke variant differs from the experiment.
"""

import importlib
import json
import pathlib

import pytest
from experiments import ENTRIES, NAMES, load

from he_keras import experiment

STORED = pathlib.Path(__file__).resolve().parents[1] / "goldens" / "experiments.json"
_ABSENT = "(absent)"


def flat(tree, prefix=""):
    """A configuration as {"section.key": value}; an empty section is a value."""
    found = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            found.update(flat(value, f"{prefix}{key}."))
        else:
            found[f"{prefix}{key}"] = value
    return found


def changes(values, reference):
    """What turns the reference into the values."""
    keys = values.keys() | reference.keys()
    return {
        key: values.get(key, _ABSENT)
        for key in sorted(keys)
        if values.get(key, _ABSENT) != reference.get(key, _ABSENT)
    }


def changed(reference, difference):
    values = {**reference, **difference}
    return {key: value for key, value in values.items() if value != _ABSENT}


def plain(config):
    return flat(experiment.to_plain(config))


def described(name, default):
    config = load(name)
    found = {"config": changes(plain(config), default)}
    found["smoke"] = changes(plain(experiment.smoke_variant(config)), plain(config))
    module = importlib.import_module(f"he_keras.experiment.catalog.{ENTRIES[name].file}")
    if ENTRIES[name].has_search:
        found["search"] = json.loads(json.dumps(module.get_search()))
    return found


@pytest.fixture(scope="module")
def stored():
    return json.loads(STORED.read_text(encoding="utf-8"))


def test_every_experiment_is_stored(stored):
    assert sorted(stored["experiments"]) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_values(stored, name):
    now = plain(experiment.default_config())
    added = {key: now[key] for key in now.keys() - stored["default"].keys()}
    config = changed(stored["default"], stored["experiments"][name]["config"])
    assert plain(load(name)) == {**added, **config}
    smoke = changed(config, stored["experiments"][name]["smoke"])
    assert plain(experiment.smoke_variant(load(name))) == {**added, **smoke}
    search = stored["experiments"][name].get("search")
    assert search == described(name, stored["default"]).get("search")


def _write() -> None:
    default = plain(experiment.default_config())
    lines = [f"{json.dumps(name)}: {json.dumps(described(name, default))}" for name in NAMES]
    text = ",\n".join(lines)
    STORED.write_text(
        f'{{"default": {json.dumps(default)},\n"experiments": {{\n{text}\n}}}}\n', encoding="utf-8"
    )


if __name__ == "__main__":
    _write()
