"""history.csv: one row an epoch, rewritten atomically, never with an epoch twice."""

import csv
import io
import json
import pathlib
import time

import keras
import numpy as np

from he_keras.distribution import is_chief
from he_keras.files import replacing


class HistoryFile(keras.callbacks.Callback):
    """Writes the metrics of every epoch, and its seconds, to a CSV file.

    Of several worker processes the first one does.

    Args:
        path: the file to write.
    """

    def __init__(self, path) -> None:
        super().__init__()
        self.path = pathlib.Path(path)
        self.rows: list[dict] = []
        self._seconds_before = 0.0
        self._began = time.monotonic()

    def on_epoch_begin(self, epoch, logs=None) -> None:
        """Starts the clock."""
        self._began = time.monotonic()

    def on_epoch_end(self, epoch, logs=None) -> None:
        """Adds a row."""
        values = {name: round(float(value), 6) for name, value in (logs or {}).items()}
        seconds = round(self._seconds_before + time.monotonic() - self._began, 2)
        self._seconds_before = 0.0
        self.rows = [row for row in self.rows if row["epoch"] < epoch]
        self.rows.append({"epoch": epoch, "seconds": seconds, **values})
        if self.model is None or is_chief(self.model.distribute_strategy):
            write_rows(self.path, self.rows)

    def state_arrays(self) -> dict[str, np.ndarray]:
        """The rows so far and the time spent in the current epoch."""
        spent = self._seconds_before + time.monotonic() - self._began
        return {"rows": np.array(json.dumps(self.rows)), "seconds": np.array(spent)}

    def load_state_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """Restores what `state_arrays` returned."""
        self.rows = json.loads(str(arrays["rows"]))
        self._seconds_before = float(arrays["seconds"])


def write_rows(path: pathlib.Path, rows: list[dict]) -> None:
    """Writes dictionaries as CSV."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(rows)
    with replacing(path) as temporary:
        temporary.write_text(text.getvalue())
