"""What `--dry_run` says of a training and of a search, against what was counted otherwise."""

import keras_tuner
import pytest
import tiny_config

from he_keras import experiment, search
from he_keras.experiment import dry_run


@pytest.fixture
def config():
    return tiny_config.get_config()


@pytest.mark.fast_cases("objective0-2")
@pytest.mark.parametrize(
    ("objective", "passes"),
    [
        # The passes that tests/objectives/test_pass_counts.py counts, forward and back.
        ({"name": "standard"}, 1 + 1),
        ({"name": "pgd_at", "num_steps": 3}, 4 + 4),
        ({"name": "free_at", "num_replays": 2}, 2 + 2),
    ],
)
def test_passes_of_an_objective(config, objective, passes):
    with config.unlocked():
        config.objective = objective
    assert dry_run.passes_per_image(config, steps=4) == passes


@pytest.mark.parametrize(("max_epochs", "factor"), [(9, 3), (10, 3), (16, 2), (2, 3)])
def test_trials_of_hyperband_are_those_of_keras_tuner(max_epochs, factor):
    settings = search.SearchSettings(tuner="hyperband", factor=factor)
    oracle = keras_tuner.oracles.HyperbandOracle(
        keras_tuner.Objective("x", "max"), max_epochs=max_epochs, factor=factor
    )
    expected = []
    for bracket in reversed(range(oracle._get_num_brackets())):
        before = 0
        for number in range(oracle._get_num_rounds(bracket)):
            epochs = oracle._get_epochs(bracket, number)
            expected += [epochs - before] * oracle._get_size(bracket, number)
            before = epochs
    assert dry_run.epochs_of_trials(settings, max_epochs) == expected


def test_trials_of_the_other_tuners():
    grid = search.SearchSettings(tuner="grid", space={"scale": "5,10,15"})
    assert dry_run.epochs_of_trials(grid, 7) == [7, 7, 7]
    assert dry_run.epochs_of_trials(search.SearchSettings(max_trials=2), 7) == [7, 7]


@pytest.mark.slow
def test_the_cost_of_a_training_and_of_a_search(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    training = experiment.cost_of_training(config)
    # 58 images, 3 epochs, 2 steps and the pass that is trained; 20 images, scored and attacked.
    assert [part.passes for part in training.parts] == [58 * 3 * 6, 20 * 3 * (2 + 5), 0]
    settings = search.SearchSettings(max_trials=2, objective="margin-pgd-2")
    found = experiment.cost_of_search(config, settings)
    assert found.passes == pytest.approx(2 * training.passes + 2 * 20 * 5)
    assert found.seconds > 0 and found.memory > 10**8
    assert not list(tmp_path.iterdir())
