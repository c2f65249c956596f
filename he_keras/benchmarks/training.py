"""Training steps of he_keras and of PyTorch: same network, weights, batch and mathematics.

Every tool runs in a process of its own. Rounds are interleaved: one step of each tool, again and
again. The best time of each counts. The first step of each is compared before anything is timed:
its loss, and the logits after the update. The table has more than the ratio. It has images per
second, and floating-point operations per second of the convolutions alone, counted from their
shapes. It gives these as a share of a matrix product of the same dtype in the same run. It also
gives them as a share of what the convolutions take alone. It also has the seconds to the first
step, and peak memory.
"""

import dataclasses
import math
import os
import pathlib
import statistics
from collections.abc import Iterable, Sequence

import numpy as np

from he_keras.benchmarks.training_worker import Worker

OBJECTIVES = ("pgd_at", "trades", "free_at", "fast_at")
DTYPES = ("float32", "mixed_bfloat16")
OURS = "he_keras"
WITH_ARC = "he_keras-arc"
WITHOUT_HEAD = "he_keras-linear"
BOUND = "convolutions"
#: Relative difference of losses and logits that rounding explains (signs of gradients near zero).
TOLERANCE = {"float32": 2e-2, "mixed_bfloat16": 2e-1}
#: FreeAT feeds the signs into its next update. After four, PyTorch's own two layouts differ by 0.04
#: in float32 and by 0.09 in bfloat16. After one, they differ by less than 0.001 and by 0.02.
LOGIT_TOLERANCE_AFTER_REPLAYS = 0.25


@dataclasses.dataclass(frozen=True)
class Cell:
    """One line of the table."""

    objective: str
    dtype: str
    network: str
    batch_size: int
    num_steps: int = 10
    num_replays: int = 4
    epsilon: float = 8 / 255
    beta: float = 6.0
    threads: int = dataclasses.field(default_factory=lambda: os.cpu_count() or 1)
    optimizer: dict = dataclasses.field(
        default_factory=lambda: {"lr": 0.01, "momentum": 0.9, "weight_decay": 5e-4}
    )

    @property
    def step_size(self) -> float:
        """Step of the adversary."""
        return {"free_at": 1.0, "fast_at": 1.25}.get(self.objective, 0.25) * self.epsilon

    @property
    def objective_settings(self) -> dict:
        """Keywords of the objective in he_keras."""
        if self.objective == "standard":
            return {}
        if self.objective == "free_at":
            return {"num_replays": self.num_replays, "step_size": self.step_size}
        if self.objective == "fast_at":
            return {"initialization": "zero", "step_size": self.step_size}
        start = "gaussian" if self.objective == "trades" else False
        settings = {"num_steps": self.num_steps, "step_size": self.step_size, "random_start": start}
        return settings | ({"beta": self.beta} if self.objective == "trades" else {})


@dataclasses.dataclass
class Result:
    """What was measured in one cell; seconds are the best of all rounds."""

    cell: Cell
    seconds: dict[str, float]
    first_step: dict[str, float]
    peak_memory: dict[str, int]
    multiply_accumulates: int
    peak_flops: float
    loss_difference: float
    logit_difference: float

    @property
    def best_peer(self) -> str:
        """The fastest PyTorch variant."""
        peers = [tool for tool in self.seconds if tool.startswith("torch:")]
        return min(peers, key=self.seconds.__getitem__) if peers else ""

    @property
    def ratio(self) -> float:
        """Seconds of the fastest PyTorch variant over ours; above 1 we are faster."""
        return self.seconds[self.best_peer] / self.seconds[OURS] if self.best_peer else math.nan

    @property
    def head_cost(self) -> float:
        """Seconds with HE over those with a linear head."""
        without = self.seconds.get(WITHOUT_HEAD)
        return self.seconds[OURS] / without if without else math.nan

    @property
    def arc_cost(self) -> float:
        """Seconds with m-HE over those with a linear head."""
        timed = self.seconds
        return timed.get(WITH_ARC, math.nan) / timed.get(WITHOUT_HEAD, math.nan)

    @property
    def share_of_bound(self) -> float:
        """Seconds of the convolutions alone over ours."""
        return self.seconds[BOUND] / self.seconds[OURS] if BOUND in self.seconds else math.nan

    @property
    def flops(self) -> float:
        """Operations of the convolutions per second of our step."""
        return 2 * self.multiply_accumulates * self.cell.batch_size / self.seconds[OURS]

    def to_dict(self) -> dict:
        """Plain data for the JSON file."""
        derived = ("best_peer", "ratio", "head_cost", "arc_cost", "share_of_bound", "flops")
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in derived}


def cells(
    objectives: Iterable[str],
    dtypes: Iterable[str],
    networks: Iterable[str],
    batch_sizes: Iterable[int],
    **settings,
) -> list[Cell]:
    """Returns all combinations."""
    return [
        Cell(objective, dtype, network, batch_size, **settings)
        for network in networks
        for dtype in dtypes
        for batch_size in batch_sizes
        for objective in objectives
    ]


