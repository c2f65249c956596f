"""The trained models behind the cells: where each lies, how far it is, and how it comes about.

A folder belongs to a run by what is trained, not by its name: cells of several tables that need
equal runs share one. A public checkpoint takes a row's place in a folder of its own.
"""

import hashlib
import pathlib
import shutil
from typing import Any, NamedTuple

from he_keras.arguments import unknown_name
from he_keras.data import ImageDataset, StreamingDataset
from he_keras.experiment import Training, check_config, load_split
from he_keras.experiment.run_folder import held
from he_keras.files import read_json, replacing, write_json
from he_keras.model_files import load_classifier
from he_keras.reproduction import scales
from he_keras.reproduction.cells import Cell, Model

NOT_STARTED, IN_TRAINING, TRAINED = "not started", "in training", "trained"
EVALUATED, FROM_CHECKPOINT = "evaluated", "from a public checkpoint"
_RESULTS = "results.json"
_CHECKPOINTS = "checkpoints.json"
_KERAS_FILE = ".keras"


class Run(NamedTuple):
    """One model of a cell: its folder, and the configuration that it is trained by.

    Attributes:
        folder: the run folder.
        config: the configuration; of a public checkpoint the one whose data it is evaluated on.
        is_public: the model is a public checkpoint, and nothing is trained.
    """

    folder: pathlib.Path
    config: Any
    is_public: bool = False

    def status(self) -> str:
        """Returns how far the run is, not counting what is measured on it."""
        if self.is_public:
            return FROM_CHECKPOINT
        if (self.folder / "model.keras").exists():
            return TRAINED
        return IN_TRAINING if (self.folder / "checkpoints").exists() else NOT_STARTED

    @property
    def is_ready(self) -> bool:
        """Whether there is a model to measure."""
        return self.status() in (TRAINED, FROM_CHECKPOINT)

    def model_file(self) -> pathlib.Path:
        """Returns the file to measure: the best epoch on the held-out images, else the last."""
        best = self.folder / "checkpoints" / "best.keras"
        return best if best.exists() else self.folder / "model.keras"

    def results(self) -> dict[str, dict]:
        """Returns the measured numbers by the keys of their measurements."""
        path = self.folder / _RESULTS
        return read_json(path) if path.exists() else {}

    def record(self, found: dict[str, dict]) -> None:
        """Adds measured numbers."""
        write_json(self.folder / _RESULTS, {**self.results(), **found})

    def train(self) -> None:
        """Trains what is left of the run; nothing if it is complete."""
        if not self.is_ready:
            Training(self.config, self.folder).run()

    def test_images(self) -> ImageDataset | StreamingDataset:
        """Returns the test images of the run's data."""
        return load_split(self.config, "test")

    def load(self):
        """Returns the model to measure."""
        return load_classifier(self.model_file())


class Runs:
    """The runs of one scale below a folder.

    Args:
        folder: where everything is written.
        scale: one of `scales.SCALES`.
    """

    def __init__(self, folder, scale: str) -> None:
        self.scale = scale
        self.folder = pathlib.Path(folder) / scale
        self._checkpoints = self._read_checkpoints()
        self._found: dict[tuple[Model, int], Run] = {}
        self._folders: dict[str, pathlib.Path] = {}

    def of(self, model: Model, seed: int) -> Run:
        """Returns the run of a model and a seed, whether it exists or not."""
        if (model, seed) not in self._found:
            self._found[model, seed] = self._find(model, seed)
        return self._found[model, seed]

    def _find(self, model: Model, seed: int) -> Run:
        config = scales.configuration(model, self.scale, seed)
        check_config(config)
        digits = scales.identity(config)
        if digits not in self._folders:
            models = self.folder / "models"
            known = sorted(models.glob(f"*-{digits}"))
            new = models / f"{model.experiment}-{digits}"
            self._folders[digits] = known[0] if known else new
        folder = self._folders[digits]
        with config.unlocked():
            config.name = folder.name.removesuffix(f"-{digits}")
        return Run(folder, config)

    def of_cell(self, cell: Cell, seed: int) -> Run | None:
        """Returns the run of a cell: a public checkpoint if one has taken its row.

        None is returned where nothing stands for the cell.
        """
        if cell.model is None:
            return None
        public = self._checkpoints.get(cell.table, {}).get(cell.row)
        if public is None:
            return self.of(cell.model, seed)
        config = scales.configuration(cell.model, self.scale, seed)
        return Run(self.folder / "models" / public["folder"], config, is_public=True)

    def crafting(self, experiment: str, seed: int) -> Run:
        """Returns the run whose model images are crafted for."""
        return self.of(Model(experiment), seed)

    def remarks_on(self, table: str) -> list[str]:
        """Returns which rows of a table public checkpoints have taken."""
        return [
            f"{row}: the public checkpoint {about['file']} (sha256 {about['sha256'][:12]}, "
            f"{about['recipe']}), not trained here."
            for row, about in self._checkpoints.get(table, {}).items()
        ]

    def take_checkpoint(self, cells: list[Cell], assignment: str) -> None:
        """Fills a row from a public checkpoint, from now on.

        Args:
            cells: of the table.
            assignment: "ROW:FILE"; the file is one of the row's layout, or a .keras file.
        """
        rows = dict.fromkeys(cell.row for cell in cells)
        row = next((each for each in rows if assignment.startswith(f"{each}:")), None)
        if row is None:
            raise unknown_name("row in --checkpoint=ROW:FILE", assignment, rows)
        file = pathlib.Path(assignment[len(row) + 1 :])
        if not file.is_file():
            raise ValueError(
                f"No checkpoint; expected a file after --checkpoint={row}:; received {file}"
            )
        wanted = [each for cell in cells if cell.row == row for each in cell.measurements]
        if all(each.is_of_training for each in wanted):
            raise ValueError(
                "Nothing in this row can be measured on a file; expected a row with an accuracy in "
                f"he-keras reproduce {cells[0].table} --list; received --checkpoint={assignment}"
            )
        (recipe,) = {cell.checkpoint for cell in cells if cell.row == row}
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        folder = f"public-{digest[:8]}"
        _write_model(file, recipe, self.folder / "models" / folder / "model.keras", row)
        entry = {"folder": folder, "file": file.name, "sha256": digest, "recipe": recipe}
        table = self._checkpoints.setdefault(cells[0].table, {})
        table[row] = {**entry, "recipe": recipe or "a .keras file"}
        with held(self.folder, "takes checkpoints"):
            write_json(self.folder / _CHECKPOINTS, self._checkpoints)

    def _read_checkpoints(self) -> dict:
        path = self.folder / _CHECKPOINTS
        return read_json(path) if path.exists() else {}


def _write_model(file: pathlib.Path, recipe: str, target: pathlib.Path, row: str) -> None:
    """Makes a .keras file of a checkpoint, unless that was done before."""
    from he_keras import zoo

    if file.suffix != _KERAS_FILE and not recipe:
        raise ValueError(
            f"No public layout is known for this row; expected --checkpoint={row}:FILE.keras, "
            f"which he-keras import makes; received {file}"
        )
    if target.exists():
        return
    with replacing(target) as temporary:
        if file.suffix == _KERAS_FILE:
            shutil.copyfile(file, temporary)
        else:
            zoo.load(recipe, file).save(temporary)
