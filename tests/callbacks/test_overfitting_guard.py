"""The guard's looks within an epoch, its reactions, FastAdv+, and resuming in the middle."""

import csv
import json
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
import tiny_config
from run_comparison import assert_same_run
from stopping import Stop, StopAfter

import he_keras as he
from he_keras import callbacks, objectives
from he_keras.experiment import prepare_training
from he_keras.objectives.fast_adv_plus import FastAdvPlus

IMAGES = np.linspace(0.0, 1.0, 48, dtype="float32").reshape(12, 4)
LABELS = np.arange(12) % 3
THREAT = he.ThreatModel("linf", 0.1)


def make_model(objective=None):
    keras.utils.set_random_seed(3)
    network = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5, "relu")])
    objective = objective or objectives.FastAT(THREAT)
    model = he.HEAdversarialModel(network, he.CosineHead(3), objective, None)
    model.compile(optimizer=he.optimizers.SGD(0.1), run_eagerly=True)
    return model


class ScriptedAttack:
    """Stands in for an attack: returns the next accuracy of a list, and notes the weights."""

    def __init__(self, *accuracies):
        self.accuracies = list(accuracies)
        self.weights = []

    def __call__(self, model, images, labels):
        self.weights.append(model.get_weights())
        return types.SimpleNamespace(robust_accuracy=self.accuracies.pop(0))


def scripted_guard(*accuracies, **options):
    return callbacks.OverfittingGuard(IMAGES, LABELS, ScriptedAttack(*accuracies), **options)


def fit(model, *chosen, epochs=2):
    """Three batches an epoch."""
    return model.fit(
        IMAGES, LABELS, batch_size=4, epochs=epochs, verbose=0, callbacks=list(chosen)
    ).history


def read_looks(path):
    with open(path, newline="") as file:
        return [(int(row["batch"]), float(row["guard_accuracy"])) for row in csv.DictReader(file)]


# Looking


def test_it_looks_every_few_batches_and_at_the_end_of_an_epoch(tmp_path):
    guard = scripted_guard(
        0.5, 0.1, 0.6, 0.7, on_collapse="monitor", every_batches=2, path=tmp_path / "guard.csv"
    )
    history = fit(make_model(), guard)
    assert read_looks(tmp_path / "guard.csv") == [(2, 0.5), (3, 0.1), (4, 0.6), (6, 0.7)]
    assert history["guard_accuracy"] == [0.1, 0.7]
    assert history["guard_accuracy_min"] == [0.1, 0.6]


def test_without_looks_in_between_it_looks_once_an_epoch(tmp_path):
    guard = scripted_guard(0.5, 0.1, on_collapse="monitor", path=tmp_path / "guard.csv")
    history = fit(make_model(), guard)
    assert history["guard_accuracy"] == [0.5, 0.1] and "guard_accuracy_min" not in history
    assert read_looks(tmp_path / "guard.csv") == [(3, 0.5), (6, 0.1)]


def test_several_steps_per_execution_do_not_skip_looks():
    guard = scripted_guard(0.5, 0.6, on_collapse="monitor", every_batches=2)
    guard.set_model(make_model())
    guard.on_epoch_begin(0)
    guard.on_train_batch_end(2)  # batches 0 to 2
    guard.on_train_batch_end(5)
    assert [look["batch"] for look in guard.looks] == [3, 6]


def test_a_monitor_leaves_training_alone():
    models = [make_model(), make_model()]
    guard = scripted_guard(*[0.9, 0.0] * 6, on_collapse="monitor", every_batches=1)
    histories = [fit(models[0], guard), fit(models[1])]
    assert guard.stopped_epoch is None and len(histories[0]["loss"]) == 2
    for one, other in zip(*(model.get_weights() for model in models), strict=True):
        np.testing.assert_array_equal(one, other)


# Stopping


def test_it_stops_in_the_middle_of_an_epoch_with_the_weights_of_the_last_look():
    guard = scripted_guard(0.5, 0.6, 0.3, every_batches=2)
    model = make_model()
    history = fit(model, guard)
    assert guard.stopped_epoch == 1
    assert history["guard_accuracy"] == [0.6, 0.3] and len(guard.looks) == 3
    for one, other in zip(model.get_weights(), guard.attack.weights[1], strict=True):
        np.testing.assert_array_equal(one, other)
    changed = zip(guard.attack.weights[1], guard.attack.weights[2], strict=True)
    assert any(np.abs(one - other).max() > 0 for one, other in changed)


# Recovering: FastAdv+


def test_a_collapse_starts_pgd_training_for_a_number_of_batches():
    guard = scripted_guard(0.5, 0.41, 0.3, 0.2, 0.3, 0.5, on_collapse="recover", every_batches=1)
    guard.max_drop = 0.1
    objective = FastAdvPlus(THREAT, recovery_batches=2, recovery_steps=3)
    model = make_model(objective)
    remaining = []
    log = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: remaining.append(objective.remaining_batches())
    )
    fit(model, guard, log)
    assert remaining == [0, 0, 2, 1, 0, 0]
    assert guard.stopped_epoch is None


