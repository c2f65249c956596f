"""The contract of an analysis: numbers about one or more models, and a picture of them.

An analysis file writes `measure_one` (or `measure`, if it compares models) and `draw`, and `table`
if a few lines of text help. The base class owns the checks, and the two files: `<name>.json`, which
holds the numbers and everything they depend on, and `<name>.png`.

The constructor's arguments are the analysis's options: keyword arguments with defaults. The
constructor checks each and keeps it as an attribute of the same name, from which the .json file
takes it. A dataclass keeps them by itself.
"""

import dataclasses
import inspect
import json
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from he_keras import attacks
from he_keras.attacks import check_examples
from he_keras.attacks.framework.victim import check_class_numbers
from he_keras.drawing import new_figure, save_figure
from he_keras.environment import environment
from he_keras.evaluation.run.examples import Scored, Scorer
from he_keras.files import make_writable, write_json
from he_keras.threat import ThreatModel, check_threat

#: Bounds the memory; no result depends on it.
_BATCH_SIZE = 250
_DOTS_PER_INCH = 110
_WIDTH, _HEIGHT = 7.0, 4.4


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """A classifier, the images to measure it on, and the configuration it was trained by.

    Attributes:
        name: name in tables and pictures.
        model: an `HEAdversarialModel`, a `keras.Model` or a callable from images to logits.
        images: images within the threat model's bounds, `(n, height, width, channels)`.
        labels: integer labels, `(n,)`.
        threat: the threat model.
        settings: plain data of the run's configuration; empty where there is none.
        folder: the run folder, None for a model that has none.

    Example:
        >>> import he_keras as he, numpy as np, tensorflow as tf
        >>> from he_keras.analysis import Subject
        >>> images, labels = np.ones((2, 3), "float32"), np.array([0, 1])
        >>> subject = Subject("mine", lambda x: x @ tf.eye(3), images, labels, he.ThreatModel())
        >>> subject.num_classes
        3
    """

    name: str
    model: Any
    images: np.ndarray
    labels: np.ndarray
    threat: ThreatModel
    settings: dict = dataclasses.field(default_factory=dict)
    folder: pathlib.Path | None = None

    def __post_init__(self) -> None:
        check_threat(self.threat)
        if not callable(self.model):
            raise TypeError(
                "Cannot analyse this object; expected a keras.Model or a callable images -> "
                f"logits; received {type(self.model).__name__}"
            )
        images, labels = check_examples(self.threat, self.images, self.labels)
        object.__setattr__(self, "images", images)
        object.__setattr__(self, "labels", labels)

    @property
    def num_classes(self) -> int:
        """How many logits the model returns."""
        return int(self.logits(self.images[:1]).shape[-1])

    def logits(self, images):
        """The model's logits in inference mode."""
        if isinstance(self.model, keras.layers.Layer):
            return self.model(images, training=False)
        return self.model(images)

    def scored(self, images: np.ndarray) -> Scored:
        """Returns what the model says about images, which belong to the labels in order."""
        scorer = Scorer(self.model)
        firsts = range(0, len(images), _BATCH_SIZE)
        parts = [
            scorer(images[first : first + _BATCH_SIZE], self.labels[first : first + _BATCH_SIZE])
            for first in firsts
        ]
        return Scored(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    def last_iterates(self, num_steps: int, seed: int) -> np.ndarray:
        """Returns what PGD makes of every image after all its steps, broken or not."""
        attack = attacks.PGD(
            self.threat, num_steps=num_steps, keep="last", stop_when_broken=False, seed=seed
        )
        return attack(self.model, self.images, self.labels).x_adv


def batches(images, labels, batch_size: int, seed: int = 0) -> Iterator[tuple]:
    """Yields images, labels and seeds as tensors; the seeds are pairs of (seed, position)."""
    for first in range(0, len(labels), batch_size):
        positions = np.arange(len(labels))[first : first + batch_size]
        seeds = np.stack([np.full(len(positions), seed), positions], axis=1)
        yield (
            tf.constant(images[positions]),
            tf.constant(labels[positions], tf.int32),
            tf.constant(seeds, tf.int32),
        )


class Analysis:
    """Base class of analyses: subclasses write `measure_one` or `measure`, and `draw`.

    Example:
        >>> from he_keras import analysis
        >>> class Brightness(analysis.Analysis):
        ...     def measure_one(self, subject):
        ...         return {"mean": float(subject.images.mean())}
        >>> Brightness().options
        {}
    """

    #: Name in the registry, set by `register`.
    name = "analysis"
    #: Fewest subjects that make sense.
    min_subjects = 1

    def measure(self, subjects: Sequence[Subject]) -> dict:
        """Returns the numbers as plain data; a function of subjects and options only."""
        return {subject.name: self.measure_one(subject) for subject in subjects}

    def measure_one(self, subject: Subject) -> dict:
        """Returns the numbers of one subject, if an analysis looks at each by itself."""
        raise TypeError(
            "An analysis measures something; expected a subclass with a method `measure_one` or a "
            f"method `measure`; received {type(self).__name__}"
        )

    def draw(self, numbers: Mapping, figure) -> None:
        """Draws `measure`'s numbers, as they come back from the .json file, on a Figure."""
        raise TypeError(
            "An analysis draws something; expected a subclass with a method `draw`; received "
            f"{type(self).__name__}"
        )

    def table(self, numbers: Mapping) -> str:
        """Returns the numbers that matter most, in a few lines of text."""
        return ""

    @property
    def options(self) -> dict:
        """The values of the options."""
        return {name: getattr(self, name) for name in option_defaults(type(self))}

    def run(self, subjects: Sequence[Subject], output_dir) -> dict:
        """Measures and draws, and writes `<name>.json` and `<name>.png`, each complete or not.

        Returns:
            What the .json file contains; the numbers are its entry "numbers".
        """
        self._check_subjects(subjects)
        folder = make_writable(pathlib.Path(output_dir), "the analysis")
        content = {
            "analysis": self.name,
            "options": plain(self.options),
            "subjects": [_described(subject) for subject in subjects],
            "environment": environment(),
            "numbers": plain(self.measure(subjects)),
        }
        write_json(folder / f"{self.name}.json", content)
        self.save_picture(content["numbers"], folder / f"{self.name}.png")
        return content

    def save_picture(self, numbers: Mapping, path) -> pathlib.Path:
        """Draws numbers, for example those of a .json file, into a picture file."""
        figure = new_figure(_WIDTH, _HEIGHT)
        self.draw(numbers, figure)
        return save_figure(figure, path, _DOTS_PER_INCH)

    def _check_subjects(self, subjects: Sequence[Subject]) -> None:
        names = [subject.name for subject in subjects]
        if len(names) < self.min_subjects or len(set(names)) != len(names):
            raise ValueError(
                f"{self.name} cannot compare these; expected at least {self.min_subjects} models "
                f"under different names; received {names}"
            )
        for subject in subjects:
            check_class_numbers(subject.labels, subject.num_classes)


def option_defaults(analysis: type[Analysis]) -> dict[str, Any]:
    """Returns the options of an analysis and their defaults."""
    if analysis.__init__ is object.__init__:
        return {}
    parameters = list(inspect.signature(analysis.__init__).parameters.values())[1:]
    return {parameter.name: parameter.default for parameter in parameters}


def plain(value) -> Any:
    """Returns JSON-compatible data: lists, dicts, numbers; None for what is not finite."""
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    # Raises a TypeError for what is no plain data.
    return json.loads(json.dumps(value))


def _described(subject: Subject) -> dict:
    return {
        "name": subject.name,
        "folder": None if subject.folder is None else str(subject.folder),
        "num_examples": len(subject.labels),
        "threat": plain(subject.threat.get_config()),
        "settings": plain(subject.settings),
    }
