"""Every experiment: strict, and as the papers and their released codes say."""

import json
import math

import numpy as np
import pytest
from experiments import ENTRIES, NAMES, header, load
from learning_rates import rate_at
from ml_collections import ConfigDict

from he_keras import experiment
from he_keras.objectives import ALP, TRADES, FastAT, FreeAT

OBJECTIVES = ("pgd_at", "alp", "trades", "free_at", "fast_at")
HEADS = ("linear", "he", "m_he")
IMAGENET_NETWORKS = ("resnet-50", "resnet-152", "wide-resnet-50-2", "wide-resnet-101-2")

# Clean and PGD-20 (Table 2) or PGD-50 (Table 3) accuracy of the HE paper, for each head.
PAPER_CIFAR10 = {
    "pgd_at": {"linear": (86.75, 53.97), "he": (86.19, 59.36), "m_he": (86.25, 59.90)},
    "alp": {"linear": (87.18, 52.29), "he": (89.91, 57.69), "m_he": (89.23, 57.09)},
    "trades": {"linear": (84.62, 56.48), "he": (84.88, 62.02), "m_he": (84.30, 61.83)},
    "fast_at": {"linear": (83.80, 46.40), "he": (82.58, 52.55), "m_he": (83.14, 53.49)},
    "free_at": {"linear": (77.21, 46.14), "he": (76.85, 50.98), "m_he": (77.59, 51.85)},
}
# Clean, PGD-10 and PGD-50 accuracy (Table 4).
PAPER_IMAGENET = {
    "resnet-50": {"linear": (60.28, 32.13, 31.39), "he": (61.83, 40.22, 39.85)},
    "resnet-152": {"linear": (65.20, 36.97, 35.87), "he": (65.41, 43.24, 42.60)},
    "wide-resnet-50-2": {"linear": (64.18, 36.24, 35.38), "he": (65.28, 43.83, 43.47)},
    "wide-resnet-101-2": {"linear": (66.15, 39.35, 38.23), "he": (66.37, 45.35, 45.04)},
}
# Scale and margin: the released commands, and the paper's text for m-HE.
SCALE_AND_MARGIN = {
    ("pgd_at", "he"): (10.0, 0.2),
    ("alp", "he"): (20.0, 0.3),
    ("trades", "he"): (15.0, 0.2),
    ("free_at", "he"): (15.0, 0.2),
    ("fast_at", "he"): (15.0, 0.2),
}


def imagenet_name(network, head):
    return f"imagenet_free_at_{network.replace('-', '_')}_{head}"


def test_every_promised_experiment_is_there():
    promised = {f"cifar10_{objective}_{head}" for objective in OBJECTIVES for head in HEADS}
    promised |= {imagenet_name(n, head) for n in IMAGENET_NETWORKS for head in ("linear", "he")}
    assert promised | {"cifar10_small", "quickstart_digits"} <= set(NAMES)


# Strict


@pytest.mark.parametrize("name", NAMES)
def test_config_is_named_locked_and_complete(name):
    config = load(name)
    assert config.name == name
    assert config.is_locked
    experiment.check_config(config)
    with pytest.raises(AttributeError):
        config.head.scael = 10.0
    with pytest.raises(TypeError):
        config.train.epochs = "many"
    plain = experiment.to_plain(config)
    assert json.loads(json.dumps(plain)) == plain


@pytest.mark.parametrize("name", NAMES)
def test_header_names_its_command(name):
    text = header(name)
    entry = ENTRIES[name]
    assert f"Command:  he-keras {'search' if entry.has_search else 'train'} --config=" in text
    assert f"--config={entry.file}" in text and entry.argument in text
    assert "Time" in text
    assert all(len(line) <= 110 for line in text.splitlines())


def test_each_call_returns_a_config_of_its_own():
    first = load("cifar10_small")
    first.head.scale = 1.0
    assert load("cifar10_small").head.scale == 15.0


@pytest.mark.parametrize(
    ("section", "key"),
    [(None, "epochs"), ("train", "epoch"), ("head", "scael"), ("data", "batch_size")],
)
def test_unknown_keys_of_an_unlocked_config_are_errors(section, key):
    config = load("cifar10_small")
    with config.unlocked():
        (config[section] if section else config)[key] = 1
    with pytest.raises(
        ValueError, match="Unknown or missing configuration keys; expected"
    ) as error:
        experiment.check_config(config)
    assert f"received unknown=['{key}'], missing=[]" in str(error.value)
    valid = experiment.default_config()
    assert all(name in str(error.value) for name in (valid[section] if section else valid))


