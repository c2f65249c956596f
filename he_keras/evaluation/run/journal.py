"""The record of an evaluation on disk: every finished batch, with its adversarial images.

A batch is written once, whole, under a name that follows from the plan of the evaluation. An
evaluation that is started again finds the batch and does not attack it a second time. Evaluations
of different parts of the data may share one folder. Every file of the record names the settings it
was made with, since files of several folders may be copied together.
"""

import contextlib
import dataclasses
import json
import math
import pathlib
import re
from collections.abc import Iterator

import numpy as np

from he_keras.evaluation.run.examples import Scored
from he_keras.evaluation.run.facts import differences, shown
from he_keras.files import lock, read_json, read_npz, write_json, write_npz

#: What errors on unreadable records expect.
A_RECORD = "the record of an evaluation (use another output_dir)"
FOLDER = "adversarial"
# The column, or the key, of the settings that a file was made with.
_PLAN = "plan"


@dataclasses.dataclass(frozen=True)
class BatchOutcome:
    """What one attack did to one batch; one entry per example unless said otherwise.

    Attributes:
        positions: of the examples in the data set.
        labels: of the examples.
        broken: the model misclassifies the adversarial image when it is scored once more.
        prediction: the class predicted for the adversarial image.
        margin: true logit minus the largest other one there.
        distance: length of the perturbation of the adversarial image.
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
        plan: the settings of the evaluation, as plain data; every file must have been made with
            them.
        must_exist: a batch that is not there is an error (for merging what others have computed).
        tolerance: how much the clean margins may differ from those recorded.
    """

    def __init__(
        self,
        folder: pathlib.Path | None,
        plan: dict | None = None,
        must_exist: bool = False,
        tolerance: float = np.inf,
    ) -> None:
        self.folder = folder
        self.plan = plan or {}
        self._must_exist = must_exist
        self._tolerance = tolerance

    def path(self, block: int, name: str, number: int) -> pathlib.Path | None:
        """Returns where a batch is recorded: its block, attack and number there."""
        return None if self.folder is None else batch_path(self.folder, block, name, number)

    def recall(self, path: pathlib.Path | None, positions: np.ndarray) -> BatchOutcome | None:
        """Returns the recorded batch of some examples, None where there is none yet."""
        if path is None or not self._has(path):
            return None
        return read_batch(path, self.plan, positions)

    def record(self, path: pathlib.Path | None, outcome: BatchOutcome) -> None:
        """Writes a batch."""
        if path is not None:
            self._write(path, dataclasses.asdict(outcome))

    def settle(self, block: int, now: Scored) -> Scored:
        """Returns the verdicts on a block's clean images, as recorded when it was first begun.

        On another CPU, images near a boundary may fall on its other side, and a random model
        answers differently each time. But the same examples must be attacked.
        """
        if self.folder is None:
            return now
        path = clean_path(self.folder, block)
        if not self._has(path):
            self._write(path, now._asdict())
            return now
        recorded = read_clean(path, self.plan)
        if not _alike(recorded.margin, now.margin, self._tolerance):
            raise ValueError(
                "The folder holds another evaluation; expected the answers to clean images that "
                f"are recorded in {path}; received others; use another output_dir, or delete this "
                "one"
            )
        return recorded

    def record_pictures(self, shard: tuple[int, int], pictures: dict[str, np.ndarray]) -> None:
        """Writes what a shard adds to the gallery."""
        if self.folder is not None:
            self._write(self.folder / "pictures" / f"{shard[0]}-of-{shard[1]}.npz", pictures)

    def recall_pictures(self) -> dict[str, np.ndarray]:
        """Returns what all shards have added to the gallery."""
        found = sorted(self.folder.glob("pictures/*.npz")) if self.folder else []
        columns = [_read(path, dict, self.plan) for path in found]
        columns = [each for each in columns if len(each["positions"])]
        if not columns:
            return {name: np.zeros(0) for name in ("positions", "x_adv", "margin", "distance")}
        return {name: np.concatenate([each[name] for each in columns]) for name in columns[0]}

    def recall_json(self, name: str):
        """Returns recorded plain data, None where there is none."""
        path = self.folder and self.folder / name
        if path is None or not path.exists():
            return None
        found = read_json(path, A_RECORD)
        _check_plan(found.get(_PLAN), self.plan, path)
        return found["content"]

    def record_json(self, name: str, content) -> None:
        """Writes plain data."""
        if self.folder is not None:
            write_json(self.folder / name, {_PLAN: self.plan, "content": content})

    def _write(self, path: pathlib.Path, columns: dict) -> None:
        plan = json.dumps(self.plan, sort_keys=True).encode()
        write_npz(path, {**columns, _PLAN: np.array(plan)})

    def _has(self, path: pathlib.Path) -> bool:
        if self.folder is not None and self._must_exist and not path.exists():
            raise ValueError(
                "The evaluation is not complete, so it cannot be merged; expected the batches of "
                f"every shard in {self.folder}; received none at {path.relative_to(self.folder)}"
            )
        return path.exists()


