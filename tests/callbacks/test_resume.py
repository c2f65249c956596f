"""A run that is stopped at any moment ends as if it had never been stopped, to the last bit."""

import json
import os
import signal
import types

import keras
import numpy as np
import pytest
import tiny_config
from run_comparison import assert_same_run, history_in, state_in, weights_in

import he_keras as he
from he_keras import callbacks
from he_keras.experiment import Interrupted, prepare_training, run_training

pytestmark = pytest.mark.slow

STEPS, EPOCHS = 4, 3


def changed(**changes):
    """The tiny configuration with some values changed; keys are "section__name"."""
    config = tiny_config.get_config()
    with config.unlocked():
        for key, value in changes.items():
            section, _, name = key.partition("__")
            if name:
                config[section][name] = value
            else:
                config[section] = value
    return config.lock()


class StopAt(keras.callbacks.Callback):
    """Calls `action` at the given call of one of the callback methods."""

    def __init__(self, moment, number, action):
        super().__init__()
        self.count, self.number, self.action = 0, number, action
        setattr(self, moment, self.strike)

    def strike(self, *_, **__):
        self.count += 1
        if self.count == self.number:
            self.action()


class Killed(Exception):
    pass


def die():
    raise Killed


def stopped_run(config, folder, moment, number, action=die, error=Killed):
    training = prepare_training(config, folder)
    training.stateful.append(StopAt(moment, number, action))
    with pytest.raises(error):
        training.run()
    return training


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The run folder of the tiny configuration, never interrupted."""
    folder = tmp_path_factory.mktemp("reference")
    run_training(tiny_config.get_config(), folder)
    return folder


def test_the_reference_run_is_worth_comparing(reference):
    rows = history_in(reference / "history.csv")
    assert [row["epoch"] for row in rows] == ["0", "1", "2"]
    assert len({row["loss"] for row in rows}) == EPOCHS
    arrays = weights_in(reference / "model.keras")
    assert any("moving_variance" in name or "vars/3" in name for name in arrays)
    assert all(np.isfinite(array).all() for array in arrays.values())


def assert_resumes(config, folder, moment="on_train_batch_end", number=6):
    run_training(config, folder / "reference")
    stopped_run(config, folder / "stopped", moment, number)
    run_training(config, folder / "stopped")
    assert_same_run(folder / "stopped", folder / "reference", (moment, number))


def test_free_at_keeps_its_perturbation(tmp_path):
    config = changed(objective={"name": "free_at", "num_replays": 2}, train__epochs=2)
    assert_resumes(config, tmp_path)
    state = state_in(tmp_path / "stopped" / "checkpoints" / "latest.npz")
    (noise,) = (array for name, array in state.items() if name.startswith("objective/"))
    assert noise.shape == (16, 8, 8, 1)
    assert np.abs(noise).max() == pytest.approx(0.1)


def test_fast_at_keeps_momentum_cycle_and_guard(tmp_path):
    config = changed(
        objective={"name": "fast_at", "attack_training_mode": True},
        schedule={"name": "triangular", "cycle_momentum": True},
        train__epochs=2,
        train__overfitting_guard=True,
    )
    assert_resumes(config, tmp_path)
    rows = history_in(tmp_path / "stopped" / "history.csv")
    assert all(0 <= float(row["guard_accuracy"]) <= 1 for row in rows)


@pytest.mark.slow
def test_dropout_goes_on_with_the_same_draws(tmp_path):
    network = {"name": "small-cnn", "input_shape": (28, 28, 1), "options": {}}
    config = changed(
        network=network,
        objective={"name": "standard"},
        data__synthetic=True,
        data__augmentation="none",
        train__epochs=2,
    )
    assert_resumes(config, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        # Settings that have nothing to do with each other, together.
        {
            "train__dtype": "mixed_float16",
            "head__kind": "linear",
            "objective": {"name": "trades", "num_steps": 2},
        },
        {
            "train__dtype": "mixed_bfloat16",
            "head__kind": "m_he",
            "objective": {"name": "alp", "num_steps": 2},
        },
        {"data__validation_examples": 0, "train__batch_size": 58},
    ],
    ids=lambda changes: str(changes)[:40],
)
def test_other_settings_resume_too(tmp_path, changes):
    assert_resumes(changed(**changes), tmp_path, number=2)


def test_ctrl_c_stops_after_the_batch_and_resumes(tmp_path, reference):
    handler = signal.getsignal(signal.SIGINT)
    training = stopped_run(
        tiny_config.get_config(),
        tmp_path,
        "on_train_batch_end",
        6,
        lambda: signal.raise_signal(signal.SIGINT),
        Interrupted,
    )
    assert signal.getsignal(signal.SIGINT) is handler
    assert int(training.model.optimizer.iterations) == 6
    resumed = prepare_training(tiny_config.get_config(), tmp_path)
    assert resumed.place == (1, 2)
    assert resumed.stateful[0].best == training.stateful[0].best >= 0.0
    resumed.run()
    assert_same_run(tmp_path, reference)


@pytest.mark.parametrize(
    ("moment", "number", "place"),
    [
        # During validation: before the epoch's last batch. At an epoch's end: after the epoch.
        ("on_test_batch_begin", 1, (0, 3)),
        ("on_train_batch_end", STEPS, (0, 3)),
        ("on_epoch_end", 1, (1, 0)),
    ],
)
def test_ctrl_c_outside_a_batch_leaves_a_checkpoint(tmp_path, moment, number, place):
    # Without the saves at every batch, which would hide a missing one.
    config = changed(train__checkpoint_every_batches=0)
    stopped_run(
        config, tmp_path, moment, number, lambda: signal.raise_signal(signal.SIGINT), Interrupted
    )
    assert callbacks.ExactResume(tmp_path / "checkpoints" / "latest.npz").path.exists()
    assert prepare_training(config, tmp_path).place == place


def test_second_ctrl_c_stops_at_once(tmp_path):
    # A test run in the background of a shell inherits that SIGINT is ignored.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)

    def twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    stopped_run(
        tiny_config.get_config(), tmp_path, "on_train_batch_end", 2, twice, KeyboardInterrupt
    )
    signal.signal(signal.SIGINT, inherited)
    assert prepare_training(tiny_config.get_config(), tmp_path).place == (0, 1)


def test_complete_run_is_left_as_it_is(tmp_path, reference):
    config = tiny_config.get_config()
    run_training(config, tmp_path)
    before = {each: each.stat().st_mtime_ns for each in tmp_path.rglob("history.csv")}
    training = prepare_training(config, tmp_path)
    assert training.is_complete
    training.run()
    assert {each: each.stat().st_mtime_ns for each in tmp_path.rglob("history.csv")} == before
    assert_same_run(tmp_path, reference)


def test_a_run_that_the_guard_stopped_is_complete(tmp_path):
    config = changed(train__overfitting_guard=True)
    training = prepare_training(config, tmp_path)
    # The best checkpoint must see the weights that the metrics belong to; the history has them all.
    names = [type(each).__name__ for each in training.stateful]
    assert names == ["BestCheckpoint", "OverfittingGuard", "HistoryFile"]
    guard = training.stateful[1]
    accuracies = [0.9, 0.1]
    guard.attack = lambda model, images, labels: types.SimpleNamespace(
        robust_accuracy=accuracies.pop(0)
    )
    model = training.run()
    rows = history_in(tmp_path / "history.csv")
    assert [row["guard_accuracy"] for row in rows] == ["0.9", "0.1"]
    again = prepare_training(config, tmp_path)
    assert again.is_complete
    for now, then in zip(again.run().get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(now, then)


def test_run_folder_of_another_configuration_is_refused(reference):
    before = (reference / "config.json").read_bytes()
    with pytest.raises(ValueError, match=r"another configuration.*head\.scale: 15\.0 -> 16\.0"):
        prepare_training(changed(head__scale=16.0), reference)
    assert (reference / "config.json").read_bytes() == before


def test_checkpoint_of_other_data_is_refused(tmp_path):
    stopped_run(tiny_config.get_config(), tmp_path, "on_train_batch_end", 3)
    config = changed(train__batch_size=29)
    stored = json.loads((tmp_path / "config.json").read_text())
    stored["train"]["batch_size"] = 29
    (tmp_path / "config.json").write_text(json.dumps(stored))
    with pytest.raises(ValueError, match="Checkpoint of other data; expected one of 2 batches"):
        prepare_training(config, tmp_path)


def test_environment_of_a_resumed_run_is_added(tmp_path, monkeypatch):
    config = tiny_config.get_config()
    stopped_run(config, tmp_path, "on_train_batch_end", 1)
    path = tmp_path / "environment.json"
    first = json.loads(path.read_text())
    assert first["seed"] == 0 and first["keras"] == keras.__version__
    prepare_training(config, tmp_path)
    assert json.loads(path.read_text()) == first
    monkeypatch.setattr(os, "cpu_count", lambda: 4096)
    prepare_training(config, tmp_path)
    prepare_training(config, tmp_path)
    later = {**first, "cpu_count": 4096}
    assert json.loads(path.read_text()) == {**first, "resumed_in": [later]}


@pytest.mark.parametrize("kind", ["swa"])
def test_weight_averaging_goes_on_and_ends_in_the_model(tmp_path, kind):
    averaging = {"kind": kind, "decay": 0.9, "start_epoch": 1, "warm_up": False}
    config = changed(
        train__dtype="mixed_bfloat16",
        train__overfitting_guard=True,
        train__weight_averaging={**averaging, "batch_norm_batches": 2},
    )
    assert_resumes(config, tmp_path, "on_train_batch_end", 6)
    state = state_in(tmp_path / "stopped" / "checkpoints" / "latest.npz")
    average = [each for name, each in state.items() if "WeightAveraging-0/average_" in name]
    model = he.load_model(tmp_path / "stopped" / "model.keras")
    for variable, value in zip(model.trainable_variables, average, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    assert not np.array_equal(state["variable/0"], average[0])
