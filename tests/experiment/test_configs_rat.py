"""The RAT and AWP configurations: as the supplement and the released code say."""

import experiments
import pytest
from experiments import header, load
from learning_rates import rate_at

from he_keras import experiment
from he_keras.objectives import PGDAT, TRADES, FastAT
from he_keras.objectives.awp import AWP
from he_keras.objectives.rat import RAT

NAMES = [name for name in experiments.NAMES if "_rat_" in name]
SMALL = ("cifar10_small_rat", "cifar10_small_awp", "cifar10_budget_rat", "cifar10_budget_awp")
NETWORKS = {
    "preact_resnet_18": "preact-resnet-18",
    "wide_resnet_34_10": "wide-resnet-34-10",
    "vgg_16": "vgg-16-bn",
    "mobilenet_v2": "mobilenet-v2",
}
# Clean accuracy and the first robust one of Tables 7 and 8.
PAPER = {
    "preact_resnet_18_trades": ("clean 82.89", "RayS 56.06"),
    "preact_resnet_18_trades_1st_2nd": ("clean 84.13", "RayS 57.03"),
    "preact_resnet_18_at": ("clean 82.41", "PGD-20 52.77", "C&W-20 50.43", "AutoAttack 47.1"),
    "preact_resnet_18_at_1st_2nd": ("clean 83.56", "PGD-20 54.23", "C&W-20 52.19", "48.7"),
}


def test_the_experiments_of_the_supplement_are_there():
    rows = [f"preact_resnet_18_{base}" for base in ("trades", "at", "trades_awp")]
    rows += [f"{network}_trades" for network in NETWORKS if network != "preact_resnet_18"]
    promised = {f"cifar10_rat_{row}" for row in rows} | {"cifar100_rat_preact_resnet_18_trades"}
    assert set(NAMES) == promised | {f"{name}_1st_2nd" for name in promised}


@pytest.mark.parametrize("name", NAMES)
def test_settings_of_the_released_code(name):
    config = load(name)
    experiment.check_config(config)
    assert config.name == name
    data, network = name.split("_rat_")
    assert config.data.name == data
    assert config.network.name == next(
        value for key, value in NETWORKS.items() if network.startswith(key)
    )
    assert config.network.options["standardize"] is False
    assert (config.head.kind, config.head.num_classes) == ("linear", int(data[5:]))
    assert (config.train.epochs, config.train.batch_size) == (200, 128)
    built = experiment.configuration.build_optimizer(config, 383)
    rates = [rate_at(built, round(383 * epoch)) for epoch in (0, 99.9, 100.1, 149.9, 150.1)]
    assert rates == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001])
    optimizer = config.optimizer
    assert (optimizer.momentum, optimizer.weight_decay) == (0.9, 5e-4)
    attacks = [attack.name for attack in experiment.build_attacks(config)]
    assert attacks == ["pgd-20", "cw-linf-20", "autoattack", "rays-10000"]


@pytest.mark.parametrize("name", NAMES)
def test_objectives_are_those_of_the_name(name):
    objective = experiment.build_objective(load(name))
    if "_awp" in name:
        assert type(objective) is AWP
        assert (objective.gamma, objective.warm_up_steps) == (0.005, 3830)
        objective = objective.base
    if name.endswith("_1st_2nd"):
        assert type(objective) is RAT
        assert (objective.mode, objective.alpha, objective.label_share) == ("released", 0.2, None)
        of_awp = (0.4, 0.0) if "_awp" in name else (0.5, 1e-4)
        assert (objective.second_order_ratio, objective.weight_noise) == of_awp
        objective = objective.base
    if "_at" in name:
        assert type(objective) is PGDAT
    else:
        assert type(objective) is TRADES and objective.beta == 6.0
    attack = objective.attack
    assert (attack.num_steps, attack.random_start) == (10, "gaussian")
    assert attack.step_size == pytest.approx(2 / 255)
    assert objective.threat.epsilon == pytest.approx(8 / 255)


@pytest.mark.parametrize(("row", "numbers"), PAPER.items())
def test_headers_quote_the_papers_numbers(row, numbers):
    text = header(f"cifar10_rat_{row}")
    assert all(number in text for number in numbers)


def test_the_small_ones_differ_from_their_models_in_the_objective_only():
    for name in SMALL:
        config = load(name)
        experiment.check_config(config)
        assert config.name == name
        model = load("cifar10_small" if "small" in name else "cifar10_budget_he")
        with config.unlocked(), model.unlocked():
            for each in (config, model):
                each.name, each.objective, each.train.epochs = "", {}, 0
        assert config.to_dict() == model.to_dict()
    built = [experiment.build_objective(load(name)) for name in SMALL]
    assert [type(each) for each in built] == [RAT, AWP, RAT, AWP]
    assert [type(each.base) for each in built] == [FastAT, FastAT, PGDAT, PGDAT]
    assert built[0].base.attack.step_size == pytest.approx(10 / 255)
    assert (built[2].base.attack.num_steps, built[2].base.attack.random_start) == (5, True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cifar10_small_awp", *NAMES[1:6:2]])
def test_smoke_variants_run(name, tmp_path):
    small = experiment.smoke_variant(load(name))
    model = experiment.run_training(small, tmp_path)
    assert int(model.optimizer.iterations) == 2
    assert (tmp_path / "model.keras").exists()