def test_missing_keys_and_sections_are_errors():
    config = load("cifar10_small")
    with config.unlocked():
        config.train = {"epochs": 1}
    with pytest.raises(ValueError, match="missing=.*'batch_size'"):
        experiment.check_config(config)
    config = ConfigDict({**load("cifar10_small").to_dict(), "train": 3})
    with pytest.raises(ValueError, match=r"Not a section; expected train\.\[batch_size.*train=3"):
        experiment.check_config(config)


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("train", "epochs", 0, "train.epochs=0"),
        ("train", "batch_size", -1, "train.batch_size=-1"),
        ("evaluation", "batch_size", 0, "evaluation.batch_size=0"),
        ("evaluation", "attacks", ("pdg-20",), "Unknown attack.*pgd-K.*'pdg-20'"),
        ("evaluation", "attacks", (), "No attacks"),
        ("evaluation", "step_size", "-0.1", "-0.1"),
        ("optimizer", "learning_rate", math.nan, "optimizer.learning_rate=nan"),
        ("optimizer", "learning_rate", -0.1, "optimizer.learning_rate=-0.1"),
        ("head", "num_classes", 0, "head.num_classes=0"),
        ("threat", "epsilon", "9/0", "9/0"),
        ("threat", "epsilon", "-8/255", "-8/255"),
        ("threat", "norm", "l7", "l7"),
        (None, "seed", -3, "seed=-3"),
    ],
)
def test_bad_values_are_refused(section, key, value, message):
    config = load("cifar10_small")
    with config.unlocked():
        (config[section] if section else config)[key] = value
    with pytest.raises(ValueError, match=message):
        experiment.check_config(config)


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("head", {"kind": "cosine"}, "Unknown head.*head.kind='cosine'"),
        ("train", {"dtype": "float64"}, "Unknown train.dtype.*train.dtype='float64'"),
        ("objective", {"name": "pgd"}, "Unknown objective.*pgd_at"),
        ("objective", {"name": "pgd_at", "steps": 3}, "Unknown option of objective 'pgd_at'"),
        ("objective", {"name": "pgd_at", "random_start": "up"}, "random_start='up'"),
        ("schedule", {"name": "line"}, "Unknown schedule.*triangular"),
        ("schedule", {"name": "triangular", "drop": 3}, "option of the schedule"),
        ("network", {"name": "resnet-51"}, "resnet-51"),
        ("network", {"name": "preact-resnet", "options": {"widths": 3}}, "widths"),
    ],
)
def test_what_cannot_be_built_is_refused(section, values, message):
    config = load("cifar10_small")
    with config.unlocked():
        if section in ("objective", "schedule"):
            config[section] = values
        else:
            config[section].update(values)
    with pytest.raises((ValueError, TypeError), match=message):
        experiment.build_model(config, steps_per_epoch=10)


# Values


def assert_head(config, objective, head):
    assert config.head.kind == head
    assert config.head.num_classes == 10
    assert config.head.feature_norm and config.head.weight_norm
    if head == "he":
        expected = SCALE_AND_MARGIN[objective, head]
        assert (config.head.scale, config.head.margin) == expected
    if head == "m_he":
        assert (config.head.scale, config.head.margin) == (15.0, 0.1)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("objective", ["pgd_at", "alp", "trades"])
def test_values_of_table_2(objective, head):
    config = load(f"cifar10_{objective}_{head}")
    assert_head(config, objective, head)
    assert config.data.name == "cifar10" and config.data.augmentation == "default"
    assert config.network.to_dict() == {
        "name": "wide-resnet-34-10",
        "input_shape": (32, 32, 3),
        "options": {},
    }
    assert (config.train.epochs, config.train.batch_size) == (100, 128)
    optimizer = config.optimizer
    assert (optimizer.learning_rate, optimizer.momentum, optimizer.weight_decay) == (
        0.1,
        0.9,
        2e-4,
    )
    assert config.schedule.to_dict() == {
        "name": "step",
        "drop_epochs": (75, 90),
        "drop_factor": 0.1,
    }
    built = experiment.build_objective(config)
    assert built.threat.norm == "linf" and built.threat.epsilon == 0.031
    assert (built.attack.num_steps, built.attack.step_size) == (10, 0.007)
    assert built.attack.random_start == "gaussian"
    if objective == "alp":
        assert isinstance(built, ALP)
        assert (built.beta, built.clean_weight, built.pairing) == (0.5, 0.5, "mse")
    if objective == "trades":
        assert isinstance(built, TRADES)
        assert (built.beta, built.divergence) == (6.0, "kl")
    attacks = {attack.name: attack for attack in experiment.build_attacks(config)}
    assert {"pgd-20", "pgd-500", "mim-20", "fgsm", "adaptive-pgd-20"} <= set(attacks)
    assert attacks["pgd-20"].step_size == 0.003 and attacks["fgsm"].step_size == 0.031
    assert any(attack.loss == "cw" for attack in attacks.values())


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("objective", ["free_at", "fast_at"])
def test_values_of_table_3(objective, head):
    config = load(f"cifar10_{objective}_{head}")
    assert_head(config, objective, head)
    assert config.network.name == "preact-resnet-18"
    assert config.threat.to_dict() == {"norm": "linf", "epsilon": "8/255"}
    assert config.optimizer.weight_decay == 5e-4 and config.train.batch_size == 128
    assert config.schedule.to_dict() == {"name": "triangular", "cycle_momentum": True}
    built = experiment.build_objective(config)
    if objective == "fast_at":
        assert isinstance(built, FastAT)
        assert (config.train.epochs, config.optimizer.learning_rate) == (30, 0.2)
        assert built.attack.step_size == pytest.approx(10 / 255)
        assert (built.initialization, built.attack_training_mode) == ("random", True)
        assert config.train.overfitting_guard
    else:
        assert isinstance(built, FreeAT)
        assert (config.train.epochs, config.optimizer.learning_rate) == (10, 0.04)
        assert (built.num_replays, built.step_size) == (8, pytest.approx(8 / 255))
        assert not config.train.overfitting_guard
    attacks = {attack.name: attack for attack in experiment.build_attacks(config)}
    assert attacks["pgd-50"].step_size == pytest.approx(2 / 255)


