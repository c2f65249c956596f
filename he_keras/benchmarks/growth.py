"""How the cost of a training step grows: with attack steps K, with the batch, and not with time.

* Seconds of a step over K, less those of a step without attack: a line through the origin, if the
  attack costs nothing but its steps. `intercept` is what the fitted line has at K = 0, as a share
  of the step with the most attack steps.
* Seconds over the batch size, and seconds to the first step over K.
* Resident memory after each tenth of many steps, and of 100 batches that are evaluated.

Every point is a process of its own; rounds are interleaved and the best time of each counts.
"""

import dataclasses
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from he_keras.benchmarks.training import OURS, Cell
from he_keras.benchmarks.training_worker import Worker

#: The memory is looked at so often.
_LOOKS = 10


@dataclasses.dataclass
class Growth:
    """What was measured; seconds are the best of all rounds."""

    network: str
    dtype: str
    over_steps: dict[int, float]
    first_step: dict[int, float]
    over_batch: dict[int, float]
    memory: list[tuple[int, int]]
    evaluated: list[tuple[int, int]]

    @property
    def line(self) -> tuple[float, float]:
        """Slope and intercept of the attack's seconds over K."""
        counts = [count for count in self.over_steps if count]
        attack = [self.over_steps[count] - self.over_steps[0] for count in counts]
        slope, intercept = np.polyfit(counts, attack, 1)
        return float(slope), float(intercept)

    @property
    def intercept(self) -> float:
        """The intercept as a share of the step with K = 10, or with the largest K."""
        reference = 10 if 10 in self.over_steps else max(self.over_steps)
        return abs(self.line[1]) / self.over_steps[reference]

    def table(self) -> str:
        """Returns the numbers."""
        slope, intercept = self.line
        lines = [
            f"{self.network}, {self.dtype}",
            f"attack: {1000 * slope:.1f} ms a step, {1000 * intercept:+.1f} ms at K = 0: "
            f"{self.intercept:.2%} of a step",
        ]
        for count, seconds in self.over_steps.items():
            first = self.first_step[count]
            lines.append(f"K = {count:>3}  {seconds:8.3f} s   first step {first:6.1f} s")
        for batch, seconds in self.over_batch.items():
            lines.append(f"batch {batch:>4}  {seconds:8.3f} s   {batch / seconds:8.1f} images/s")
        for steps, resident in self.memory:
            lines.append(f"after {steps:>5} steps  {resident / 1e6:8.0f} MB resident")
        for batches, resident in self.evaluated:
            lines.append(f"after {batches:>5} evaluated batches  {resident / 1e6:8.0f} MB resident")
        return "\n".join(lines)

    def to_dict(self) -> dict:
        """Plain data for the JSON file."""
        slope, intercept = self.line
        derived = {"slope": slope, "intercept": intercept, "intercept_share": self.intercept}
        return dataclasses.asdict(self) | derived


def measure(
    network: str,
    dtype: str,
    rounds: int,
    attack_steps: Sequence[int] = (1, 2, 5, 10, 20),
    batch_sizes: Sequence[int] = (16, 32, 64, 128),
    batch_size: int = 64,
    memory_steps: int = 1000,
) -> Growth:
    """Measures PGD-AT on one network.

    Args:
        network: a network for CIFAR-10's images.
        dtype: dtype policy.
        rounds: interleaved rounds.
        attack_steps: numbers K of attack steps; 0, training without attack, is added.
        batch_sizes: examples in a batch, at K = 10.
        batch_size: examples in a batch while K varies, and of those that are evaluated.
        memory_steps: training steps over which memory is watched; at K = 1, batch 16.
    """
    by_steps: dict[Any, Cell] = {0: Cell("standard", dtype, network, batch_size)}
    by_steps |= {
        count: Cell("pgd_at", dtype, network, batch_size, num_steps=count) for count in attack_steps
    }
    over_steps, first = _timed(by_steps, rounds)
    by_batch = {each: Cell("pgd_at", dtype, network, each) for each in batch_sizes}
    over_batch, _ = _timed(by_batch, rounds)
    memory = _memory_over(Cell("pgd_at", dtype, network, 16, num_steps=1), memory_steps)
    evaluated = _evaluated(by_steps[max(by_steps)])
    return Growth(network, dtype, over_steps, first, over_batch, memory, evaluated)


def _timed(cells: dict[Any, Cell], rounds: int) -> tuple[dict, dict]:
    """The best seconds of a step, and the seconds of the first, for each cell."""
    workers: dict[Any, Worker] = {}
    try:
        first = {}
        for key, cell in cells.items():
            workers[key] = Worker(OURS, cell)
            first[key] = workers[key].ask("first")["seconds"]
        best = dict.fromkeys(cells, math.inf)
        for _ in range(rounds):
            for key, worker in workers.items():
                best[key] = min(best[key], worker.ask("step"))
    finally:
        for worker in workers.values():
            worker.stop()
    return best, first


def _memory_over(cell: Cell, steps: int) -> list[tuple[int, int]]:
    """Steps done and resident bytes, looked at ten times."""
    found = []
    with Worker(OURS, cell) as worker:
        worker.ask("first")
        for look in range(1, _LOOKS + 1):
            for _ in range(steps // _LOOKS):
                worker.ask("step")
            found.append((look * (steps // _LOOKS), worker.ask("resident")))
    return found


def _evaluated(cell: Cell) -> list[tuple[int, int]]:
    with Worker(OURS, cell) as worker:
        worker.ask("first")
        return worker.ask("evaluated")


def draw(growth: Growth, path: pathlib.Path) -> None:
    """Draws the four pictures into one file."""
    from matplotlib.figure import Figure

    from he_keras.drawing import plain_axes, style
    from he_keras.files import replacing

    figure = Figure(figsize=(13.0, 3.4), layout="constrained")
    panels = figure.subplots(1, 4)
    counts = list(growth.over_steps)
    panels[0].plot(counts, list(growth.over_steps.values()), label="a step", **style(0))
    firsts = [growth.first_step[count] for count in counts]
    panels[0].plot(counts, firsts, label="the first step", **style(1))
    panels[0].set_xlabel("attack steps K")
    panels[0].set_ylabel("seconds")
    panels[0].legend(fontsize=8, frameon=False)
    batches = list(growth.over_batch)
    panels[1].plot(batches, list(growth.over_batch.values()), **style(0))
    panels[1].set_xlabel("examples in a batch (K = 10)")
    panels[1].set_ylabel("seconds of a step")
    done = {"training steps (K = 1, batch 16)": growth.memory}
    done["evaluated batches (PGD-2)"] = growth.evaluated
    for axes, (label, looks) in zip(panels[2:], done.items(), strict=True):
        reached, resident = zip(*looks, strict=True)
        axes.plot(reached, [each / 1e6 for each in resident], **style(0))
        axes.set_xlabel(label)
        axes.set_ylabel("resident memory in MB")
    for axes in panels:
        # A level line needs room above it: its own margins would follow its small range.
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
        axes.set_xlim(left=0)
        plain_axes(axes)
    figure.suptitle(f"PGD-AT on {growth.network}, {growth.dtype}", fontsize=10)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=130)
