"""Every experiment builds its model and runs its smoke variant from end to end."""

import csv
import json
import math

import pytest
from experiments import NAMES, load

from he_keras import experiment

#: Kinds of training and head that differ most.
TYPICAL = ("cifar10_free_at_m_he", "quickstart_digits")


def _shape(plain):
    """The configuration without its numbers, the name of the run and the attacks afterwards."""
    if isinstance(plain, dict):
        left_out = ("name", "evaluation", "seed") if "objective" in plain else ()
        return {key: _shape(value) for key, value in plain.items() if key not in left_out}
    if isinstance(plain, list):
        return [_shape(each) for each in plain]
    is_number = isinstance(plain, (int, float)) and not isinstance(plain, bool)
    return "number" if is_number or str(plain)[:1].isdigit() else plain


def _settings(plain, key=""):
    """Every (key, value) of a configuration without its numbers."""
    if isinstance(plain, dict) and plain:
        return set().union(*(_settings(each, f"{key}.{name}") for name, each in plain.items()))
    return {(key, json.dumps(plain))}


def _to_run():
    """Configurations that have every setting between them; others differ in numbers only."""
    settings = {}
    for name in NAMES:
        smoke = experiment.to_plain(experiment.smoke_variant(load(name)))
        settings[name] = _settings(_shape(smoke))
    chosen = list(TYPICAL)
    while True:
        seen = set().union(*(settings[name] for name in chosen))
        best = max(NAMES, key=lambda name: len(settings[name] - seen))
        if settings[best] <= seen:
            break
        chosen.append(best)
    return sorted(chosen)


PARAMETERS = {
    "cifar10_trades_he": 46.16e6,
    "cifar10_fast_at_linear": 11.17e6,
    "cifar10_small": 0.30e6,
    "quickstart_digits": 0.02e6,
}
IMAGENET_PARAMETERS = {
    "resnet-50": 25.56e6,
    "resnet-152": 60.19e6,
    "wide-resnet-50-2": 68.88e6,
    "wide-resnet-101-2": 126.89e6,
}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        *PARAMETERS.items(),
        *(
            pytest.param(
                f"imagenet_free_at_{network.replace('-', '_')}_linear",
                number,
                marks=pytest.mark.slow,
            )
            for network, number in IMAGENET_PARAMETERS.items()
        ),
    ],
)
def test_full_size_model_builds(name, parameters):
    model = experiment.build_model(load(name), steps_per_epoch=391)
    trainable = sum(math.prod(variable.shape) for variable in model.trainable_variables)
    assert trainable == pytest.approx(parameters, rel=0.03)


def assert_complete(folder, config):
    expected = {"config.json", "environment.json", "history.csv", "model.keras"}
    assert expected <= {each.name for each in folder.iterdir()}
    assert json.loads((folder / "config.json").read_text()) == experiment.to_plain(config)
    environment = json.loads((folder / "environment.json").read_text())
    assert {"keras", "tensorflow", "python", "devices", "seed", "commit"} <= set(environment)
    assert (folder / "checkpoints" / "latest.npz").stat().st_size > 1000
    assert (folder / "checkpoints" / "best.keras").exists()
    assert list(folder.glob("logs/train/events.*"))
    assert list(folder.glob("logs/validation/events.*"))
    assert not [each for each in folder.rglob("*") if "partial" in each.name]


def _to_build():
    """The first experiment of those whose smoke variants build the same model."""
    first = {}
    for name in NAMES:
        smoke = experiment.to_plain(experiment.smoke_variant(load(name)))
        parts = {key: smoke[key] for key in smoke.keys() - {"name", "data", "evaluation"}}
        first.setdefault(json.dumps(parts, sort_keys=True), name)
    return sorted(first.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", _to_build())
def test_smoke_variant_builds(name):
    model = experiment.build_model(experiment.smoke_variant(load(name)), steps_per_epoch=2)
    assert model.built and model.trainable_variables


@pytest.mark.slow
@pytest.mark.parametrize("name", _to_run())
def test_smoke_variant_runs(name, tmp_path):
    original = load(name)
    config = experiment.smoke_variant(original)
    assert config.is_locked and config.name == f"{name}_smoke"
    assert config.head.kind == original.head.kind
    assert config.objective.name == original.objective.name
    model = experiment.run_training(config, tmp_path)
    updates = 2 * config.objective.get("num_replays", 1)
    assert int(model.optimizer.iterations) == updates
    assert_complete(tmp_path, config)
    with open(tmp_path / "history.csv", newline="") as file:
        (row,) = csv.DictReader(file)
    assert math.isfinite(float(row["loss"])) and math.isfinite(float(row["val_loss"]))
    assert 0 <= float(row["val_robust_accuracy"]) <= float(row["val_accuracy"]) <= 1


def test_smoke_variant_leaves_the_original_alone():
    config = load("imagenet_free_at_resnet_50_he")
    before = experiment.to_plain(config)
    small = experiment.smoke_variant(config)
    assert experiment.to_plain(config) == before
    assert small.network.input_shape == (64, 64, 3)
