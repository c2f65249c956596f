"""Keeps the model of the epoch with the best value of a metric, by default robust accuracy."""

import pathlib

import keras
import numpy as np

from he_keras.distribution import is_chief
from he_keras.files import replacing


class BestCheckpoint(keras.callbacks.Callback):
    """Saves the whole model (`.keras`) whenever `monitor` reaches a new maximum.

    Args:
        path: file to write, ending in ".keras".
        monitor: name of the metric, to be maximised.
    """

    def __init__(self, path, monitor: str = "val_robust_accuracy") -> None:
        super().__init__()
        self.path = pathlib.Path(path)
        self.monitor = monitor
        self.best = -np.inf

    def on_epoch_end(self, epoch, logs=None) -> None:
        """Saves the model if this epoch is the best so far."""
        if self.monitor not in (logs or {}):
            raise ValueError(
                f"No such metric; expected one of {sorted(logs or {})} (validation data are "
                f"needed for val_*); "
                f"received monitor={self.monitor!r}"
            )
        if logs[self.monitor] > self.best:
            self.best = float(logs[self.monitor])
            save_model(self.model, self.path)

    def state_arrays(self) -> dict[str, np.ndarray]:
        """The best value so far."""
        return {"best": np.array(self.best)}

    def load_state_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """Restores what `state_arrays` returned."""
        self.best = float(arrays["best"])


def save_model(model, path: pathlib.Path) -> None:
    """Saves a whole model; of several worker processes the first one does."""
    if is_chief(model.distribute_strategy):
        with replacing(path) as temporary:
            model.save(temporary)
