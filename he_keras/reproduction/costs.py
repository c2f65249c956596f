"""What is left to do for cells costs: passes counted, and hours by arithmetic at two speeds.

The counting is that of `benchmarks.cost`, which docs/research/cost.md explains. An attack is
counted as if every image held to the end, so that an evaluation takes less. Compilation is not
counted, nor are figures, apart from their trainings.
"""

import functools
import json
import pathlib
from collections.abc import Iterable
from typing import NamedTuple

from he_keras.benchmarks import cost
from he_keras.files import read_json, write_json
from he_keras.reproduction import scales
from he_keras.reproduction.cells import Measurement
from he_keras.reproduction.measure import Measuring
from he_keras.reproduction.models import Run

_MULTIPLY_ADD = 2
_HOUR = 3600.0
_TEST_IMAGES = {"cifar10": 10_000, "cifar100": 10_000, "mnist": 10_000, "imagenet2012": 50_000}
_PROBE_BATCH, _PROBE_ROUNDS = 64, 3


class Left(NamedTuple):
    """Floating-point operations that are left to do.

    Attributes:
        training: of the training.
        evaluation: of the measurements.
    """

    training: float
    evaluation: float

    def hours(self, operations_per_second: float) -> float:
        """Returns how long both take at a speed."""
        return (self.training + self.evaluation) / operations_per_second / _HOUR


class Costs:
    """Counts operations; what a network costs is counted once and kept in a file.

    Args:
        folder: where the file goes.
        scale: one of `scales.SCALES`.
    """

    def __init__(self, folder, scale: str) -> None:
        self.scale = scale
        self._path = pathlib.Path(folder) / "multiply_adds.json"
        self._known = read_json(self._path) if self._path.exists() else {}

    def left(self, run: Run, wanted: Iterable[Measurement]) -> Left:
        """Returns what is left to do for some numbers of a run."""
        pass_operations = float(_MULTIPLY_ADD * self._multiply_adds(run.config))
        training = 0.0 if run.is_ready else pass_operations * _training_passes(run.config)
        known = run.results()
        missing = [each for each in dict.fromkeys(wanted) if each.key() not in known]
        passes = sum(self._passes(each, run) for each in missing)
        return Left(training, pass_operations * passes)

    def _multiply_adds(self, config) -> int:
        network = config.network
        options = network.options.to_dict()
        key = json.dumps([network.name, list(network.input_shape), options], sort_keys=True)
        if key not in self._known:
            shape = tuple(network.input_shape)
            self._known[key] = cost.multiply_adds(network.name, shape, **options)
            write_json(self._path, self._known)
        return self._known[key]

    def _passes(self, wanted: Measurement, run: Run) -> float:
        """Passes of one measurement over its images."""
        data, classes = run.config.data, run.config.head.num_classes
        images = data.test_examples or _TEST_IMAGES[data.name]
        if wanted.kind in ("clean", "corruption"):
            return images
        if wanted.kind != "attack":
            return 0
        if wanted.name == "transfer":
            # The images are crafted on the other model, which is taken for as large.
            return images * 2 * int(dict(wanted.options)["num_steps"])
        attack, _ = Measuring(run, self.scale).attack_of(wanted)
        count = scales.images_for(attack, self.scale, classes, wanted.examples)
        smaller = scales.sized(attack, self.scale)
        return min(count or images, images) * smaller.most_passes(classes)


def _training_passes(config) -> float:
    images = config.train.epochs * cost.training_images(config)
    return images * float(sum(cost.passes_of(config.objective.to_dict())))


@functools.cache
def speed_here() -> float:
    """Measures the operations per second of a training pass on this machine, in seconds."""
    return cost.measured_speed(_PROBE_BATCH, _PROBE_ROUNDS)
