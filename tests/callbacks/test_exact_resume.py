"""`ExactResume` by itself, on a model of a few weights; whole runs are in test_resume.py."""

import keras
import numpy as np
import pytest
from callback_models import IMAGES, LABELS, make_model

from he_keras import callbacks


def fit_with(resume, model, epochs=1, **options):
    model.fit(IMAGES, LABELS, batch_size=4, epochs=epochs, verbose=0, callbacks=[resume], **options)


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint of one epoch of three batches."""
    path = tmp_path / "latest.npz"
    fit_with(callbacks.ExactResume(path), make_model())
    return path


def test_restore_without_checkpoint(tmp_path):
    assert callbacks.ExactResume(tmp_path / "none.npz").restore(make_model()) is None


def test_restore_brings_everything_back(checkpoint):
    trained = make_model()
    fit_with(callbacks.ExactResume(checkpoint), trained)
    fresh = make_model()
    assert callbacks.ExactResume(checkpoint).restore(fresh) == (1, 0)
    for now, before in zip(fresh.variables, trained.variables, strict=True):
        np.testing.assert_array_equal(now.numpy(), before.numpy())
    assert int(fresh.optimizer.iterations) == 3
    for now, before in zip(fresh.optimizer.variables, trained.optimizer.variables, strict=True):
        np.testing.assert_array_equal(now.numpy(), before.numpy())


def test_seeds_of_dropout_are_part_of_the_state(tmp_path):
    model = make_model(dropout=0.5)
    fit_with(callbacks.ExactResume(tmp_path / "latest.npz"), model)
    fresh = make_model(dropout=0.5)
    callbacks.ExactResume(tmp_path / "latest.npz").restore(fresh)
    one, other = (m.network(np.ones((50, 4)), training=True).numpy() for m in (model, fresh))
    np.testing.assert_array_equal(one, other)


class Places(keras.callbacks.Callback):
    """Notes the place in the checkpoint after every batch and epoch."""

    def __init__(self, path):
        super().__init__()
        self.path, self.seen = path, []

    def note(self, *_, **__):
        resume = callbacks.ExactResume(self.path)
        self.seen.append(tuple(resume.restore(make_model())))

    on_train_batch_end = on_epoch_end = note


@pytest.mark.parametrize(
    ("every_batches", "expected"),
    [
        # A checkpoint from the start on, one before the last of 3 batches, one after the epoch.
        (0, [(0, 0), (0, 2), (0, 2), (1, 0)]),
        (1, [(0, 1), (0, 2), (0, 2), (1, 0)]),
    ],
)
def test_when_checkpoints_are_written(tmp_path, every_batches, expected):
    path = tmp_path / "latest.npz"
    places = Places(path)
    resume = callbacks.ExactResume(path, every_batches=every_batches, every_seconds=1e9)
    make_model().fit(
        IMAGES, LABELS, batch_size=4, verbose=0, callbacks=[resume, places], shuffle=False
    )
    assert places.seen == expected


def test_checkpoints_by_time(tmp_path):
    path = tmp_path / "latest.npz"
    places = Places(path)
    resume = callbacks.ExactResume(path, every_seconds=0.0)
    make_model().fit(IMAGES, LABELS, batch_size=4, verbose=0, callbacks=[resume, places])
    assert places.seen[0] == (0, 1)


def test_unknown_length_of_an_epoch_is_refused(tmp_path):
    def batches():
        while True:
            yield IMAGES, LABELS

    resume = callbacks.ExactResume(tmp_path / "latest.npz")
    with pytest.raises(ValueError, match="length of an epoch is unknown.*steps=None"):
        make_model().fit(batches(), epochs=1, verbose=0, callbacks=[resume])


def damaged(path, how):
    content = path.read_bytes()
    if how == "truncated":
        path.write_bytes(content[: len(content) // 2])
    if how == "empty":
        path.write_bytes(b"")
    if how == "text":
        path.write_text("not a checkpoint")
    if how == "one array":
        with open(path, "wb") as file:
            np.save(file, np.zeros(3))
    if how == "flipped byte":
        middle = content.index(b"variable/0.npy") + 200
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1 :])
    if how == "pickle":
        np.savez(path, meta=np.array([{"format": 1}], dtype=object))
    if how == "without meta":
        np.savez(path, other=np.zeros(3))
    if how == "other format":
        np.savez(path, meta=np.array('{"format": 99, "epoch": 0, "batch": 0}'))
    if how == "folder":
        path.unlink()
        path.mkdir()


@pytest.mark.fast_cases("truncated", "flipped byte", "pickle", "folder")
@pytest.mark.parametrize(
    "how",
    [
        "truncated",
        "empty",
        "text",
        "one array",
        "flipped byte",
        "pickle",
        "without meta",
        "other format",
        "folder",
    ],
)
def test_damaged_checkpoints_are_one_kind_of_error(checkpoint, how):
    damaged(checkpoint, how)
    with pytest.raises(callbacks.CorruptCheckpointError, match="Corrupt checkpoint; expected") as e:
        callbacks.ExactResume(checkpoint).restore(make_model())
    assert str(checkpoint) in str(e.value)
    assert isinstance(e.value, ValueError)


def test_checkpoint_of_another_model_is_refused(checkpoint):
    model = make_model(units=6)
    before = model.get_weights()
    with pytest.raises(callbacks.CorruptCheckpointError, match="of another model; expected 3"):
        callbacks.ExactResume(checkpoint).restore(model)
    for now, then in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(now, then)


def test_checkpoint_without_a_callbacks_state_is_refused(checkpoint, tmp_path):
    best = callbacks.BestCheckpoint(tmp_path / "best.keras")
    resume = callbacks.ExactResume(checkpoint, stateful_callbacks=[best])
    with pytest.raises(callbacks.CorruptCheckpointError, match="of another run.*KeyError 'best'"):
        resume.restore(make_model())


def test_two_callbacks_of_one_class_keep_their_own_state(tmp_path):
    def pair():
        return [callbacks.BestCheckpoint(tmp_path / f"{i}.keras", "loss") for i in range(2)]

    first = pair()
    first[0].best, first[1].best = 100.0, 200.0
    resume = callbacks.ExactResume(tmp_path / "latest.npz", stateful_callbacks=first)
    fit_with(resume, make_model())
    second = pair()
    callbacks.ExactResume(tmp_path / "latest.npz", stateful_callbacks=second).restore(make_model())
    assert [each.best for each in second] == [100.0, 200.0]


def test_a_failing_write_leaves_the_old_checkpoint(checkpoint, monkeypatch):
    before = checkpoint.read_bytes()

    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr("he_keras.files.write_arrays", fail)
    with pytest.raises(OSError, match="disk full"):
        fit_with(callbacks.ExactResume(checkpoint), make_model())
    assert checkpoint.read_bytes() == before


class StopAfterOneBatch(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        raise KeyboardInterrupt


def test_a_resumed_epoch_goes_on_counting(tmp_path):
    path = tmp_path / "latest.npz"
    with pytest.raises(KeyboardInterrupt):
        resume = callbacks.ExactResume(path, every_batches=1)
        make_model().fit(
            IMAGES, LABELS, batch_size=4, verbose=0, callbacks=[resume, StopAfterOneBatch()]
        )
    model, resume, places = make_model(), callbacks.ExactResume(path, every_batches=1), Places(path)
    assert resume.restore(model) == (0, 1)
    # Of three batches the last two are left.
    model.fit(IMAGES[4:], LABELS[4:], batch_size=4, verbose=0, callbacks=[resume, places])
    assert places.seen == [(0, 2), (0, 2), (1, 0)]
