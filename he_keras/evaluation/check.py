"""What a check of a model or of an evaluation says, and the statistics that checks share."""

import dataclasses
import math

WHEN = ("before", "after")
VERDICTS = ("pass", "warn", "fail", "skipped")
_CHANCE_LEVEL = 0.05


@dataclasses.dataclass(frozen=True)
class Check:
    """The outcome of one check; `docs/evaluation.md` has a section for each name.

    Attributes:
        name: kebab-case, and the anchor of its section.
        when: "before" or "after" the attacks.
        verdict: "pass"; "warn": look at it before you believe the figures; "fail": the figures are
            not to be believed; "skipped": it does not apply, or could not be decided.
        figure: the number that was measured, as text.
        message: what it means and what to do, in one sentence.

    Example:
        >>> from he_keras.evaluation.check import Check
        >>> Check("logits", "before", "pass", "values -3 to 9", "No probabilities.").fired
        False
    """

    name: str
    when: str
    verdict: str
    figure: str
    message: str

    def __post_init__(self) -> None:
        if self.when not in WHEN:
            raise ValueError(f"Invalid when; expected one of {WHEN}; received when={self.when!r}")
        if self.verdict not in VERDICTS:
            raise ValueError(
                f"Invalid verdict; expected one of {VERDICTS}; received verdict={self.verdict!r}"
            )

    @property
    def fired(self) -> bool:
        """Whether the check found something: its verdict is "warn" or "fail"."""
        return self.verdict in ("warn", "fail")


def chance_of_at_least(count: int, total: int, share: float) -> float:
    """Returns the probability of `count` or more events in `total` trials of probability `share`.

    Example:
        >>> from he_keras.evaluation.check import chance_of_at_least
        >>> chance_of_at_least(2, 2, 0.5)
        0.25
    """
    if count <= 0:
        return 1.0
    if count > total or share <= 0.0:
        return 0.0
    if share >= 1.0:
        return 1.0
    return min(1.0, sum(_chance_of(events, total, share) for events in range(count, total + 1)))


def exceeds(count: int, total: int, share: float) -> bool:
    """Whether `count` of `total` is more than `share`, by more than chance explains (5 %).

    So a threshold of half a percent needs two examples out of 64, not one: single examples flip
    for no reason.

    Example:
        >>> from he_keras.evaluation.check import exceeds
        >>> exceeds(1, 64, 0.005), exceeds(2, 64, 0.005)
        (False, True)
    """
    too_many = count > share * total
    return too_many and chance_of_at_least(count, total, share) < _CHANCE_LEVEL


def _chance_of(events: int, total: int, share: float) -> float:
    ways = math.lgamma(total + 1) - math.lgamma(events + 1) - math.lgamma(total - events + 1)
    return math.exp(ways + events * math.log(share) + (total - events) * math.log1p(-share))
