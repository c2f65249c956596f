"""Stops single-step training that has collapsed (catastrophic overfitting).

Paper: Wong et al. 2020, "Fast is better than free": after each epoch, robust accuracy on one
training batch under a short multi-step attack; if it fell by more than a threshold since the last
epoch, go back to the last epoch's weights and stop. It detects a collapse only after it has
happened.

Deviation: the released code runs this attack in training mode; here it runs in inference mode.
"""

import keras
import numpy as np

from he_keras.attacks import PGD, Attack


class OverfittingGuard(keras.callbacks.Callback):
    """Restores the previous epoch's weights and stops when robust training accuracy drops.

    Args:
        images: a training batch (the released code takes the epoch's first).
        labels: its labels.
        attack: default PGD-5 with step epsilon / 4 against the objective's threat model.
        max_drop: largest tolerated drop of accuracy from one epoch to the next.
    """

    def __init__(self, images, labels, attack: Attack | None = None, max_drop: float = 0.2) -> None:
        super().__init__()
        self.images, self.labels = np.asarray(images), np.asarray(labels)
        self.attack = attack
        self.max_drop = max_drop
        self.stopped_epoch: int | None = None
        self._previous_accuracy = 0.0
        self._previous_weights: list[np.ndarray] = []

    def on_epoch_end(self, epoch, logs=None) -> None:
        """Attacks the batch and compares with the epoch before."""
        if self.attack is None:
            threat = self.model.objective.threat
            self.attack = PGD(threat, num_steps=5, step_size=threat.epsilon / 4)
        accuracy = self.attack(self.model, self.images, self.labels).robust_accuracy
        if logs is not None:
            logs["guard_accuracy"] = accuracy
        if accuracy < self._previous_accuracy - self.max_drop:
            self.model.set_weights(self._previous_weights)
            self.model.stop_training = True
            self.stopped_epoch = epoch
            return
        self._previous_accuracy = accuracy
        self._previous_weights = self.model.get_weights()

    def state_arrays(self) -> dict[str, np.ndarray]:
        """The last epoch's accuracy and weights."""
        weights = {f"weight_{i}": array for i, array in enumerate(self._previous_weights)}
        stopped = -1 if self.stopped_epoch is None else self.stopped_epoch
        return {
            "accuracy": np.array(self._previous_accuracy),
            "stopped_epoch": np.array(stopped),
            **weights,
        }

    def load_state_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """Restores what `state_arrays` returned."""
        self._previous_accuracy = float(arrays["accuracy"])
        stopped = int(arrays["stopped_epoch"])
        self.stopped_epoch = None if stopped < 0 else stopped
        count = sum(name.startswith("weight_") for name in arrays)
        self._previous_weights = [arrays[f"weight_{i}"] for i in range(count)]
