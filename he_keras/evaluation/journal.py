"""The record of an evaluation on disk: every finished batch, with its adversarial images.

A batch is written once, whole, under a name that follows from the plan of the evaluation. An
evaluation that is started again finds it there and does not attack it a second time; evaluations of
different parts of the data may share one folder.
"""

import contextlib
import dataclasses
import json
import pathlib
import re
import zipfile
from collections.abc import Iterator

import numpy as np

from he_keras.atomic_files import write_json, write_npz

FOLDER = "adversarial"
_SETTINGS = "settings.json"


@dataclasses.dataclass(frozen=True)
class BatchOutcome:
    """What one attack did to one batch; one entry per example unless said otherwise.

    Attributes:
        positions: of the examples in the data set.
        labels: of the examples.
        broken: the model misclassifies the adversarial image when it is scored once more.
        prediction: the class predicted for the adversarial image.
        margin: true logit minus the largest other one there.
        distance: length of the perturbation (of minimum-norm attacks the smallest found).
        forward_passes: spent by the attack.
        backward_passes: spent by the attack.
        non_finite: the model returned NaN or infinity.
        unconfirmed: the attack reported a success that scoring once more did not show.
        x_adv: the adversarial images of the broken examples only, in their order.
        seconds: time spent on the whole batch.
    """

    positions: np.ndarray
    labels: np.ndarray
    broken: np.ndarray
    prediction: np.ndarray
    margin: np.ndarray
    distance: np.ndarray
    forward_passes: np.ndarray
    backward_passes: np.ndarray
    non_finite: np.ndarray
    unconfirmed: np.ndarray
    x_adv: np.ndarray
    seconds: np.ndarray


class Journal:
    """Remembers batches in a folder; without a folder it remembers nothing.

    Args:
        folder: where the record lies; None for none.
        settings: plain data that determines every batch; another evaluation's record is refused.
        must_exist: a batch that is not there is an error (for merging what others have computed).
    """

    def __init__(self, folder: pathlib.Path | None, settings: dict, must_exist=False) -> None:
        self.folder = folder
        self._must_exist = must_exist
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            _check_settings(folder, settings)

    def path(self, block: int, name: str, number: int) -> pathlib.Path | None:
        """Returns where a batch is recorded: its block, attack and number there."""
        if self.folder is None:
            return None
        return self.folder / f"block-{block:05d}" / f"{file_name(name)}.{number:03d}.npz"

    def recall(self, path: pathlib.Path | None) -> BatchOutcome | None:
        """Returns a recorded batch, None where there is none yet."""
        if path is None or self.folder is None:
            return None
        if path.exists():
            return read_batch(path)
        if self._must_exist:
            raise ValueError(
                "The evaluation is not complete, so it cannot be merged; expected the batches of "
                f"every shard in {self.folder}; received none at {path.relative_to(self.folder)}"
            )
        return None

    def record(self, path: pathlib.Path | None, outcome: BatchOutcome) -> None:
        """Writes a batch."""
        if path is not None:
            write_npz(path, dataclasses.asdict(outcome))


def read_batch(path: pathlib.Path) -> BatchOutcome:
    """Reads one recorded batch, or says that the file is damaged."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            return BatchOutcome(**{name: archive[name] for name in archive.files})
    except (OSError, ValueError, EOFError, TypeError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"Damaged record; expected a batch written by an evaluation; received {path} "
            f"({type(error).__name__}); delete this file to have the batch attacked again"
        ) from error


def file_name(name: str) -> str:
    """Returns a name without characters that have a meaning in paths."""
    return re.sub(r"[^A-Za-z0-9.+_-]+", "_", name)


def _check_settings(folder: pathlib.Path, settings: dict) -> None:
    path = folder / _SETTINGS
    # Through JSON, which knows no tuples.
    settings = json.loads(json.dumps(settings))
    if not path.exists():
        write_json(path, settings)
        return
    try:
        recorded = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(
            f"Damaged record; expected JSON in {path}; received {error}; use another output_dir"
        ) from error
    for key in sorted(set(recorded) | set(settings)):
        if recorded.get(key) != settings.get(key):
            raise ValueError(
                f"The folder holds another evaluation; expected the same {key} as recorded in "
                f"{path}: {recorded.get(key)!r:.300}; received {settings.get(key)!r:.300}; use "
                "another output_dir, or delete this one"
            )


@contextlib.contextmanager
def locked(folder: pathlib.Path, shard: tuple[int, int] | None) -> Iterator[None]:
    """Holds a folder for this process, or for one shard of several; the system frees it at exit.

    Where the operating system has no such locks (Windows), nothing is held.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    with contextlib.ExitStack() as stack:
        # Shards hold the folder together; who wants it alone waits for none of them.
        kinds = {".lock": fcntl.LOCK_SH if shard else fcntl.LOCK_EX}
        if shard:
            kinds[f".lock-{shard[0]}-of-{shard[1]}"] = fcntl.LOCK_EX
        for name, kind in kinds.items():
            file = stack.enter_context(open(folder / name, "w"))
            try:
                fcntl.flock(file, kind | fcntl.LOCK_NB)
            except OSError as error:
                raise ValueError(
                    "Another process evaluates into this folder; expected a folder of its own, or "
                    f"another shard; received {folder}"
                ) from error
        yield
