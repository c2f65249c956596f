"""PAS's configurations, and what the configuration says of radius, cycles and optimizer."""

import json

import experiments
import keras
import numpy as np
import pytest
from learning_rates import rate_at, stored_schedule

from he_keras import experiment, optimizers, schedules
from he_keras.experiment.catalog import pas_cifar10, pas_mnist

STEPS = 469


def load(name="mnist_pas_linf_cosine", **changes):
    config = experiments.load(name)
    with config.unlocked():
        for name, values in changes.items():
            if name in ("schedule", "epsilon_schedule"):
                config[name] = values
            else:
                config[name].update(values)
    return config.lock()


def radius(config, steps=STEPS):
    return experiment.build_objective(config, steps).epsilon_schedule


def test_the_command_of_the_readme():
    config = load()
    objective = experiment.build_objective(config, STEPS)
    schedule = objective.epsilon_schedule
    assert type(schedule) is schedules.CycleCosine
    values = [float(schedule(epoch * STEPS)) for epoch in (0, 50, 61, 99)]
    np.testing.assert_allclose(values, [0.0, 0.3, 0.4, 0.4], rtol=1e-6)
    assert objective.threat.epsilon == 0.4
    assert (objective.attack.num_steps, objective.attack.step_size) == (50, 0.01)
    assert objective.attack.random_start == 0.01
    optimizer = experiment.build_optimizer(config, STEPS)
    assert type(optimizer) is keras.optimizers.Adam
    assert float(optimizer.learning_rate) == pytest.approx(1e-4)
    assert (optimizer.beta_1, optimizer.epsilon, optimizer.weight_decay) == (0.9, 1e-8, None)
    assert config.network.options.width == 16 and config.train.epochs == 100


def test_restarts_of_radius_and_learning_rate_share_their_ends():
    config = load("cifar10_pas_vgg16_cosine_restarts")
    growing, optimizer = radius(config, 391), experiment.build_optimizer(config, 391)
    stored = stored_schedule(optimizer)["config"]
    assert growing.checkpoints == stored["checkpoints"] == [0.0, 50.0, 100.0, 150.0, 200.0]
    for cycle in range(4):
        epochs = [cycle * 50 + each for each in (0, 25, 49)]
        radii = [255 * float(growing(epoch * 391)) for epoch in epochs]
        rates = [rate_at(optimizer, epoch * 391) for epoch in epochs]
        np.testing.assert_allclose(radii, [0, 6, 8], atol=1e-5)
        np.testing.assert_allclose(rates, [0.1, 0.01, 0.001], rtol=1e-5)
    assert config.train.snapshots


def test_every_preset_is_complete_and_its_radius_ends_at_epsilon():
    configs = [
        *(
            pas_mnist.get_config(f"{t},{s}")
            for t in pas_mnist.THREATS
            for s in ("cosine", "linear")
        ),
        *(
            pas_cifar10.get_config(f"{network},linear,{cycles}")
            for network in pas_cifar10.NETWORKS
            for cycles in pas_cifar10.CYCLES
        ),
        pas_mnist.get_config("l2,small"),
    ]
    for config in configs:
        experiment.check_config(config)
        schedule = radius(config, 10)
        last = 10 * config.train.epochs - 1
        assert float(schedule(0)) == 0.0
        threat = experiment.build_threat(config)
        assert float(schedule(last)) == pytest.approx(threat.epsilon)
    constant = pas_cifar10.get_config("vgg16,constant,whole")
    for config in (pas_mnist.get_config("l2,constant"), constant):
        assert radius(config) is None


def test_a_radius_may_exceed_epsilon_only_if_it_says_so():
    options = {"name": "linear", "initial": "0.3", "slope": 0.1}
    assert float(radius(load(epsilon_schedule=options))(4 * STEPS)) == np.float32(0.4)
    options["maximum"] = "0.6"
    assert float(radius(load(epsilon_schedule=options))(2 * STEPS)) == pytest.approx(0.5)
    constant = radius(load(epsilon_schedule={"name": "constant", "initial": 0.2}))
    assert [float(constant(step)) for step in (0, 10_000)] == [np.float32(0.2)] * 2


