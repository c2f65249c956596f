"""What HE and m-HE add to a training step, measured in one process.

Two processes of the same program differ by 2 to 4 % on a shared machine, more than a head can cost.
Here all models share one process and its threads. In each round every model takes one step, in an
order that moves on by one from round to round. The times of the same round are divided. A second
model with the linear head is the control. By how much its ratio differs from 1 is the error.
"""

import statistics
from collections.abc import Sequence

#: Models of one round: the first is what the others are divided by.
HEADS = ("linear", "linear again", "HE", "m-HE")
_TOOLS = ("he_keras-linear", "he_keras-linear", "he_keras", "he_keras-arc")


def measure(cells: Sequence, rounds: int) -> str:
    """Measures the cells, see `training.Cell`, and returns the table.

    Args:
        cells: what to train.
        rounds: interleaved rounds; the median of their ratios counts.
    """
    lines = [header(rounds)]
    print(lines[0], flush=True)
    for cell in cells:
        lines.append(line(cell, measure_cell(cell, rounds)))
        print(lines[-1], flush=True)
    return "\n".join(lines)


def measure_cell(cell, rounds: int) -> dict[str, list[float]]:
    """Returns each model's seconds, round by round."""
    from he_keras.benchmarks.training_worker import KerasSide

    sides = [KerasSide(cell, tool) for tool in _TOOLS]
    for side in sides:
        side.first()
        side.step()
    seconds: dict[str, list[float]] = {name: [] for name in HEADS}
    for turn in range(rounds):
        for place in range(len(HEADS)):
            index = (turn + place) % len(HEADS)
            seconds[HEADS[index]].append(sides[index].step())
    return seconds


def ratio(seconds: Sequence[float], reference: Sequence[float]) -> tuple[float, float, float]:
    """Returns the median of the rounds' ratios, and the ends of its 95 % interval.

    The interval holds for any distribution. The median lies between the k-th and the k-th last of n
    ratios, but for two tails of a fair coin thrown n times.

    Example:
        >>> ratio([2.0] * 10, [1.0] * 10)
        (2.0, 2.0, 2.0)
    """
    ratios = sorted(one / other for one, other in zip(seconds, reference, strict=True))
    # The normal approximation of that binomial distribution.
    rank = max(0, int(len(ratios) / 2 - 0.98 * len(ratios) ** 0.5))
    return statistics.median(ratios), ratios[rank], ratios[-1 - rank]


def header(rounds: int) -> str:
    """Returns the first lines of the table."""
    columns = "".join(f"{name:>24}" for name in HEADS[1:])
    return (
        f"median of {rounds} rounds in one process, over the linear head's step; 95 % interval\n"
        f"{'network':<20}{'dtype':<16}{'batch':>6} {'objective':<9}{'linear s':>9}{columns}"
    )


def line(cell, seconds: dict[str, list[float]]) -> str:
    """Returns a cell's line."""
    reference = seconds[HEADS[0]]
    shown = ""
    for name in HEADS[1:]:
        median, lowest, highest = ratio(seconds[name], reference)
        shown += f"{f'{median:.3f} ({lowest:.3f} to {highest:.3f})':>24}"
    return (
        f"{cell.network:<20}{cell.dtype:<16}{cell.batch_size:>6} {cell.objective:<9}"
        f"{statistics.median(reference):>9.3f}{shown}"
    )
