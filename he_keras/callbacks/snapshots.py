"""Keeps the model at the end of each cycle of a periodic schedule, for an ensemble.

Papers: Huang et al. 2017, "Snapshot ensembles: train 1, get M for free"; Liu et al. 2020, "On the
loss landscape of adversarial training" (PAS), which restarts radius and learning rate together.
"""

import pathlib
from collections.abc import Iterable

import keras

from he_keras.arguments import check_positive_integer
from he_keras.callbacks.best_checkpoint import save_model

_PREFIX = "epoch-"


class Snapshots(keras.callbacks.Callback):
    """Saves the whole model as `epoch-0010.keras` after 10 epochs, and so on.

    A file is complete or not there. The callback has no state: when a resumed run repeats an epoch,
    it writes the file again, with the same weights.

    Args:
        folder: where the files go.
        epochs: numbers of epochs trained, from 1 on, after which to save.

    Example:
        >>> from he_keras.callbacks.snapshots import Snapshots
        >>> snapshots = Snapshots("runs/pas/snapshots", epochs=(10, 20, 30))
        >>> snapshots.path(10).name
        'epoch-0010.keras'
    """

    def __init__(self, folder, epochs: Iterable[int]) -> None:
        super().__init__()
        self.folder = pathlib.Path(folder)
        self.epochs = tuple(epochs)
        for epoch in self.epochs:
            check_positive_integer("epochs", epoch)

    def path(self, epoch: int) -> pathlib.Path:
        """The file of the model after so many epochs."""
        return self.folder / f"{_PREFIX}{epoch:04d}.keras"

    def on_epoch_end(self, epoch, logs=None) -> None:
        """Saves the model where a cycle ends; Keras counts epochs from 0."""
        if epoch + 1 in self.epochs:
            save_model(self.model, self.path(epoch + 1))
