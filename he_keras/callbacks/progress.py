"""A progress bar over the whole run: time left, loss, accuracies; one line kept for each epoch."""

import math
import sys

import keras


class ProgressBar(keras.callbacks.Callback):
    """Shows one bar for all epochs.

    Args:
        total_steps: batches of the whole run.
        steps_per_epoch: batches of an epoch.
        epochs: number of epochs, for the epoch lines.
        first_step: batches done before (a resumed run).
    """

    def __init__(self, total_steps: int, steps_per_epoch: int, epochs: int, first_step: int = 0):
        super().__init__()
        from tqdm import tqdm

        self.steps_per_epoch, self.epochs = steps_per_epoch, epochs
        # A log file gets a line now and then instead of a line for every refresh.
        quiet = not sys.stderr.isatty()
        self._bar = tqdm(
            total=total_steps,
            initial=first_step,
            unit="batch",
            mininterval=60 if quiet else 0.5,
            dynamic_ncols=True,
        )
        self._val_postfix: dict = {}

    def on_train_batch_end(self, batch, logs=None) -> None:
        """Advances by one batch."""
        values = {name: f"{float(value):.4g}" for name, value in (logs or {}).items()}
        self._bar.set_postfix({**values, **self._val_postfix}, refresh=False)
        self._bar.update(1)

    def on_epoch_end(self, epoch, logs=None) -> None:
        """Prints the epoch's metrics above the bar."""
        logs = logs or {}
        shown = "  ".join(f"{name} {float(value):.4f}" for name, value in logs.items())
        self._bar.write(f"epoch {epoch + 1}/{self.epochs}: {shown}", file=sys.stdout)
        self._val_postfix = {
            name: f"{float(value):.4g}" for name, value in logs.items() if name.startswith("val_")
        }

    def close(self) -> None:
        """Removes the bar from the terminal."""
        self._bar.close()


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
