"""Checkpoints from which a killed run goes on and ends with the very weights it would have had.

Keras's own `BackupAndRestore` restarts the interrupted epoch. This callback stores, at any batch:
weights, optimizer, metrics, the objective's state, the state of other callbacks, and the position
in the data. Data order and random draws are functions of (seed, epoch, batch), so they need no
storing.
"""

import hashlib
import json
import pathlib
import time
from typing import NamedTuple

import keras
import numpy as np

from he_keras.callbacks import replica_state
from he_keras.distribution import workers
from he_keras.files import read_npz, write_npz

_FORMAT = 1


class ResumePoint(NamedTuple):
    """Where training goes on: the epoch, and the first batch of it that was not trained on."""

    epoch: int
    batch: int


class CorruptCheckpointError(ValueError):
    """A checkpoint cannot be read or belongs to another model."""


class ExactResume(keras.callbacks.Callback):
    """Saves the whole training state every few batches or seconds, and restores it.

    Call `restore` before `fit` and start the data at the place that it returns. `fit` must know the
    number of steps in an epoch. A checkpoint exists from the start of training on. It is renewed at
    the end of every epoch, and before an epoch's last batch. So a run that is killed during
    validation repeats one batch.

    With several replicas the checkpoint holds what belongs to each of them: running metrics, an
    objective's perturbations. So the same number of replicas goes on as if nothing had happened. Of
    several worker processes the first one writes. All of them read from a folder that they share.

    Args:
        path: the checkpoint file (.npz), replaced atomically.
        every_batches: also save after so many batches of an epoch; 0 for no such saves.
        every_seconds: also save when so much time has passed since the last save.
        stateful_callbacks: callbacks with `state_arrays()` and `load_state_arrays(arrays)`.

    Example:
        >>> import he_keras as he
        >>> resume = he.callbacks.ExactResume("checkpoints/latest.npz", every_batches=100)
        >>> # place = resume.restore(model); model.fit(..., callbacks=[resume])
    """

    def __init__(
        self, path, every_batches: int = 0, every_seconds: float = 300.0, stateful_callbacks=()
    ) -> None:
        super().__init__()
        self.path = pathlib.Path(path)
        self.every_batches = every_batches
        self.every_seconds = every_seconds
        numbered = enumerate(stateful_callbacks)
        self.stateful_callbacks = {f"{type(each).__name__}-{i}": each for i, each in numbered}
        self._place = ResumePoint(0, 0)
        self._first_batch = 0
        self._restored_metrics: dict[str, np.ndarray] = {}
        self._steps = 0
        self._last_save = time.monotonic()
        self._agreed: list[bool] = []

    def restore(self, model) -> ResumePoint | None:
        """Loads the checkpoint into a built, compiled model; returns None if there is none."""
        _check_same_file(model.distribute_strategy, self.path)
        if not self.path.exists():
            return None
        _build_optimizer(model)
        arrays = _read(self.path)
        self._place = _place(arrays, self.path)
        _assign("variable", model.variables, arrays, self.path)
        _assign("optimizer", model.optimizer.variables, arrays, self.path)
        # Metrics given to `compile` have no variables before `fit`.
        self._restored_metrics = {key: arrays[key] for key in _numbered("metric", arrays)}
        self._restore_others(model, arrays)
        return self._place

    def _restore_others(self, model, arrays: dict[str, np.ndarray]) -> None:
        try:
            own = _below(replica_state.objective_prefix(model.distribute_strategy), arrays)
            with model.distribute_strategy.scope():
                model.objective.load_state_arrays(own)
            for name, callback in self.stateful_callbacks.items():
                callback.load_state_arrays(_below(f"callback/{name}", arrays))
        except (KeyError, ValueError, TypeError) as error:
            raise CorruptCheckpointError(
                "Checkpoint of another run; expected the state of this objective and these "
                f"callbacks; received {self.path}: {type(error).__name__} {error}"
            ) from error

    def save(self) -> None:
        """Writes the state now; the file is complete or not there at all.

        Every worker process has to call this at the same moment.
        """
        arrays = {"meta": np.array(json.dumps({"format": _FORMAT, **self._place._asdict()}))}
        arrays |= _numbered_arrays("variable", self.model.variables)
        arrays |= _numbered_arrays("optimizer", self.model.optimizer.variables)
        arrays |= replica_state.gathered(self.model)
        for owner, callback in self.stateful_callbacks.items():
            for name, array in callback.state_arrays().items():
                arrays[f"callback/{owner}/{name}"] = array
        # The others wait, so that all of them can read it afterwards.
        workers.on_chief(self.model.distribute_strategy, lambda: write_npz(self.path, arrays))
        self._last_save = time.monotonic()

    def on_epoch_begin(self, epoch, logs=None) -> None:
        """Puts the running metrics of an interrupted epoch back (Keras has just reset them)."""
        first_batch = self._place.batch if epoch == self._place.epoch else 0
        self._place = ResumePoint(epoch, first_batch)
        self._first_batch = first_batch
        self._steps = self.params.get("steps") or 0
        if not self._steps:
            raise ValueError(
                "The length of an epoch is unknown; expected fit(..., steps_per_epoch=...) or data "
                f"of known length; received steps={self.params.get('steps')!r}"
            )
        if self._restored_metrics and first_batch:
            stored = [
                self._restored_metrics[key] for key in _numbered("metric", self._restored_metrics)
            ]
            if not replica_state.assign_metrics(self.model, stored):
                raise _corrupt(self.path, f"{len(stored)} metric arrays, of another model")
        self._restored_metrics = {}
        if not any(workers.any_of(self.model.distribute_strategy, [self.path.exists()])):
            _build_optimizer(self.model)
            self.save()

    def on_train_batch_end(self, batch, logs=None) -> None:
        """Saves where a save is due; after an epoch's last batch `on_epoch_end` does."""
        done = batch + 1
        self._place = ResumePoint(self._place.epoch, self._first_batch + done)
        left = self._steps - done
        # The workers' clocks differ, and all of them have to save together.
        self._agreed = workers.any_of(self.model.distribute_strategy, self.wishes())
        if left > 0 and (left == 1 or self._agreed[0]):
            self.save()

    def wishes(self) -> list[bool]:
        """What this process wants after a batch; if any process wants it, all of them do it.

        The first wish is to save.
        """
        return [self._is_due()]

    def _is_due(self) -> bool:
        if self.every_batches and self._place.batch % self.every_batches == 0:
            return True
        return time.monotonic() - self._last_save > self.every_seconds

    def on_epoch_end(self, epoch, logs=None) -> None:
        """Saves at the start of the next epoch; keep this callback last in the list."""
        self._place = ResumePoint(epoch + 1, 0)
        self.save()