def batch_path(folder: pathlib.Path, block: int, name: str, number: int) -> pathlib.Path:
    """Returns where a batch is recorded: its block, attack and number there."""
    return folder / f"block-{block:05d}" / f"{file_name(name)}.{number:03d}.npz"


def clean_path(folder: pathlib.Path, block: int) -> pathlib.Path:
    """Returns where the verdicts on the clean images of a block are recorded."""
    return folder / "clean" / f"block-{block:05d}.npz"


def read_batch(
    path: pathlib.Path, plan: dict | None = None, positions: np.ndarray | None = None
) -> BatchOutcome:
    """Reads one recorded batch, or says that it is damaged, of another plan or other examples."""
    outcome = _read(path, BatchOutcome, plan)
    if positions is not None and not np.array_equal(outcome.positions, positions):
        raise ValueError(
            f"The record is of other examples; expected those at positions {_listed(positions)}; "
            f"received {_listed(outcome.positions)} in {path}; delete this file to have the batch "
            "attacked again"
        )
    return outcome


def read_clean(path: pathlib.Path, plan: dict | None = None) -> Scored:
    """Reads the recorded verdicts on clean images, or says what is wrong with the file."""
    return _read(path, Scored, plan)


def _read(path: pathlib.Path, kind, plan: dict | None):
    try:
        columns = read_npz(path)
        made_with = json.loads(columns.pop(_PLAN).item()) if _PLAN in columns else None
        content = kind(**columns)
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"Damaged record; expected a batch written by an evaluation; received {path} "
            f"({type(error).__name__}); delete this file to have the batch attacked again"
        ) from error
    if plan is not None:
        _check_plan(made_with, plan, path)
    return content


def _check_plan(made_with: dict | None, plan: dict, path: pathlib.Path) -> None:
    """Raises a ValueError if a file was made with other settings, and says which."""
    if made_with == plan:
        return
    found = differences(made_with, plan) if made_with and plan else ["no word of them"]
    raise ValueError(
        "The record is of another evaluation; expected the settings of this one; received "
        f"{shown(found) or 'others'} in {path}; delete this file to have the work done again"
    )


def file_name(name: str) -> str:
    """Returns a name without characters that have a meaning in paths."""
    return re.sub(r"[^A-Za-z0-9.+_-]+", "_", name)


def _listed(positions: np.ndarray) -> str:
    few = ", ".join(str(position) for position in positions[:4])
    return few if len(positions) <= 4 else f"{few}, ... ({len(positions)})"


def _alike(recorded: np.ndarray, now: np.ndarray, tolerance: float) -> bool:
    if recorded.shape != now.shape or math.isinf(tolerance):
        return recorded.shape == now.shape
    with np.errstate(invalid="ignore"):
        is_near = np.abs(recorded - now) <= tolerance
    return bool(np.all(is_near | (recorded == now) | (np.isnan(recorded) & np.isnan(now))))


@contextlib.contextmanager
def locked(folder: pathlib.Path, shard: tuple[int, int] | None) -> Iterator[None]:
    """Holds a folder for this process, or for one shard of several; the system frees it at exit.

    If the system or the file system has no locks, nothing is held.
    """
    with contextlib.ExitStack() as stack:
        try:
            # Shards share the folder. A whole evaluation needs it alone, and is refused then.
            stack.enter_context(lock(folder / ".lock", shared=shard is not None))
            if shard is not None:
                stack.enter_context(lock(folder / f".lock-{shard[0]}-of-{shard[1]}"))
        except BlockingIOError as error:
            raise ValueError(
                "Another process evaluates into this folder; expected a folder of its own, or "
                f"another shard; received {folder}"
            ) from error
        yield
