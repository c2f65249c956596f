"""What an evaluation will cost: passes by arithmetic, seconds by short runs on this machine.

A pass is one image through the network, forward or back.
"""

import dataclasses
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from he_keras.attacks import Attack
from he_keras.attacks.framework.ensemble import parts
from he_keras.evaluation.run.examples import Scorer

#: Passes of the checks before the attacks, on all images together, and of those after the attacks,
#: for each image, the curve over epsilon included. A test counts them.
_BEFORE = 2000
_AFTER = 1300
#: About as many functions are compiled by the checks.
_COMPILED_BY_CHECKS = 20
#: The budget of the short runs: seconds for all of them, and what each is cut to.
_PROBE_SECONDS = 20.0
_SHORTENED = {"num_steps": 10, "num_queries": 50, "num_targets": 2, "num_restarts": 1}
_FEWEST_PROBED = 16


class CostPart(NamedTuple):
    """One line of a cost.

    Attributes:
        name: of the work.
        passes: images through the network, forward or back; 0 where none are counted.
        seconds: on this machine.
    """

    name: str
    passes: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Cost:
    """What some work is expected to take on this machine.

    Attributes:
        title: what the work is.
        parts: what it consists of.
        memory: largest resident memory of this process so far, in bytes; 0 where nobody knows.
        notes: how it was measured, and what may differ.

    Example:
        >>> from he_keras.evaluation.run.cost import Cost, CostPart
        >>> cost = Cost("training", (CostPart("10 epochs", 5000, 3.0),), 2 * 10**9, ("A guess.",))
        >>> print(cost.text())
        Expected cost of training on this machine
                             passes     seconds
        10 epochs             5,000           3
        total                 5,000           3  (0:00:03)
        Memory: 2.0 GB, the most that this process has held so far.
        A guess.
    """

    title: str
    parts: tuple[CostPart, ...]
    memory: int
    notes: tuple[str, ...] = ()

    @property
    def passes(self) -> float:
        """All passes."""
        return sum(part.passes for part in self.parts)

    @property
    def seconds(self) -> float:
        """All seconds."""
        return sum(part.seconds for part in self.parts)

    def text(self) -> str:
        """Returns the table that `--dry_run` prints."""
        width = max(14, *(len(part.name) for part in self.parts))
        rows = [*self.parts, CostPart("total", self.passes, self.seconds)]
        lines = [f"{row.name:<{width}}{row.passes:>14,.0f}{row.seconds:>12,.0f}" for row in rows]
        memory = f"{self.memory / 1e9:.1f} GB, the most that this process has held so far."
        return "\n".join(
            [
                f"Expected cost of {self.title} on this machine",
                f"{'':<{width}}{'passes':>14}{'seconds':>12}",
                *lines[:-1],
                f"{lines[-1]}  ({duration(self.seconds)})",
                f"Memory: {memory if self.memory else 'not known on this system.'}",
                *self.notes,
            ]
        )


def duration(seconds: float) -> str:
    """Returns hours, minutes and seconds.

    Example:
        >>> from he_keras.evaluation.run.cost import duration
        >>> duration(3725.4)
        '1:02:05'
    """
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"


def peak_memory() -> int:
    """Returns the largest resident memory of this process so far, in bytes; 0 if nobody knows."""
    try:
        import resource
    except ImportError:
        return 0
    import sys

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def passes_of_checks(num_correct: int) -> int:
    """Returns at most how many passes the checks take if so many of their images are correct."""
    return _BEFORE + _AFTER * num_correct


def announcement(asked: int, beside: dict[str, int]) -> str:
    """Returns what the console says of the cost before the first attack.

    Args:
        asked: passes of the attacks that were asked for.
        beside: passes of the checks and of the panel, by the name of their flag.

    Example:
        >>> announcement(300, {"checks": 100}).partition("; ")[2]
        '100 for the checks (25% of all; --nochecks leaves them out)'
    """
    total = asked + sum(beside.values())
    shares = [
        f"{passes:,} for the {name} ({passes / total:.0%} of all; --no{name} leaves them out)"
        for name, passes in beside.items()
        if passes
    ]
    return "; ".join([f"Passes, at most: {asked:,} for the attacks asked for", *shares])


class _Rate(NamedTuple):
    """What a short run of an attack took."""

    seconds_to_compile: float
    seconds_per_pass: float