def _check_same_file(strategy, path: pathlib.Path) -> None:
    if workers.count(strategy) > 1:
        content = hashlib.sha256(path.read_bytes()).digest() if path.exists() else b"none"
        remedy = f"a run folder that all of them share and see alike: {path.absolute()}"
        workers.check_same(strategy, content, "the checkpoint", remedy)


def _build_optimizer(model) -> None:
    if not model.optimizer.built:
        with model.distribute_strategy.scope():
            model.optimizer.build(model.trainable_variables)


def _read(path: pathlib.Path) -> dict[str, np.ndarray]:
    try:
        return read_npz(path)
    except (OSError, ValueError) as error:
        raise _corrupt(path, error) from error


def _place(arrays: dict[str, np.ndarray], path: pathlib.Path) -> ResumePoint:
    try:
        meta = json.loads(str(arrays["meta"]))
        if meta["format"] != _FORMAT:
            raise ValueError(f"format {meta['format']} instead of {_FORMAT}")
        return ResumePoint(int(meta["epoch"]), int(meta["batch"]))
    except (KeyError, ValueError, TypeError) as error:
        raise _corrupt(path, f"{type(error).__name__} {error}") from error


def _corrupt(path: pathlib.Path, reason) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        "Corrupt checkpoint; expected an .npz file written by ExactResume (delete it to start "
        f"over); received {path}: {reason}"
    )


def _numbered(prefix: str, arrays: dict) -> list[str]:
    keys = [key for key in arrays if key.startswith(f"{prefix}/")]
    return sorted(keys, key=lambda key: int(key.rpartition("/")[2]))


def _numbered_arrays(prefix: str, variables) -> dict[str, np.ndarray]:
    return {
        f"{prefix}/{number}": keras.ops.convert_to_numpy(variable.value)
        for number, variable in enumerate(variables)
    }


def _below(prefix: str, arrays: dict) -> dict[str, np.ndarray]:
    start = f"{prefix}/"
    return {
        key.removeprefix(start): value for key, value in arrays.items() if key.startswith(start)
    }


def _assign(kind: str, variables, arrays: dict, path: pathlib.Path) -> None:
    stored = [arrays[key] for key in _numbered(kind, arrays)]
    expected = [tuple(variable.shape) for variable in variables]
    if [array.shape for array in stored] != expected:
        raise CorruptCheckpointError(
            f"Checkpoint of another model; expected {len(expected)} arrays ({kind}) of this "
            f"model's shapes; received {len(stored)} in {path}"
        )
    for variable, value in zip(variables, stored, strict=True):
        variable.assign(value)
