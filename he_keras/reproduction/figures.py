"""A figure: its models trained, and drawn by the analysis or the transfer matrix that it names."""

import pathlib
from collections.abc import Sequence

from he_keras import analysis, attacks
from he_keras.analysis.analysis import option_defaults
from he_keras.evaluation import transfer_matrix, write_transfer
from he_keras.evaluation.run.examples import Examples
from he_keras.evaluation.transfer_matrix import FULL_RUN
from he_keras.experiment import build_threat, to_plain
from he_keras.files import read_json, write_json
from he_keras.reproduction import scales
from he_keras.reproduction.cells import Figure
from he_keras.reproduction.models import Run
from he_keras.threat import ThreatModel

_BATCH_SIZE = 250
_CPU_EXAMPLES = 1000
_SMOKE_STEPS = {"num_steps": 2}
_RECORD = "figure.json"


def subjects_of(figure: Figure, seeds: Sequence[int]) -> dict[tuple[str, int], str]:
    """Returns the names in the figure of its models and seeds; one seed needs no name."""
    return {
        (name, seed): name if len(seeds) == 1 else f"{name}, seed {seed}"
        for name in figure.models
        for seed in seeds
    }


def is_drawn(folder, runs: dict[str, Run], figure: Figure) -> bool:
    """Whether the folder holds the figure of these runs."""
    path = pathlib.Path(folder) / _RECORD
    return path.exists() and read_json(path) == _record(runs, figure)


def draw(folder, runs: dict[str, Run], figure: Figure, scale: str) -> list[pathlib.Path]:
    """Draws the figure, unless that was done before; returns its files.

    Args:
        folder: where the files go.
        runs: the trained runs by their names in the figure.
        figure: the figure.
        scale: one of `scales.SCALES`.
    """
    folder = pathlib.Path(folder)
    if not is_drawn(folder, runs, figure):
        count = min(figure.examples, _CPU_EXAMPLES) if scale == "cpu" else figure.examples
        if figure.transfer:
            _draw_transfer(folder, runs, figure, scale, count)
        else:
            _draw_analysis(folder, runs, figure, scale, count)
        write_json(folder / _RECORD, _record(runs, figure))
    return sorted(path for path in folder.iterdir() if path.suffix in (".png", ".json"))


def _record(runs: dict[str, Run], figure: Figure) -> dict:
    return {
        "runs": {name: run.folder.name for name, run in runs.items()},
        "examples": figure.examples,
    }


def _draw_analysis(folder, runs: dict[str, Run], figure: Figure, scale: str, count: int) -> None:
    options = dict(figure.options)
    if scale == "smoke":
        known = option_defaults(type(analysis.get(figure.analysis)))
        options |= {key: value for key, value in _SMOKE_STEPS.items() if key in known}
    subjects = []
    for name, run in runs.items():
        threat = build_threat(run.config)
        images, labels = Examples(threat, run.test_images(), _BATCH_SIZE).first(count)
        plain = to_plain(run.config)
        model = run.load()
        subjects.append(analysis.Subject(name, model, images, labels, threat, plain, run.folder))
    analysis.get(figure.analysis, **options).run(subjects, folder)


def _draw_transfer(folder, runs: dict[str, Run], figure: Figure, scale: str, count: int) -> None:
    threat = ThreatModel("linf", figure.epsilon)
    chosen = [
        scales.sized(attacks.get(name, threat, **FULL_RUN, **dict(figure.options)), scale)
        for name in figure.transfer
    ]
    models = {name: run.load() for name, run in runs.items()}
    images = next(iter(runs.values())).test_images()
    matrices = transfer_matrix(
        models, images.take(min(count, len(images))), threat, chosen, _BATCH_SIZE
    )
    write_transfer(folder, matrices)
