"""Has anything become much slower? Ratios of this machine's run are compared with stored ones.

Seconds differ from machine to machine. Ratios of interleaved runs in one process group hardly do.
They are our step over the convolutions alone, a step with HE over one without, and, where PyTorch
is installed, its step over ours. A ratio that is worse than the stored one by more than the
tolerance is a regression.
"""

import json
import math
import pathlib
from collections.abc import Mapping, Sequence

from he_keras.benchmarks import training

STORED = pathlib.Path(__file__).with_name("stored_ratios.json")
#: Chosen: wider than what two runs on a shared machine differ by.
TOLERANCE = 0.3
_QUICK = (("pgd_at", "float32"), ("free_at", "mixed_bfloat16"))
_TOOLS = (training.OURS, training.WITHOUT_HEAD, training.BOUND)
#: What a larger value of a ratio means.
_BETTER = {"share_of_bound": True, "head_cost": False, "over_torch": True}


def measure(is_quick: bool, peers: Sequence[str], rounds: int) -> dict[str, float]:
    """Measures the ratios; cells that seem slower are measured a second time.

    Args:
        is_quick: two cells of a small network instead of eight of PreActResNet-18.
        peers: PyTorch variants to compare with, where it is installed.
        rounds: interleaved rounds.
    """
    if is_quick:
        wanted = [training.Cell(name, dtype, "preact-resnet-small", 64) for name, dtype in _QUICK]
    else:
        wanted = training.cells(training.OBJECTIVES, training.DTYPES, ["preact-resnet-18"], [64])
    stored = stored_ratios() if STORED.exists() else {}
    print(training.header(rounds), flush=True)
    ratios: dict[str, float] = {}
    for cell in wanted:
        found = _ratios(cell, peers, rounds)
        if regressions(found, stored):
            # Another process may have disturbed one side. It will not do so twice.
            found = better(found, _ratios(cell, peers, rounds))
        ratios |= found
    return ratios


def _ratios(cell: training.Cell, peers: Sequence[str], rounds: int) -> dict[str, float]:
    result = training.measure_cell(cell, [*_TOOLS, *peers], rounds)
    print(training.line(result), flush=True)
    name = f"{cell.network} {cell.objective} {cell.dtype}"
    ratios = {
        f"{name} share_of_bound": result.share_of_bound,
        f"{name} head_cost": result.head_cost,
    }
    return ratios | ({f"{name} over_torch": result.ratio} if peers else {})


def better(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    """Returns the better value of each ratio.

    Example:
        >>> better({"net pgd_at float32 head_cost": 1.5}, {"net pgd_at float32 head_cost": 1.1})
        {'net pgd_at float32 head_cost': 1.1}
    """
    return {
        name: max(value, second[name]) if _is_better_when_large(name) else min(value, second[name])
        for name, value in first.items()
    }


def regressions(ratios: Mapping[str, float], stored: Mapping[str, float]) -> list[str]:
    """Returns a line for each ratio that is worse than the stored one by more than the tolerance.

    Example:
        >>> regressions({"net pgd_at float32 head_cost": 1.5}, {"net pgd_at float32 head_cost": 1})
        ['net pgd_at float32 head_cost: 1.500, stored 1.000']
    """
    worse = []
    for name, value in ratios.items():
        if name not in stored:
            continue
        factor = value / stored[name]
        if not math.isfinite(factor) or _loss(name, factor) > TOLERANCE:
            worse.append(f"{name}: {value:.3f}, stored {stored[name]:.3f}")
    return worse


def _loss(name: str, factor: float) -> float:
    return (1.0 / factor if _is_better_when_large(name) else factor) - 1.0


def _is_better_when_large(name: str) -> bool:
    return _BETTER[name.rsplit(" ", 1)[1]]


def stored_ratios() -> dict[str, float]:
    """Returns the ratios that were stored."""
    return json.loads(STORED.read_text(encoding="utf-8"))["ratios"]


def store(ratios: Mapping[str, float]) -> None:
    """Makes these the stored ratios; those of other cells stay."""
    from he_keras.environment import environment
    from he_keras.files import write_json

    kept = stored_ratios() if STORED.exists() else {}
    rounded = {name: round(value, 4) for name, value in ratios.items()}
    write_json(STORED, {"environment": environment(), "ratios": {**kept, **rounded}})