class Probe:
    """Short runs of attacks on a few examples.

    An example that breaks early costs little, so what counts most is how many hold out.

    Args:
        model: the model.
        images: the first images.
        labels: their labels.
        attacks: the attacks to be run.
        batch_size: examples per call.

    Attributes:
        seconds_per_image: of a forward pass.
        correct: share of the examples that are classified correctly.
        held: share of these that no short run breaks.
    """

    def __init__(self, model, images, labels, attacks: Sequence[Attack], batch_size: int) -> None:
        self.model = model
        scorer = Scorer(model)
        self.num_classes = scorer.num_classes(images[:batch_size])
        scorer(images[:batch_size], labels[:batch_size])
        began = time.perf_counter()
        wrong = scorer(images[:batch_size], labels[:batch_size]).wrong
        self.seconds_per_image = (time.perf_counter() - began) / len(wrong)
        self.correct = float(1.0 - wrong.mean())
        rows = np.flatnonzero(~wrong)
        short = {_key(part): _shortened(part) for attack in attacks for part in parts(attack)}
        passes = sum(attack.most_passes(self.num_classes) for attack in short.values())
        # A backward pass takes about as long as a forward pass, or a little longer.
        count = int(_PROBE_SECONDS / max(passes * self.seconds_per_image, 1e-9))
        rows = rows[: max(count, _FEWEST_PROBED)]
        self._images, self._labels = images[rows], labels[rows]
        self._broken = np.zeros(len(rows), bool)
        self._passes_of_broken: list[float] = []
        self._rates = (
            {key: self._rate(attack) for key, attack in short.items()} if len(rows) else {}
        )
        self.held = float(1.0 - self._broken.mean()) if len(rows) else 0.0

    def _rate(self, attack: Attack) -> _Rate:
        began = time.perf_counter()
        attack(self.model, self._images[:2], self._labels[:2])
        compiled = time.perf_counter()
        result = attack(self.model, self._images, self._labels)
        seconds = time.perf_counter() - compiled
        passes = result.forward_passes + result.backward_passes
        self._broken |= result.success
        self._passes_of_broken += passes[result.success].tolist()
        return _Rate(compiled - began, seconds / max(passes.sum(), 1))

    def seconds_to_compile(self, attacks: Sequence[Attack]) -> float:
        """Returns the seconds until attacks are compiled, each part once."""
        return sum(self._rate_of(part).seconds_to_compile for one in attacks for part in parts(one))

    def _rate_of(self, part: Attack) -> _Rate:
        return self._rates.get(_key(part), _Rate(0.0, self.seconds_per_image))

    def cost_of(self, attack: Attack, num_correct: float, name: str = "") -> CostPart:
        """Returns the expected cost of an attack on so many examples that are right."""
        left, passes, seconds = num_correct, 0.0, 0.0
        of_broken = float(np.mean(self._passes_of_broken)) if self._passes_of_broken else 0.0
        for part in parts(attack):
            most = part.most_passes(self.num_classes)
            ends_early = part.stop_when_broken and not part.minimum_norm
            is_first = part is parts(attack)[0]
            held = left * self.held if is_first and ends_early else left
            own = held * most + (left - held) * min(of_broken, most)
            passes, seconds = passes + own, seconds + own * self._rate_of(part).seconds_per_pass
            left = num_correct * self.held
        return CostPart(name or attack.name, passes, seconds)

    def cost_of_checks(self, num_correct: float) -> CostPart:
        """Returns the expected cost of the checks; a gradient attack is most of it."""
        passes = passes_of_checks(round(num_correct))
        rates = [*self._rates.values()] or [_Rate(0.0, self.seconds_per_image)]
        compiling = _COMPILED_BY_CHECKS * float(
            np.mean([each.seconds_to_compile for each in rates])
        )
        per_pass = float(np.mean([each.seconds_per_pass for each in rates]))
        return CostPart("checks", passes, passes * per_pass + compiling)


def _key(attack: Attack) -> str:
    return f"{type(attack).__name__} {sorted(attack.get_config().items(), key=str)}"


def _shortened(attack: Attack) -> Attack:
    """Returns the attack with fewer steps, queries and targets."""
    config = attack.get_config()
    limits = {name: most for name, most in _SHORTENED.items() if config.get(name)}
    shorter = {name: min(config[name], most) for name, most in limits.items()}
    return type(attack).from_config({**config, **shorter})
