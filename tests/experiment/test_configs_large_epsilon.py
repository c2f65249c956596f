"""FastAT at large epsilon: the argument says the epsilon and the guard."""

import csv

import pytest

from he_keras import experiment
from he_keras.experiment.catalog import cifar10_large_epsilon
from he_keras.objectives import FastAT

GUARDS = tuple(cifar10_large_epsilon.GUARDS)


def load(epsilon, guard="none"):
    return cifar10_large_epsilon.get_config(f"{epsilon},{guard}")


@pytest.mark.parametrize("epsilon", [12, 16])
@pytest.mark.parametrize("guard", GUARDS)
def test_runs_of_one_epsilon_differ_in_the_objective_alone(epsilon, guard):
    config, plain = load(epsilon, guard), load(epsilon)
    experiment.check_config(config)
    assert config.threat.epsilon == f"{epsilon}/255"
    assert float(config.evaluation.step_size.partition("/")[0]) == epsilon / 4
    objective = experiment.build_objective(config)
    assert objective.attack_training_mode
    if type(objective) is FastAT:
        assert objective.attack.step_size == pytest.approx(1.25 * epsilon / 255)
    same, other = experiment.to_plain(plain), experiment.to_plain(config)
    for each in (same, other):
        del each["objective"], each["name"], each["train"]["guard_on_collapse"]
    assert same == other
    assert (config.name == plain.name) == (guard == "none")
    recovers = config.train.guard_on_collapse == "recover"
    assert recovers == hasattr(objective, "start_recovery") == (guard == "fast_adv_plus")


def test_an_unknown_guard_is_refused():
    with pytest.raises(ValueError, match="GUARD one of none, .*grad_align.*; received .*12,gradal"):
        load(12, "gradalign")


@pytest.mark.slow
@pytest.mark.parametrize("guard", ["none", "fast_adv_plus"])
def test_smoke_variants_write_what_the_guard_saw(guard, tmp_path):
    config = experiment.smoke_variant(load(16, guard))
    experiment.run_training(config, tmp_path)
    with open(tmp_path / "history.csv", newline="") as file:
        (row,) = csv.DictReader(file)
    assert 0 <= float(row["guard_accuracy_min"]) <= float(row["guard_accuracy"]) <= 1
    with open(tmp_path / "guard.csv", newline="") as file:
        assert [look["batch"] for look in csv.DictReader(file)] == ["2"]