def test_recovery_trains_on_pgd_examples_and_otherwise_on_single_steps():
    objective = FastAdvPlus(THREAT, recovery_batches=1, recovery_steps=3)
    model = make_model(objective)
    pgd = objectives.PGDAT(THREAT, 3, 2.5 * 0.1 / 3, random_start=True)
    single = objectives.FastAT(THREAT)
    x, y = tf.constant(IMAGES), tf.constant(LABELS)
    crafted = []
    for expected in (single, pgd, single):
        crafted.append(expected.craft(model, x, y, (0, 5)).numpy())
        np.testing.assert_array_equal(objective.craft(model, x, y, (0, 5)), crafted[-1])
        if expected is single:
            objective.start_recovery()
        else:
            objective.after_update(x, None, None, objectives.TrainingStep())
    assert np.abs(crafted[0] - crafted[1]).max() > 0.01


def test_recovery_follows_schedules_of_epsilon():
    half = keras.optimizers.schedules.PiecewiseConstantDecay([10_000], [0.05, 0.05])
    objective = FastAdvPlus(THREAT, recovery_steps=4, epsilon_schedule=half)
    model = make_model(objective)
    objective.start_recovery()
    step_size = objective.recovery_sizes_at(3).step_size(objective.recovery_attack.step_size)
    assert float(step_size) == pytest.approx(2.5 * 0.05 / 4, rel=1e-4)
    x_adv = objective.craft(model, tf.constant(IMAGES), tf.constant(LABELS), (0, 5), step_number=3)
    assert np.abs(x_adv - IMAGES).max() == pytest.approx(0.05, abs=1e-6)


def test_an_objective_that_cannot_recover_is_refused():
    guard = scripted_guard(0.5, on_collapse="recover")
    with pytest.raises(ValueError, match="expected .*start_recovery.*received objective=FastAT"):
        fit(make_model(), guard)


def test_fast_adv_plus_is_saved_with_its_count(tmp_path):
    objective = FastAdvPlus(THREAT, 7, 5, initialization="zero", step_size=0.2)
    stored = json.loads(json.dumps(keras.saving.serialize_keras_object(objective)))
    restored = keras.saving.deserialize_keras_object(stored)
    assert type(restored) is FastAdvPlus and restored.get_config() == objective.get_config()
    assert (restored.recovery_batches, restored.recovery_attack.num_steps) == (7, 5)
    model = make_model(objective)
    objective.start_recovery()
    fit(model, epochs=1)
    model.save(tmp_path / "model.keras")
    loaded = he.load_model(tmp_path / "model.keras")
    assert loaded.objective.remaining_batches() == 7 - 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FastAdvPlus(None), "expected a ThreatModel; received None"),
        (lambda: FastAdvPlus(THREAT, 0), "received recovery_batches=0"),
        (lambda: FastAdvPlus(THREAT, 5, 0), "received recovery_steps=0"),
        (lambda: FastAdvPlus(THREAT).start_recovery(), "expected a model that was built"),
        (lambda: scripted_guard(on_collapse="restart"), "on_collapse.*received on_collapse='re"),
        (lambda: scripted_guard(every_batches=-1), "received every_batches=-1"),
        (lambda: scripted_guard(every_batches=2.5), "received every_batches=2.5"),
        (lambda: scripted_guard(max_drop=-0.1), "received max_drop=-0.1"),
    ],
)
def test_wrong_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# Exact resume of all of it


def recovering_config(**settings):
    config = tiny_config.get_config()
    with config.unlocked():
        config.train.overfitting_guard = True
        config.train.update({"guard_every_batches": 2, "guard_max_drop": 0.0, **settings})
        config.objective = {"name": "fast_adv_plus", "recovery_batches": 3, "recovery_steps": 2}
    return config.lock()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reaction", "batches"),
    # The one with the most state at every moment, the others at the middle one.
    [("recover", 9), ("stop", 6)],
)
def test_a_killed_run_ends_as_if_never_killed(tmp_path, reaction, batches):
    config = recovering_config(guard_on_collapse=reaction)
    prepare_training(config, tmp_path / "reference").run()
    killed = prepare_training(config, tmp_path / "killed")
    # Before the checkpoint of that batch.
    killed.stateful.append(StopAfter(batches))
    try:
        killed.run()
    except Stop:
        prepare_training(config, tmp_path / "killed").run()
    assert_same_run(tmp_path / "killed", tmp_path / "reference")
    looks = [read_looks(tmp_path / name / "guard.csv") for name in ("killed", "reference")]
    assert looks[0] == looks[1] and len(looks[0]) >= 2


@pytest.mark.slow
def test_the_tiny_run_recovers_at_all(tmp_path):
    """Guards the resuming above: with `max_drop=0` some look starts a recovery."""
    run = prepare_training(recovering_config(guard_on_collapse="recover"), tmp_path)
    counts = []
    run.stateful.append(
        keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: counts.append(
                run.model.objective.remaining_batches()
            )
        )
    )
    run.run()
    assert max(counts) == 3
