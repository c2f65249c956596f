"""How far a training has come: its batches, its validations, and the time that both still take."""

import math
import time

import keras

from he_keras.status_line import StatusLine, Ticker

#: A batch that takes longer than the others is not shown as done before it is.
_NOT_YET_DONE = 0.95


class _Timer:
    """Measures batches of one kind; the first one, which also compiles, counts until others do."""

    def __init__(self) -> None:
        self._total, self._count, self._first, self._began = 0.0, 0, 0.0, 0.0

    def begin(self) -> None:
        self._began = time.monotonic()

    def end(self) -> None:
        seconds, self._began = time.monotonic() - self._began, 0.0
        if not self._first:
            self._first = seconds
            return
        self._total, self._count = self._total + seconds, self._count + 1

    @property
    def is_running(self) -> bool:
        return bool(self._began)

    @property
    def is_known(self) -> bool:
        """Whether a batch that did not compile has been measured."""
        return bool(self._count)

    @property
    def mean(self) -> float:
        """Seconds of a batch; 0 before the first one has ended."""
        return self._total / self._count if self._count else self._first

    @property
    def part_done(self) -> float:
        """Which part of the batch that runs is done, if it takes as long as those before."""
        if not self._began or not self._count:
            return 0.0
        return min((time.monotonic() - self._began) / max(self.mean, 1e-9), _NOT_YET_DONE)


class ProgressBar(keras.callbacks.Callback):
    """Shows one bar for all epochs, validation included, and one line for each epoch that ends.

    Args:
        total_steps: batches of the whole run.
        steps_per_epoch: batches of an epoch.
        epochs: number of epochs.
        first_step: batches done before (a resumed run).
        validation_steps: batches of the validation after each epoch.
    """

    def __init__(
        self,
        total_steps: int,
        steps_per_epoch: int,
        epochs: int,
        first_step: int = 0,
        validation_steps: int = 0,
    ) -> None:
        super().__init__()
        self.total_steps, self.steps_per_epoch = total_steps, steps_per_epoch
        self.epochs, self.validation_steps = epochs, validation_steps
        self._step, self._validated = first_step, 0
        self._training, self._validation = _Timer(), _Timer()
        self._values: dict[str, str] = {}
        self._val_values: dict[str, str] = {}
        self._line = StatusLine("training")
        self._ticker = Ticker(self._show)

    def on_train_begin(self, logs=None) -> None:
        """Lets the clock go on within batches."""
        self._ticker.__enter__()

    def on_train_batch_begin(self, batch, logs=None) -> None:
        """Notes when the batch begins."""
        self._training.begin()

    def on_train_batch_end(self, batch, logs=None) -> None:
        """Advances by one batch."""
        self._training.end()
        self._step += 1
        self._values = _texts(logs or {})
        self._show()

    def on_test_begin(self, logs=None) -> None:
        """Begins a validation."""
        self._validated = 0

    def on_test_batch_begin(self, batch, logs=None) -> None:
        """Notes when the batch begins."""
        self._validation.begin()
        self._show()

    def on_test_batch_end(self, batch, logs=None) -> None:
        """Advances by one batch of the validation."""
        self._validation.end()
        self._validated += 1
        self._show()

    def on_epoch_end(self, epoch, logs=None) -> None:
        """Prints the epoch's metrics above the bar."""
        logs = logs or {}
        shown = "  ".join(f"{name} {float(value):.4f}" for name, value in logs.items())
        self._line.say(f"epoch {epoch + 1}/{self.epochs}: {shown}")
        found = {name: value for name, value in logs.items() if name.startswith("val_")}
        self._val_values = _texts(found)

    def close(self) -> None:
        """Leaves the bar as it is."""
        self._ticker.__exit__()
        self._show()
        self._line.close()

    def _show(self) -> None:
        running = min(self._training.part_done, self.total_steps - self._step)
        share = (self._step + running) / max(self.total_steps, 1)
        self._line.update(share, self._text(), self._seconds_left(running))

    def _seconds_left(self, running: float) -> float | None:
        # The first batch alone may announce hours where minutes are left.
        if not self._training.is_known:
            return None
        batches = self.total_steps - self._step - running
        # The validation of the epoch that ends counts until it is over.
        epochs = -(-(self.total_steps - self._step) // self.steps_per_epoch)
        tests = float(epochs * self.validation_steps)
        if self._is_validating:
            tests += self.validation_steps - self._validated - self._validation.part_done
        return batches * self._training.mean + tests * self._validation.mean

    @property
    def _is_validating(self) -> bool:
        return self._validation.is_running or 0 < self._validated < self.validation_steps

    def _text(self) -> str:
        epoch = min(self._step // self.steps_per_epoch + 1, self.epochs)
        place = f"epoch {epoch}/{self.epochs}, batch {self._step}/{self.total_steps}"
        if self._is_validating:
            batch = min(self._validated + 1, self.validation_steps)
            place = f"epoch {max(self._step // self.steps_per_epoch, 1)}/{self.epochs}, "
            place += f"validation {batch}/{self.validation_steps}"
        values = {**self._values, **self._val_values}
        return ", ".join([place, *(f"{name}={value}" for name, value in values.items())])


def _texts(values: dict) -> dict[str, str]:
    return {name: f"{float(value):.4g}" for name, value in values.items()}


class StopOnNaN(keras.callbacks.Callback):
    """Raises as soon as the loss is not finite: nothing after that is worth computing."""

    def on_train_batch_end(self, batch, logs=None) -> None:
        """Checks the running loss."""
        loss = float((logs or {}).get("loss", 0.0))
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"The loss is not finite; expected a number: lower the learning rate; received "
                f"{loss} "
                f"at batch {batch}"
            )
