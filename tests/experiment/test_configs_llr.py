"""The LLR configurations: as the rebuttal and the released code say."""

import pytest
from experiments import load
from learning_rates import rate_at

from he_keras import experiment
from he_keras.objectives.llr import LLR

NAMES = ("cifar10_llr_paper", "cifar10_llr_released", "imagenet_llr")
SMALL = ("cifar10_small_llr", "cifar10_budget_llr")


@pytest.mark.parametrize(
    ("name", "num_steps", "weights", "epsilon"),
    [
        ("cifar10_llr_paper", 15, (1.0, 4.0, 3.0), 8 / 255),
        ("cifar10_llr_released", 10, (2.0, 4.0, 1.2), 8 / 255),
        ("imagenet_llr", 2, (1.0, 3.0, 6.0), 4 / 255),
        ("cifar10_small_llr", 2, (1.0, 4.0, 3.0), 8 / 255),
        ("cifar10_budget_llr", 2, (1.0, 4.0, 3.0), 8 / 255),
    ],
)
def test_objective(name, num_steps, weights, epsilon):
    config = load(name)
    experiment.check_config(config)
    built = experiment.build_objective(config)
    assert isinstance(built, LLR)
    assert (built.nominal_weight, built.linearity_weight, built.slope_weight) == weights
    assert (built.num_steps, built.threat.epsilon) == (num_steps, pytest.approx(epsilon))
    assert float(built.sizes_at(250).threat.epsilon) == pytest.approx(epsilon / 2)
    assert config.network.options["activation"] == "softplus"


@pytest.mark.parametrize("name", NAMES[:2])
def test_released_settings_of_cifar10(name):
    config = load(name)
    assert config.network.name == "wide-resnet-28-8" and config.head.kind == "linear"
    assert config.train.batch_size == 64
    steps_per_epoch = -(-49_000 // 64)
    assert 100_000 <= config.train.epochs * steps_per_epoch < 101_000
    optimizer = experiment.configuration.build_optimizer(config, steps_per_epoch)
    rates = [rate_at(optimizer, step) for step in (79_999, 80_000, 88_000, 96_000, 99_999)]
    assert rates == pytest.approx([0.1, 0.01, 1e-3, 1e-4, 1e-4])
    assert (config.optimizer.momentum, config.optimizer.weight_decay) == (0.9, 2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NAMES, *SMALL])
def test_smoke_variants_have_the_smooth_activation_and_the_search(name):
    small = experiment.smoke_variant(load(name))
    assert small.network.options["activation"] == "softplus"
    assert small.objective.num_steps == 2
    model = experiment.build_model(small, steps_per_epoch=2)
    assert isinstance(model.objective, LLR)
