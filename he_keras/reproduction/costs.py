"""What is left to do for cells costs: passes counted, and hours by arithmetic at two speeds.

The counting is that of `benchmarks.cost`, which docs/research/cost.md explains. An attack is
counted as if every image held to the end, so that an evaluation takes less. Compilation is not
counted, nor are figures, apart from their trainings.

The speed of this machine is measured for each network, because a small one reaches a smaller part
of it. Networks above PreActResNet-18 count with its speed, since they would take long to measure.
"""

import functools
import json
import math
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
#: Multiply-adds of an image, a few more than PreActResNet-18 has.
_MOST_MEASURED = 600_000_000


class Left(NamedTuple):
    """Floating-point operations that are left to do.

    Attributes:
        training: of the training.
        evaluation: of the measurements.
        speed_here: operations per second of the network on this machine.
    """

    training: float
    evaluation: float
    speed_here: float

    def hours(self, operations_per_second: float | None = None) -> float:
        """Returns how long both take at a speed, or on this machine."""
        speed = operations_per_second or self.speed_here
        return (self.training + self.evaluation) / speed / _HOUR


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
        pass_operations = float(_MULTIPLY_ADD * self._multiply_adds(run.config.network))
        training = 0.0 if run.is_ready else pass_operations * _training_passes(run.config)
        known = run.results()
        missing = [each for each in dict.fromkeys(wanted) if each.key() not in known]
        passes = sum(self._passes(each, run) for each in missing)
        # What is done costs nothing, and its network need not be measured.
        speed = self._speed_here(run.config.network) if training or passes else math.inf
        return Left(training, pass_operations * passes, speed)

    def _multiply_adds(self, network) -> int:
        options = network.options.to_dict()
        key = _key(network)
        if key not in self._known:
            shape = tuple(network.input_shape)
            self._known[key] = cost.multiply_adds(network.name, shape, **options)
            write_json(self._path, self._known)
        return self._known[key]

    def _speed_here(self, network) -> float:
        is_large = self._multiply_adds(network) > _MOST_MEASURED
        return speed_here("" if is_large else _key(network))

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


def _key(network) -> str:
    """A network of a configuration as text."""
    parts = [network.name, list(network.input_shape), network.options.to_dict()]
    return json.dumps(parts, sort_keys=True)


@functools.cache
def speed_here(network: str) -> float:
    """Measures the operations per second of a network's training pass here, in seconds.

    Args:
        network: name, input shape and options as JSON; empty: PreActResNet-18.
    """
    if not network:
        return cost.measured_speed(_PROBE_BATCH, _PROBE_ROUNDS)
    name, shape, options = json.loads(network)
    return cost.measured_speed(_PROBE_BATCH, _PROBE_ROUNDS, name, tuple(shape), **options)