@pytest.mark.parametrize("head", ["linear", "he"])
@pytest.mark.parametrize("network", IMAGENET_NETWORKS)
def test_values_of_table_4(network, head):
    config = load(imagenet_name(network, head))
    assert config.data.name == "imagenet2012"
    assert (config.network.name, config.network.input_shape) == (network, (224, 224, 3))
    assert (config.head.kind, config.head.num_classes) == (head, 1000)
    if head == "he":
        assert (config.head.scale, config.head.margin) == (10.0, 0.2)
    assert (config.train.epochs, config.train.batch_size) == (23, 256)
    optimizer = config.optimizer
    assert (optimizer.learning_rate, optimizer.momentum, optimizer.weight_decay) == (0.1, 0.9, 1e-4)
    assert config.schedule.to_dict() == {"name": "step", "drop_epochs": (8, 16), "drop_factor": 0.1}
    built = experiment.build_objective(config)
    assert isinstance(built, FreeAT)
    assert built.threat.epsilon == built.step_size == 4 / 255
    assert built.num_replays == 4
    attacks = experiment.build_attacks(config)
    assert [attack.name for attack in attacks] == ["pgd-10", "pgd-50"]
    assert {attack.step_size for attack in attacks} == {1 / 255}


@pytest.mark.parametrize(("objective", "heads"), PAPER_CIFAR10.items())
def test_headers_quote_the_papers_numbers_on_cifar10(objective, heads):
    steps = 20 if objective in ("pgd_at", "alp", "trades") else 50
    for head, (clean, robust) in heads.items():
        text = header(f"cifar10_{objective}_{head}")
        assert f"clean {clean:.2f}, PGD-{steps} {robust:.2f}" in text, head


@pytest.mark.parametrize(("network", "heads"), PAPER_IMAGENET.items())
def test_headers_quote_the_papers_numbers_on_imagenet(network, heads):
    for head, (clean, ten, fifty) in heads.items():
        text = header(imagenet_name(network, head))
        assert f"clean {clean:.2f}, PGD-10 {ten:.2f}, PGD-50 {fifty:.2f}" in text, head


def rates(name, epochs, steps_per_epoch=391):
    """The learning rate at the beginning of these epochs, and the momentum."""
    config = load(name)
    optimizer = experiment.build_optimizer(config, steps_per_epoch)
    updates = steps_per_epoch * config.objective.get("num_replays", 1)
    steps = [round(epoch * updates) for epoch in epochs]
    momentum = optimizer.momentum
    values = [momentum if isinstance(momentum, float) else float(momentum(s)) for s in steps]
    return [rate_at(optimizer, step) for step in steps], values


@pytest.mark.parametrize(
    ("name", "epochs", "expected"),
    [
        (
            "cifar10_pgd_at_he",
            (0, 74.99, 75.01, 89.99, 90.01, 99.9),
            (0.1, 0.1, 0.01, 0.01, 0.001, 0.001),
        ),
        (
            "imagenet_free_at_resnet_50_he",
            (0, 7.99, 8.01, 15.99, 16.01, 22.9),
            (0.1, 0.1, 0.01, 0.01, 0.001, 0.001),
        ),
        ("cifar10_fast_at_he", (0, 7.5, 15, 22.5, 30), (0, 0.1, 0.2, 0.1, 0)),
        ("cifar10_free_at_linear", (0, 2.5, 5, 7.5, 10), (0, 0.02, 0.04, 0.02, 0)),
        ("cifar10_small", (0, 5, 10), (0, 0.2, 0)),
    ],
)
def test_learning_rates(name, epochs, expected):
    np.testing.assert_allclose(rates(name, epochs)[0], expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "epochs", "expected"),
    [
        ("cifar10_fast_at_m_he", (0, 15, 30), (0.9, 0.8, 0.9)),
        ("cifar10_free_at_he", (0, 2.5, 5, 10), (0.9, 0.85, 0.8, 0.9)),
        ("cifar10_trades_he", (0, 50), (0.9, 0.9)),
    ],
)
def test_momentum(name, epochs, expected):
    np.testing.assert_allclose(rates(name, epochs)[1], expected, rtol=1e-5)


def test_optimizer_decays_weights_coupled():
    optimizer = experiment.build_optimizer(load("cifar10_pgd_at_linear"), 391)
    assert optimizer.coupled_weight_decay == 2e-4 and optimizer.weight_decay is None
