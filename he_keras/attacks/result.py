"""What attacks return: for one batch inside the graph, and for a whole call as NumPy arrays."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np


class Score(NamedTuple):
    """What one image's logits say about it; one entry per example in each tensor.

    Attributes:
        broken: the image is misclassified.
        margin: true logit minus the largest other one.
        finite: no logit is NaN or infinite.
    """

    broken: Any
    margin: Any
    finite: Any


class Crafted(NamedTuple):
    """What `Attack.run` returns for one batch.

    Attributes:
        x_adv: adversarial images; the framework projects them into the ball.
        forward_passes: int tensor `(n,)`, passes through the network for each example.
        backward_passes: int tensor `(n,)`, gradient passes for each example.
        distance: minimum-norm attacks only: length of the perturbation of `x_adv` where it was seen
            to be misclassified, infinity where none was found.
        score: of `x_adv`, by an attack that has seen its logits and has projected it itself; None
            has the framework project and score it, which costs a forward pass.
    """

    x_adv: Any
    forward_passes: Any
    backward_passes: Any
    distance: Any = None
    score: Score | None = None


@dataclasses.dataclass(frozen=True)
class AttackResult:
    """The outcome of an attack, one entry per example, as NumPy arrays.

    Attributes:
        x_adv: adversarial images, inside the ball and the bounds; the clean image where the example
            was misclassified from the start (and `stop_when_broken` is on).
        success: the model misclassifies `x_adv`.
        margin: true logit minus the largest other one at `x_adv`.
        forward_passes: forward passes spent, scoring included.
        backward_passes: input-gradient passes spent.
        non_finite: the model returned NaN or infinity for the clean or the adversarial image.
        distance: length of the perturbation in the threat model's norm. For minimum-norm attacks
            (FAB, DeepFool, C&W, RayS) that of `x_nearest`: it may exceed epsilon, and is infinite
            where no adversarial image was found.
        x_nearest: for minimum-norm attacks the nearest adversarial image found, whatever epsilon
            (the clean image where there is none); for all others `x_adv`.
    """

    x_adv: np.ndarray
    success: np.ndarray
    margin: np.ndarray
    forward_passes: np.ndarray
    backward_passes: np.ndarray
    non_finite: np.ndarray
    distance: np.ndarray
    x_nearest: np.ndarray

    @property
    def robust_accuracy(self) -> float:
        """Share of all examples that are still classified correctly."""
        return float(1.0 - self.success.mean())


_FIELDS = tuple(field.name for field in dataclasses.fields(AttackResult))
_COUNTS = ("forward_passes", "backward_passes")


def concatenate(parts: list[AttackResult]) -> AttackResult:
    """Joins the results of consecutive batches."""
    columns: dict[str, np.ndarray] = {}
    shares_images = all(part.x_nearest is part.x_adv for part in parts)
    for name in _FIELDS:
        if name == "x_nearest" and shares_images:
            columns[name] = columns["x_adv"]
        else:
            columns[name] = np.concatenate([getattr(part, name) for part in parts])
    return AttackResult(**columns)


def copied(result: AttackResult) -> AttackResult:
    """A copy whose arrays may be written to."""
    columns = {name: np.array(getattr(result, name)) for name in _FIELDS}
    if result.x_nearest is result.x_adv:
        columns["x_nearest"] = columns["x_adv"]
    return AttackResult(**columns)


def merge(best: AttackResult, again: AttackResult, rows: np.ndarray, by_distance: bool) -> None:
    """Takes over into `best`, for each of `rows`, what `again` did better; adds up the passes.

    Better is: misclassified; else, or among equals, the smaller margin (or distance).
    """
    measure = "distance" if by_distance else "margin"
    earlier = getattr(best, measure)[rows]
    broke, had_broken = again.success, best.success[rows]
    nearer = (broke == had_broken) & (getattr(again, measure) < earlier)
    better = nearer | (broke & ~had_broken)
    for name in _FIELDS:
        if name in _COUNTS:
            getattr(best, name)[rows] += getattr(again, name)
        elif not (name == "x_nearest" and best.x_nearest is best.x_adv):
            getattr(best, name)[rows[better]] = getattr(again, name)[better]