def measure(wanted: Sequence[Cell], tools: Sequence[str], rounds: int, output=None) -> str:
    """Measures the cells, prints each line as it comes, and returns the table.

    Args:
        wanted: the cells.
        tools: "he_keras" and what it is compared with.
        rounds: interleaved rounds.
        output: JSON file to write, or None.
    """
    results, lines = [], [header(rounds)]
    print(lines[0], flush=True)
    for cell in wanted:
        results.append(measure_cell(cell, tools, rounds))
        lines.append(line(results[-1]))
        print(lines[-1], flush=True)
        if output:
            _write(pathlib.Path(output), results)
    lines.append(summary(results))
    return "\n".join(lines)


def measure_cell(cell: Cell, tools: Sequence[str], rounds: int) -> Result:
    """Runs one cell; the first of the tools is he_keras itself."""
    workers: list[Worker] = []
    try:
        # One after the other: the first step of each is timed on an otherwise idle machine.
        first, given = {}, None
        for tool in tools:
            if tool.startswith("torch:") and given is None:
                given = workers[0].ask("network")
            workers.append(Worker(tool, cell, given))
            first[tool] = workers[-1].ask("first")
        loss_difference, logit_difference = _checked(cell, first)
        seconds = dict.fromkeys(tools, math.inf)
        for _ in range(rounds):
            for worker in workers:
                seconds[worker.tool] = min(seconds[worker.tool], worker.ask("step"))
        memory = {worker.tool: worker.ask("memory") for worker in workers}
    finally:
        for worker in workers:
            worker.stop()
    bound = first.get(BOUND, {})
    return Result(
        cell,
        seconds,
        {tool: each["seconds"] for tool, each in first.items() if "seconds" in each},
        memory,
        bound.get("multiply_accumulates", 0),
        bound.get("peak", math.nan),
        loss_difference,
        logit_difference,
    )


def _checked(cell: Cell, first: dict) -> tuple[float, float]:
    """The same first step everywhere: relative differences of the loss and of the logits after."""
    ours, loss, logit = first[OURS], 0.0, 0.0
    for tool, theirs in first.items():
        if not tool.startswith("torch:"):
            continue
        loss = max(loss, abs(theirs["loss"] / ours["loss"] - 1.0))
        scale = np.abs(ours["logits"]).max()
        logit = max(logit, float(np.abs(theirs["logits"] - ours["logits"]).max() / scale))
    tolerance = TOLERANCE[cell.dtype]
    is_replayed = cell.objective == "free_at" and cell.num_replays > 1
    logit_tolerance = LOGIT_TOLERANCE_AFTER_REPLAYS if is_replayed else tolerance
    if not (loss <= tolerance and logit <= logit_tolerance):
        raise RuntimeError(
            f"The tools do not do the same work in {cell}; expected the losses of the first step "
            f"within {tolerance} and the logits after it within {logit_tolerance}; received "
            f"differences of {loss:.2g} and {logit:.2g}"
        )
    return loss, logit


def header(rounds: int) -> str:
    """Returns the first lines of the table."""
    return (
        f"best of {rounds} interleaved rounds; ratio: seconds of the fastest PyTorch variant over "
        "ours\n"
        f"{'network':<20}{'dtype':<16}{'batch':>6} {'objective':<9}{'step s':>8}{'img/s':>8}"
        f"{'GFLOP/s':>9}{'of peak':>8}{'of bound':>9}{'HE':>7}{'m-HE':>7}{'torch s':>9} "
        f"{'variant':<22}{'ratio':>6}{'first s':>8}{'torch':>7}{'MB':>7}{'torch':>7}"
        f"{'d loss':>9}{'d logit':>9}"
    )


def line(result: Result) -> str:
    """Returns a cell's line."""
    cell, peer = result.cell, result.best_peer
    theirs = result.seconds.get(peer, math.nan)
    ours = result.seconds[OURS]
    return (
        f"{cell.network:<20}{cell.dtype:<16}{cell.batch_size:>6} {cell.objective:<9}{ours:>8.3f}"
        f"{cell.batch_size / ours:>8.1f}{result.flops / 1e9:>9.0f}"
        f"{result.flops / result.peak_flops:>8.2f}{result.share_of_bound:>9.3f}"
        f"{result.head_cost:>7.3f}{result.arc_cost:>7.3f}{theirs:>9.3f} "
        f"{peer.removeprefix('torch:'):<22}{result.ratio:>6.2f}{result.first_step[OURS]:>8.1f}"
        f"{result.first_step.get(peer, math.nan):>7.1f}{result.peak_memory[OURS] / 1e6:>7.0f}"
        f"{result.peak_memory.get(peer, math.nan) / 1e6:>7.0f}{result.loss_difference:>9.1e}"
        f"{result.logit_difference:>9.1e}"
    )


def summary(results: Sequence[Result]) -> str:
    """Returns geometric means of the ratios, by objective."""
    means = []
    for objective in dict.fromkeys(result.cell.objective for result in results):
        ratios = [each.ratio for each in results if each.cell.objective == objective]
        if all(ratio > 0 for ratio in ratios):
            mean = statistics.geometric_mean(ratios)
            means.append(f"{objective} {mean:.3f} (lowest {min(ratios):.3f})")
    return "geometric mean of the ratios: " + ("; ".join(means) or "no peer measured")


def _write(path: pathlib.Path, results: Sequence[Result]) -> None:
    from he_keras.environment import environment
    from he_keras.files import write_json

    cells_of_table = [result.to_dict() for result in results]
    write_json(path, {"environment": environment(), "cells": cells_of_table})
