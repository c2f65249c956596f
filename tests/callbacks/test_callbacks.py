"""History, best checkpoint, overfitting guard, progress: each on a model of a few weights."""

import csv
import types

import keras
import numpy as np
import pytest
from callback_models import IMAGES, LABELS, make_model

import he_keras as he
from he_keras import callbacks
from he_keras.callbacks import progress


def read_rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


# HistoryFile


def test_history_file_writes_a_row_for_each_epoch(tmp_path):
    history = callbacks.HistoryFile(tmp_path / "history.csv")
    for epoch, loss in enumerate((1.5, 0.1234567)):
        history.on_epoch_begin(epoch)
        history.on_epoch_end(epoch, {"loss": loss, "accuracy": np.float32(0.5)})
    rows = read_rows(tmp_path / "history.csv")
    assert [(row["epoch"], row["loss"], row["accuracy"]) for row in rows] == [
        ("0", "1.5", "0.5"),
        ("1", "0.123457", "0.5"),
    ]
    assert all(float(row["seconds"]) >= 0 for row in rows)
    assert [each.name for each in tmp_path.iterdir()] == ["history.csv"]


def test_history_file_takes_new_columns_and_repeated_epochs(tmp_path):
    history = callbacks.HistoryFile(tmp_path / "history.csv")
    history.on_epoch_end(0, {"loss": 3.0})
    history.on_epoch_end(1, {"loss": 2.0, "val_loss": 5.0})
    history.on_epoch_end(1, {"loss": 1.0, "val_loss": 4.0})
    rows = read_rows(tmp_path / "history.csv")
    assert [(row["epoch"], row["loss"], row["val_loss"]) for row in rows] == [
        ("0", "3.0", ""),
        ("1", "1.0", "4.0"),
    ]


def test_history_file_state_holds_rows_and_time_spent(tmp_path):
    first = callbacks.HistoryFile(tmp_path / "history.csv")
    first.on_epoch_end(0, {"loss": 3.0})
    first.on_epoch_begin(1)
    state = first.state_arrays()
    state["seconds"] = state["seconds"] + 100.0

    second = callbacks.HistoryFile(tmp_path / "history.csv")
    second.load_state_arrays(state)
    second.on_epoch_begin(1)
    second.on_epoch_end(1, {"loss": 2.0})
    rows = read_rows(tmp_path / "history.csv")
    assert [row["epoch"] for row in rows] == ["0", "1"]
    assert 100.0 <= float(rows[1]["seconds"]) < 160.0


# BestCheckpoint


def run_best(path, values, monitor="val_robust_accuracy"):
    best = callbacks.BestCheckpoint(path, monitor)
    model = make_model()
    best.set_model(model)
    for epoch, value in enumerate(values):
        model.set_weights([np.full_like(weight, epoch) for weight in model.get_weights()])
        best.on_epoch_end(epoch, {monitor: value})
    return best


@pytest.mark.parametrize(
    ("values", "expected_epoch"),
    [((0.1, 0.4, 0.3), 1), ((0.4, 0.4), 0), ((0.2, float("nan"), 0.1), 0), ((0.0, -1.0), 0)],
)
def test_best_checkpoint_keeps_the_first_maximum(tmp_path, values, expected_epoch):
    path = tmp_path / "deep" / "best.keras"
    run_best(path, values)
    loaded = he.load_model(path)
    assert all((weight == expected_epoch).all() for weight in loaded.get_weights())
    assert [each.name for each in path.parent.iterdir()] == ["best.keras"]


def test_best_checkpoint_state_survives(tmp_path):
    first = run_best(tmp_path / "first.keras", (0.5,))
    second = callbacks.BestCheckpoint(tmp_path / "second.keras")
    second.load_state_arrays(first.state_arrays())
    second.set_model(make_model())
    second.on_epoch_end(1, {"val_robust_accuracy": 0.5})
    assert not (tmp_path / "second.keras").exists()
    second.on_epoch_end(2, {"val_robust_accuracy": 0.51})
    assert (tmp_path / "second.keras").exists()


def test_best_checkpoint_lists_the_metrics_there_are(tmp_path):
    best = callbacks.BestCheckpoint(tmp_path / "best.keras", monitor="val_f1")
    best.set_model(make_model())
    with pytest.raises(ValueError, match=r"No such metric.*\['loss', 'val_loss'\].*'val_f1'"):
        best.on_epoch_end(0, {"loss": 1.0, "val_loss": 1.0})


# OverfittingGuard


class ScriptedAttack:
    """Stands in for an attack: returns the next accuracy of a list."""

    def __init__(self, *accuracies):
        self.accuracies = list(accuracies)
        self.calls = []

    def __call__(self, model, images, labels):
        self.calls.append((model, images, labels))
        return types.SimpleNamespace(robust_accuracy=self.accuracies.pop(0))


def run_guard(guard, model, epochs, first_epoch=0):
    """Runs epochs whose end finds the weights filled with the epoch's number; returns the logs."""
    guard.set_model(model)
    model.stop_training = False
    collected = []
    for epoch in range(first_epoch, first_epoch + epochs):
        model.set_weights([np.full_like(weight, epoch) for weight in model.get_weights()])
        logs = {"loss": 0.0}
        guard.on_epoch_end(epoch, logs)
        collected.append(logs)
        if model.stop_training:
            break
    return collected


def test_guard_puts_the_previous_weights_back_and_stops():
    model = make_model()
    guard = callbacks.OverfittingGuard(IMAGES, LABELS, ScriptedAttack(0.3, 0.45, 0.26, 0.05, 0.9))
    logs = run_guard(guard, model, 5)
    # 0.45 -> 0.26 is a drop of 0.19, tolerated; 0.26 -> 0.05 is one of 0.21.
    assert [entry["guard_accuracy"] for entry in logs] == [0.3, 0.45, 0.26, 0.05]
    assert guard.stopped_epoch == 3 and model.stop_training
    assert all((weight == 2).all() for weight in model.get_weights())
    assert all(images is guard.images for _, images, _ in guard.attack.calls)


