"""The public names are pinned in public_names.json; changing them is a decision, not an accident.

`python tests/project/test_public_api.py` writes the file anew.
"""

import ast
import importlib
import json
import pathlib

import pytest

import he_keras

STORED = pathlib.Path(__file__).with_name("public_names.json")
PACKAGE = pathlib.Path(he_keras.__file__).parent
MODULES = (
    "he_keras",
    "he_keras.analysis",
    "he_keras.attacks",
    "he_keras.callbacks",
    "he_keras.cpu",
    "he_keras.data",
    "he_keras.data.corruptions",
    "he_keras.distribution",
    "he_keras.evaluation",
    "he_keras.experiment",
    "he_keras.export",
    "he_keras.layers",
    "he_keras.networks",
    "he_keras.objectives",
    "he_keras.schedules",
    "he_keras.search",
    "he_keras.serving",
    "he_keras.zoo",
)
#: Parts of one public function each, and what the command `he-keras` runs.
PRIVATE = (
    "he_keras.attacks.framework",
    "he_keras.evaluation.checks",
    "he_keras.evaluation.gate",
    "he_keras.evaluation.report",
    "he_keras.evaluation.run",
    "he_keras.benchmarks",
    "he_keras.experiment.catalog",
    "he_keras.programs",
    "he_keras.reproduction",
    "he_keras.zoo.recipes",
)


def current_names():
    return {name: sorted(importlib.import_module(name).__all__) for name in MODULES}


def packages():
    return sorted(
        ".".join(["he_keras", *path.parent.relative_to(PACKAGE).parts])
        for path in PACKAGE.rglob("__init__.py")
    )


def test_every_package_is_public_or_private_on_purpose():
    assert packages() == sorted(MODULES + PRIVATE)


@pytest.mark.parametrize("module", MODULES)
def test_names_are_those_stored(module):
    stored = json.loads(STORED.read_text())
    assert sorted(stored) == sorted(MODULES)
    now = current_names()[module]
    added = sorted(set(now) - set(stored[module]))
    removed = sorted(set(stored[module]) - set(now))
    assert (added, removed) == ([], []), "if meant: python tests/project/test_public_api.py"


@pytest.mark.parametrize("name", MODULES)
def test_all_names_exist_once_and_are_all_there_is(name):
    module = importlib.import_module(name)
    assert len(set(module.__all__)) == len(module.__all__)
    missing = [each for each in module.__all__ if not hasattr(module, each)]
    assert missing == []
    # What a package's own file imports by name is public: nothing leaks by accident.
    tree = ast.parse(pathlib.Path(module.__file__).read_text())
    imported = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert {each for each in imported if not each.startswith("_")} <= set(module.__all__)


def test_names_of_the_design():
    names = current_names()
    assert {
        "ThreatModel",
        "HEAdversarialModel",
        "CosineHead",
        "FeatureNorm",
        "evaluate_robustness",
        "export_saved_model",
        "attacks",
        "objectives",
        "networks",
        "data",
        "evaluation",
    } <= set(names["he_keras"])
    assert {"get", "names", "Attack", "AttackResult", "PGD", "FGSM"} <= set(
        names["he_keras.attacks"]
    )
    objectives = {
        "get",
        "names",
        "Objective",
        "Standard",
        "PGDAT",
        "ALP",
        "TRADES",
        "FreeAT",
        "FastAT",
    }
    assert objectives <= set(names["he_keras.objectives"])
    assert {"get", "names", "PreActResNet18"} <= set(names["he_keras.networks"])


if __name__ == "__main__":
    STORED.write_text(json.dumps(current_names(), indent=2) + "\n")
