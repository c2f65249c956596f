"""What a check of a model or of an evaluation says, and how counts become a verdict."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from he_keras.arguments import check_choice
from he_keras.evaluation.statistics import (
    CHANCE_LEVEL,
    Pair,
    exceeds,
    fewest_beyond,
    fewest_gains,
    resolution,
)

WHEN = ("before", "after")
VERDICTS = ("pass", "warn", "fail", "skipped")
#: From this share on, a finding is no longer in doubt.
_SEVERE = 0.05


@dataclasses.dataclass(frozen=True)
class Check:
    """The outcome of one check; `docs/reference/checks.md` has a section for each name.

    Attributes:
        name: kebab-case, and the anchor of its section.
        when: "before" or "after" the attacks.
        verdict: "pass"; "warn": look at it before you believe the figures; "fail": the figures are
            not to be believed; "skipped": it does not apply, or could not be decided.
        figure: the number that was measured, as text.
        message: what it means and what to do, in one sentence.
        resolution: what so many images cannot show; empty where nothing is left to chance.

    Example:
        >>> from he_keras.evaluation.checks.check import Check
        >>> Check("logits", "before", "pass", "values -3 to 9", "No probabilities.").fired
        False
    """

    name: str
    when: str
    verdict: str
    figure: str
    message: str
    resolution: str = ""

    def __post_init__(self) -> None:
        check_choice("when", self.when, WHEN)
        check_choice("verdict", self.verdict, VERDICTS)

    @property
    def fired(self) -> bool:
        """Whether the check found something: its verdict is "warn" or "fail"."""
        return self.verdict in ("warn", "fail")


class Outcome(NamedTuple):
    """A `Check` without name and time, which its row in the table of checks adds."""

    verdict: str
    figure: str
    message: str
    resolution: str = ""

    @property
    def fired(self) -> bool:
        """Whether something was found."""
        return self.verdict in ("warn", "fail")


def passed(figure: str, message: str, resolution: str = "") -> Outcome:
    """Returns an outcome in which nothing is wrong."""
    return Outcome("pass", figure, message, resolution)


def warned(figure: str, message: str, resolution: str = "") -> Outcome:
    """Returns an outcome to look at before the figures are believed."""
    return Outcome("warn", figure, message, resolution)


def failed(figure: str, message: str, resolution: str = "") -> Outcome:
    """Returns an outcome after which the figures are not to be believed."""
    return Outcome("fail", figure, message, resolution)


def skipped(reason: str) -> Outcome:
    """Returns the outcome of a check that could not be made."""
    return Outcome("skipped", "not measured", reason)


class Wording(NamedTuple):
    """What a check measured, and what that means if it passes or does not."""

    figure: str
    good: str
    bad: str


def surplus_outcome(count: int, at_stake: int, total: int, share: float, words: Wording) -> Outcome:
    """Passes unless `count` examples are more than `share` of all, beyond chance.

    Args:
        count: examples that speak against the evaluation; none can speak for it.
        at_stake: how many could have.
        total: how many examples there are.
        share: of all, that does not matter.
        words: what to say.
    """
    needed = fewest_beyond(total, share)
    if at_stake < needed:
        return skipped(_too_few(at_stake, total, needed))
    return _outcome(lambda share: exceeds(count, total, share), share, words, needed, total)


def paired_outcome(pairs: Sequence[Pair], at_stake: int, share: float, words: Wording) -> Outcome:
    """Passes unless one of several attacks is stronger than the first, beyond chance.

    Examples that only the other attack breaks are weighed against those that only the first one
    breaks. The more attacks are tried, the more each has to show (Bonferroni).

    Args:
        pairs: the first attack against each other one.
        at_stake: how many examples the first one left.
        share: of all, that does not matter.
        words: what to say.
    """
    level, total = CHANCE_LEVEL / len(pairs), pairs[0].total
    needed = fewest_gains(total, share, level)
    if at_stake < needed:
        return skipped(_too_few(at_stake, total, needed))

    def is_beyond(share: float) -> bool:
        return any(pair.exceeds(share, level) for pair in pairs)

    return _outcome(is_beyond, share, words, needed, total)


def _outcome(
    is_beyond: Callable[[float], bool], share: float, words: Wording, needed: int, total: int
) -> Outcome:
    limit = resolution(needed, total, "a gain")
    if not is_beyond(share):
        return passed(words.figure, words.good, limit)
    verdict = "fail" if is_beyond(max(share, _SEVERE)) else "warn"
    return Outcome(verdict, words.figure, words.bad, limit)


def _too_few(at_stake: int, total: int, needed: int) -> str:
    return (
        f"Only {at_stake} of {total} examples were left to be found, and fewer than {needed} "
        "cannot be told from nothing."
    )


def points(count: int, total: int) -> str:
    """Text of a number of examples as percentage points.

    Example:
        >>> from he_keras.evaluation.checks.check import points
        >>> points(2, 64)
        '+3.1 points (2 of 64)'
    """
    return f"{100.0 * count / total:+.1f} points ({count} of {total})"
