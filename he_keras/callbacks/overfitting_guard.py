"""Watches single-step training for a collapse (catastrophic overfitting) and reacts to it.

Papers: Wong et al. 2020, "Fast is better than free": after each epoch, measure robust accuracy on
one training batch under a short multi-step attack. If it fell by more than a threshold since the
last epoch, go back to the last epoch's weights and stop. Li et al. 2020, "Towards understanding
fast adversarial training" (FastAdv+): look every 20 batches, and after a drop of 0.1 train on
multi-step examples for some batches.

Deviations: the released code of Wong et al. runs this attack in training mode; here it runs in
inference mode. Li et al. watch a held-out batch; here it is a training batch for every reaction.
Cost of a look: 5 forward and backward passes over the batch.
"""

import json
import pathlib

import keras
import numpy as np

from he_keras.arguments import check_choice, check_number, check_positive_integer
from he_keras.attacks import PGD, Attack
from he_keras.callbacks.history_file import write_rows
from he_keras.distribution import is_chief

REACTIONS = ("stop", "recover", "monitor")


class OverfittingGuard(keras.callbacks.Callback):
    """Measures robust accuracy on one training batch, and reacts when it drops.

    It looks at the end of every epoch and, if asked to, after every few batches, since a collapse
    takes only some hundred steps. The history gets `guard_accuracy`, the value at the end of the
    epoch. With looks in between it also gets `guard_accuracy_min`, the smallest of the epoch.

    Args:
        images: a training batch (the released code takes the epoch's first).
        labels: its labels.
        attack: default PGD-5 with step epsilon / 4 against the objective's threat model.
        max_drop: largest tolerated drop of accuracy from one look to the next. The papers' are 0.2
            from epoch to epoch, and 0.1 from one twentieth batch to the next.
        on_collapse: "stop" puts the weights of the last look back and ends training. "recover" has
            the objective train on multi-step examples for a while. It needs an objective with a
            method `start_recovery`, such as `FastAdvPlus`. "monitor" does nothing.
        every_batches: also look after every so many batches; 0 for epochs' ends only.
        path: CSV file for all looks, written at the end of each epoch: `batch` counts from the
            start of training.

    Example:
        >>> import he_keras as he, numpy as np
        >>> guard = he.callbacks.OverfittingGuard(
        ...     np.ones((8, 4), "float32"), np.zeros(8, int), on_collapse="monitor"
        ... )
        >>> guard.max_drop
        0.2
    """

    def __init__(
        self,
        images,
        labels,
        attack: Attack | None = None,
        max_drop: float = 0.2,
        on_collapse: str = "stop",
        every_batches: int = 0,
        path=None,
    ) -> None:
        super().__init__()
        check_number("max_drop", max_drop, 0.0)
        check_choice("on_collapse", on_collapse, REACTIONS)
        if every_batches:
            check_positive_integer("every_batches", every_batches)
        self.images, self.labels = np.asarray(images), np.asarray(labels)
        self.attack = attack
        self.max_drop = max_drop
        self.on_collapse = on_collapse
        self.every_batches = int(every_batches)
        self.path = None if path is None else pathlib.Path(path)
        self.stopped_epoch: int | None = None
        self.looks: list[dict] = []
        self._batches = 0
        self._batches_before = 0
        self._looks_before = 0
        self._epoch = 0
        self._previous_accuracy = 0.0
        self._previous_weights: list[np.ndarray] = []

    def on_train_begin(self, logs=None) -> None:
        """Refuses an objective that cannot recover if `on_collapse` asks for it."""
        if self.on_collapse == "recover" and not hasattr(self.model.objective, "start_recovery"):
            raise ValueError(
                "This objective cannot recover from a collapse; expected one with a method "
                "start_recovery, such as fast_adv_plus; received "
                f"objective={type(self.model.objective).__name__}"
            )

    def on_epoch_begin(self, epoch, logs=None) -> None:
        """Notes where the epoch begins; a resumed one begins in its middle."""
        self._epoch = epoch
        self._batches_before = self._batches

    def on_train_batch_end(self, batch, logs=None) -> None:
        """Looks if it is time to."""
        before, self._batches = self._batches, self._batches_before + batch + 1
        if (
            self.every_batches
            and self._batches // self.every_batches > before // self.every_batches
        ):
            self._look()

    def on_epoch_end(self, epoch, logs=None) -> None:
        """Looks if the last batch was not looked at, and reports."""
        self._epoch = epoch
        new = self.looks[self._looks_before :]
        if not new or new[-1]["batch"] != self._batches:
            self._look()
        if logs is not None:
            accuracies = [look["guard_accuracy"] for look in self.looks[self._looks_before :]]
            logs["guard_accuracy"] = accuracies[-1]
            if self.every_batches:
                logs["guard_accuracy_min"] = min(accuracies)
        self._looks_before = len(self.looks)
        if self.path is not None and is_chief(self.model.distribute_strategy):
            write_rows(self.path, self.looks)

    def _look(self) -> None:
        """Attacks the batch and compares with the look before."""
        if self.attack is None:
            threat = self.model.objective.threat
            self.attack = PGD(threat, num_steps=5, step_size=threat.epsilon / 4)
        accuracy = float(self.attack(self.model, self.images, self.labels).robust_accuracy)
        self.looks.append({"batch": self._batches, "guard_accuracy": accuracy})
        collapsed = accuracy < self._previous_accuracy - self.max_drop
        if collapsed and self.on_collapse == "stop":
            self.model.set_weights(self._previous_weights)
            self.model.stop_training = True
            self.stopped_epoch = self._epoch
            return
        if collapsed and self.on_collapse == "recover":
            self.model.objective.start_recovery()
        self._previous_accuracy = accuracy
        if self.on_collapse == "stop":
            self._previous_weights = self.model.get_weights()

    def state_arrays(self) -> dict[str, np.ndarray]:
        """The looks so far, and the accuracy and weights of the last one."""
        weights = {f"weight_{i}": array for i, array in enumerate(self._previous_weights)}
        stopped = -1 if self.stopped_epoch is None else self.stopped_epoch
        counts = [stopped, self._batches, self._looks_before]
        return {
            "accuracy": np.array(self._previous_accuracy),
            "counts": np.array(counts),
            "looks": np.array(json.dumps(self.looks)),
            **weights,
        }

    def load_state_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """Restores what `state_arrays` returned."""
        self._previous_accuracy = float(arrays["accuracy"])
        stopped, self._batches, self._looks_before = (int(count) for count in arrays["counts"])
        self.stopped_epoch = None if stopped < 0 else stopped
        self.looks = json.loads(str(arrays["looks"]))
        count = sum(name.startswith("weight_") for name in arrays)
        self._previous_weights = [arrays[f"weight_{i}"] for i in range(count)]