def test_guard_without_collapse_changes_nothing():
    model = make_model()
    guard = callbacks.OverfittingGuard(IMAGES, LABELS, ScriptedAttack(0.1, 0.2, 0.15))
    run_guard(guard, model, 3)
    assert guard.stopped_epoch is None and not model.stop_training
    assert all((weight == 2).all() for weight in model.get_weights())


def test_guard_compares_with_the_last_epoch_not_the_best():
    guard = callbacks.OverfittingGuard(
        IMAGES, LABELS, ScriptedAttack(0.6, 0.45, 0.3, 0.15), max_drop=0.2
    )
    run_guard(guard, make_model(), 4)
    assert guard.stopped_epoch is None


def test_guard_state_survives():
    model = make_model()
    first = callbacks.OverfittingGuard(IMAGES, LABELS, ScriptedAttack(0.7, 0.8))
    run_guard(first, model, 2)
    second = callbacks.OverfittingGuard(IMAGES, LABELS, ScriptedAttack(0.1))
    second.load_state_arrays({name: np.array(a) for name, a in first.state_arrays().items()})
    assert second.stopped_epoch is None
    run_guard(second, model, 1, first_epoch=2)
    assert second.stopped_epoch == 2
    assert all((weight == 1).all() for weight in model.get_weights())
    third = callbacks.OverfittingGuard(IMAGES, LABELS)
    third.load_state_arrays(second.state_arrays())
    assert third.stopped_epoch == 2


def test_guard_attacks_with_pgd_5_by_default():
    threat = he.ThreatModel("linf", 0.2)
    model = make_model(he.objectives.FastAT(threat))
    guard = callbacks.OverfittingGuard(IMAGES, LABELS)
    guard.set_model(model)
    logs = {}
    guard.on_epoch_end(0, logs)
    assert (guard.attack.num_steps, guard.attack.step_size) == (5, 0.05)
    expected = he.attacks.PGD(threat, num_steps=5, step_size=0.05)(model, IMAGES, LABELS)
    assert logs["guard_accuracy"] == expected.robust_accuracy


def test_guard_stops_fit():
    model = make_model()
    guard = callbacks.OverfittingGuard(IMAGES, LABELS, ScriptedAttack(0.9, 0.1, 0.9))
    history = model.fit(IMAGES, LABELS, epochs=3, verbose=0, callbacks=[guard])
    assert history.history["guard_accuracy"] == [0.9, 0.1]


# StopOnNaN


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_stop_on_nan_raises(loss):
    stop = callbacks.StopOnNaN()
    stop.on_train_batch_end(0, {"loss": 1.0})
    with pytest.raises(FloatingPointError, match="loss is not finite.*learning rate.*batch 7"):
        stop.on_train_batch_end(7, {"loss": loss})


def test_stop_on_nan_stops_fit_in_the_first_bad_batch():
    model = make_model(head=keras.layers.Dense(3))
    model.set_weights([np.full_like(weight, np.nan) for weight in model.get_weights()])
    with pytest.raises(FloatingPointError, match="batch 0"):
        model.fit(IMAGES, LABELS, verbose=0, callbacks=[callbacks.StopOnNaN()])


# ProgressBar


def test_progress_bar_counts_the_whole_run(capsys):
    bar = callbacks.ProgressBar(total_steps=12, steps_per_epoch=4, epochs=3, first_step=4)
    for batch in range(4):
        bar.on_train_batch_begin(batch)
        bar.on_train_batch_end(batch, {"loss": 1.25, "accuracy": 0.5})
    bar.on_epoch_end(1, {"loss": 1.25, "val_accuracy": 0.75, "val_robust_accuracy": 0.25})
    bar.on_train_batch_begin(0)
    bar.on_train_batch_end(0, {"loss": 1.0})
    bar.close()
    out, err = capsys.readouterr()
    assert out == "epoch 2/3: loss 1.2500  val_accuracy 0.7500  val_robust_accuracy 0.2500\n"
    values = "loss=1, val_accuracy=0.75, val_robust_accuracy=0.25"
    assert err == f"training 75%, 0:00 gone, epoch 3/3, batch 9/12, {values}\n"


def test_progress_bar_counts_validations_in_the_time_that_is_left(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    shown = []
    monkeypatch.setattr(progress.StatusLine, "update", lambda self, *state: shown.append(state))
    bar = callbacks.ProgressBar(total_steps=8, steps_per_epoch=4, epochs=2, validation_steps=2)

    def run(begin, end, seconds):
        begin(0)
        now[0] += seconds
        end(0)

    # The first batch compiles for a minute, which says nothing of the others.
    run(bar.on_train_batch_begin, bar.on_train_batch_end, 60)
    assert shown[-1] == (0.125, "epoch 1/2, batch 1/8", None)
    for seconds in (3, 3, 3):
        run(bar.on_train_batch_begin, bar.on_train_batch_end, seconds)
    assert shown[-1] == (0.5, "epoch 2/2, batch 4/8", 4 * 3.0)
    bar.on_test_begin()
    run(bar.on_test_batch_begin, bar.on_test_batch_end, 10)
    assert shown[-1] == (0.5, "epoch 1/2, validation 2/2", 4 * 3.0 + 3 * 10)
    bar.on_test_batch_begin(1)
    now[0] += 5
    run(lambda batch: None, bar.on_test_batch_end, 0)
    assert shown[-1] == (0.5, "epoch 2/2, batch 4/8", 4 * 3.0 + 2 * 5)