def test_free_at_counts_its_replays():
    config = load(
        objective={"name": "free_at", "num_replays": 8},
        epsilon_schedule={"name": "cycle_linear", "initial": 0, "final": 0.4},
        train={"epochs": 10},
    )
    with config.unlocked():
        config.objective = {"name": "free_at", "num_replays": 8}
    schedule = radius(config, 10)
    assert [round(float(schedule(80 * epoch)), 3) for epoch in (0, 5, 10)] == [0.0, 0.2, 0.4]


def test_without_the_length_of_an_epoch_the_radius_is_nominal():
    assert experiment.build_objective(load()).epsilon_schedule is None


def test_sgd_stays_the_default():
    config = experiment.default_config()
    assert config.optimizer.name == "sgd" and config.epsilon_schedule.name == ""
    optimizer = experiment.build_optimizer(config, 10)
    assert type(optimizer) is optimizers.SGD and optimizer.coupled_weight_decay == 2e-4
    assert experiment.build_objective(config, 10).epsilon_schedule is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": {"name": "lion"}}, "Unknown optimizer.name.*'lion'"),
        ({"train": {"cycle_ends": (50, 101)}}, r"up to train.epochs=100.*\(50, 101\)"),
        ({"train": {"cycle_ends": (50, 50)}}, "Invalid cycles"),
        ({"train": {"cycle_ends": (0, 50)}}, "Invalid cycles"),
        ({"train": {"snapshots": True}}, "Snapshots are taken where cycles end.*received none"),
    ],
)
def test_bad_values_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        experiment.check_config(load(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": {"weight_decay": 1e-4}}, "Adam has neither.*weight_decay=0.0001"),
        (
            {"schedule": {"name": "triangular", "cycle_momentum": True}},
            "Adam has neither weight decay nor cyclic momentum",
        ),
        (
            {"epsilon_schedule": {"name": "cosinus"}},
            "Unknown schedule; expected.*received 'cosinus'",
        ),
        ({"epsilon_schedule": {"name": "cycle_cos", "initial": 0}}, "received no final"),
        (
            {
                "epsilon_schedule": {
                    "name": "cycle_cos",
                    "initial": 0,
                    "final": 1,
                    "checkpoints": (3,),
                },
                "train": {"cycle_ends": (100,)},
            },
            "Two lists of checkpoints",
        ),
    ],
)
def test_what_cannot_be_built_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        experiment.build_model(load(**changes), STEPS)


def test_old_run_folders_are_read(tmp_path):
    config = experiment.to_plain(load("mnist_pas_small"))
    del config["epsilon_schedule"], config["optimizer"]["name"]
    del config["train"]["cycle_ends"], config["train"]["snapshots"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = experiment.read_config(tmp_path)
    experiment.check_config(read)
    assert read.optimizer.name == "sgd" and read.epsilon_schedule.name == ""
    assert read.train.cycle_ends == ()


def test_a_run_folder_is_read_as_it_was_written(tmp_path):
    config = load("cifar10_pas_vgg16_cosine_restarts")
    (tmp_path / "config.json").write_text(json.dumps(experiment.to_plain(config)))
    read = experiment.read_config(tmp_path)
    experiment.check_config(read)
    assert tuple(read.train.cycle_ends) == config.train.cycle_ends
    assert radius(read, 10).get_config() == radius(config, 10).get_config()


def test_the_smoke_variant_shrinks_what_counts_in_epochs():
    config = load(
        "mnist_pas_small",
        schedule={"name": "warm_up", "target": 0.1, "num_epochs": 6},
        epsilon_schedule={"name": "linear", "initial": 0, "slope": "0.05", "unit": "batch"},
    )
    small = experiment.smoke_variant(config)
    assert small.schedule.to_dict() == {**config.schedule, "num_epochs": 0.5}
    assert float(radius(small, 2)(1)) == pytest.approx(0.3)
    restarts = experiment.smoke_variant(load("cifar10_pas_vgg16_cosine_restarts"))
    assert (restarts.train.epochs, restarts.train.cycle_ends) == (1, (1,))
    experiment.check_config(restarts)
    experiment.build_optimizer(restarts, 2)
