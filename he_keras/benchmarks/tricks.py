"""What each trick of `he_keras.cpu` earns of a PGD-AT training step and of a PGD attack.

Everything runs in one process. There is one model with all tricks, one for each trick that is
turned off, and one without any. A second one with all is the control. By how much its ratio differs
from 1 is the error. In each round every model takes one step, in an order that moves on by one from
round to round. The best time of each model counts.
"""

import contextlib
import time
from collections.abc import Callable, Sequence

from he_keras.benchmarks.training import Cell
from he_keras.benchmarks.training_worker import KerasSide, example_batch

BATCH_SIZE = 32
NUM_STEPS = 10
#: Rounds end after so many seconds, building and tracing included, once there were two of them.
BUDGET_SECONDS = 300.0
_FEWEST_ROUNDS = 2
#: Tricks that the other dtype policies do not have.
_ONLY_FOR = {"bfloat16_relu": "mixed_bfloat16"}
ALL, AGAIN, NONE = "all tricks", "all, once more", "no trick"


def measure(network: str, dtypes: Sequence[str], rounds: int) -> str:
    """Measures, and returns a table for each dtype policy.

    Args:
        network: a name of `he_keras.networks.names()`.
        dtypes: dtype policies.
        rounds: interleaved rounds, fewer if the time is up.
    """
    cells = [Cell("pgd_at", dtype, network, BATCH_SIZE, num_steps=NUM_STEPS) for dtype in dtypes]
    budget = BUDGET_SECONDS / len(cells)
    return "\n".join(table(cell, measure_cell(cell, rounds, budget)) for cell in cells)


def measure_cell(cell: Cell, rounds: int, budget: float) -> dict[str, tuple[float, float]]:
    """Returns the best seconds of a training step and of an attack for each variant."""
    deadline = time.monotonic() + budget
    runs = {name: _prepared(cell, tricks) for name, tricks in variants(cell.dtype).items()}
    names, best = list(runs), dict.fromkeys(runs, (float("inf"), float("inf")))
    for turn in range(rounds):
        if turn >= _FEWEST_ROUNDS and time.monotonic() > deadline:
            break
        for place in range(len(names)):
            name = names[(turn + place) % len(names)]
            training, attack = (_seconds(run) for run in runs[name])
            best[name] = min(best[name][0], training), min(best[name][1], attack)
    return best


def variants(dtype: str) -> dict[str, tuple[str, ...]]:
    """Returns the tricks that each variant turns off.

    Example:
        >>> variants("float32")["no half_batches"]
        ('half_batches',)
    """
    from he_keras import cpu

    tricks = [name for name in cpu.TRICKS if _ONLY_FOR.get(name, dtype) == dtype]
    return {ALL: (), **{f"no {name}": (name,) for name in tricks}, NONE: (*cpu.TRICKS,), AGAIN: ()}


def _prepared(cell: Cell, tricks_off: tuple[str, ...]) -> tuple[Callable, Callable]:
    """Returns a training step and an attack, traced and run once."""
    from he_keras import cpu

    with cpu.disabled(*tricks_off) if tricks_off else contextlib.nullcontext():
        side = KerasSide(cell)
        side.first()
        attack = _attack(cell, side.model)
        attack()
    return side.step, attack


def _attack(cell: Cell, model) -> Callable:
    import tensorflow as tf

    import he_keras as he

    images, labels = map(tf.constant, example_batch(cell))
    threat, settings = he.ThreatModel("linf", cell.epsilon), {"stop_when_broken": False}
    attack = he.attacks.get(f"pgd-{cell.num_steps}", threat, random_start=False, **settings)
    seed = tf.constant([0, 0])
    crafted = tf.function(
        lambda: attack.perturb(he.attacks.Victim(model), images, labels, seed), autograph=False
    )
    return lambda: crafted().numpy()


def _seconds(run: Callable) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def table(cell: Cell, best: dict[str, tuple[float, float]]) -> str:
    """Returns a cell's table: seconds, and what of them the tricks that are missing would save."""
    lines = [
        f"{cell.network}, {cell.dtype}, batch {cell.batch_size}: best seconds, the trick's share",
        f"{'':<24}{'PGD-AT step':>12}{'earned':>9}{f'PGD-{cell.num_steps}':>12}{'earned':>9}",
    ]
    for name, seconds in best.items():
        shown = ""
        for own, reference in zip(seconds, best[ALL], strict=True):
            shown += f"{own:>12.3f}{1.0 - reference / own:>9.1%}"
        lines.append(f"{name:<24}{shown}")
    return "\n".join(lines)
