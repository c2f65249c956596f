"""What a sample can say: intervals, tests of counts and means, resolutions.

Two models are compared by two-sided tests: McNemar's for examples, Student's t for seeds.

Every test of a check is one-sided. Where nothing is the matter, it fires in at most 5 % of the
samples. Its resolution is the smallest true effect that it finds in four of five samples. Counts of
images that one attack breaks and another does not are compared by the sign test (McNemar 1947,
exact). Shares are compared by the binomial distribution, and means by Student's t. SciPy computes
all of them.
"""

import functools
import math
from typing import NamedTuple

import numpy as np

#: The usual ones: a sound model warns in at most 5 % of samples, and a fault is seen in 80 %.
CHANCE_LEVEL = 0.05
POWER = 0.8
#: Fewer values say nothing about a mean.
FEWEST_VALUES = 5
# Shares that differ by less are equal.
_ROUNDING = 1e-9


def share_of(part: float, num_examples: int) -> float:
    """Returns a part as a share; NaN if there are no examples, as in an empty shard.

    Example:
        >>> from he_keras.evaluation.statistics import share_of
        >>> share_of(3, 4)
        0.75
    """
    return part / num_examples if num_examples else math.nan


def wilson_interval(num_correct: int, num_examples: int) -> tuple[float, float]:
    """Returns the 95 % interval of a share (Wilson 1927), which stays within 0 and 1.

    It treats the examples as a random sample of images. It says nothing about other seeds or
    trainings.

    Example:
        >>> from he_keras.evaluation.statistics import wilson_interval
        >>> [round(end, 4) for end in wilson_interval(90, 100)]
        [0.8256, 0.9448]
    """
    from scipy import stats

    if not num_examples:
        return 0.0, 1.0
    found = stats.binomtest(num_correct, num_examples).proportion_ci(0.95, method="wilson")
    return float(found.low), float(found.high)


def mcnemar_p_value(only_first: int, only_second: int) -> float:
    """McNemar's exact two-sided p-value: is so uneven a split of the disagreements chance?

    Args:
        only_first: examples that only the first model classifies correctly.
        only_second: examples that only the second one does.

    Example:
        >>> from he_keras.evaluation.statistics import mcnemar_p_value
        >>> mcnemar_p_value(0, 5), mcnemar_p_value(3, 3)
        (0.0625, 1.0)
    """
    from scipy import stats

    disagreements = only_first + only_second
    return float(stats.binomtest(only_first, disagreements).pvalue) if disagreements else 1.0


def mcnemar_interval(only_first: int, only_second: int, num_examples: int) -> tuple[float, float]:
    """Returns the 95 % interval of the difference of two accuracies on the same examples.

    The difference is the share of disagreements, times how unevenly they split. The interval takes
    the exact ones of both (Clopper & Pearson 1934), and of these the ends that lie furthest apart.
    It leaves out 0 exactly where McNemar's test gives p < 0.05.

    Example:
        >>> from he_keras.evaluation.statistics import mcnemar_interval
        >>> [round(end, 3) for end in mcnemar_interval(30, 10, 1000)]
        [0.005, 0.04]
    """
    from scipy import stats

    if not num_examples:
        return -1.0, 1.0
    disagreements = only_first + only_second
    share = stats.binomtest(disagreements, num_examples).proportion_ci(0.95, method="exact")
    low, high = 0.0, 1.0
    if disagreements:
        low, high = stats.binomtest(only_first, disagreements).proportion_ci(0.95, method="exact")
    tilts = 2 * low - 1, 2 * high - 1
    return (
        float(tilts[0] * (share.high if tilts[0] < 0 else share.low)),
        float(tilts[1] * (share.high if tilts[1] > 0 else share.low)),
    )


class MeanDifference(NamedTuple):
    """What several seeds say about the difference of two accuracies.

    Attributes:
        mean: of the differences, one for each seed.
        standard_deviation: of the differences, with n - 1.
        interval: the 95 % interval of the mean (Student 1908); None if all differences are equal.
        p_value: Student's two-sided p-value; None if all differences are equal.
    """

    mean: float
    standard_deviation: float
    interval: tuple[float, float] | None
    p_value: float | None

    @classmethod
    def of(cls, differences) -> "MeanDifference":
        """Returns it for two or more differences.

        Example:
            >>> from he_keras.evaluation.statistics import MeanDifference
            >>> found = MeanDifference.of([0.02, 0.05, 0.05])
            >>> round(found.mean, 3), [round(end, 3) for end in found.interval]
            (0.04, [-0.003, 0.083])
        """
        from scipy import stats

        values = np.asarray(differences, np.float64)
        mean, deviation = float(values.mean()), float(values.std(ddof=1))
        # Without any spread, Student's t knows no chance: it would be certain after two seeds.
        if np.ptp(values) < _ROUNDING:
            return cls(mean, deviation, None, None)
        test = stats.ttest_1samp(values, 0.0)
        low, high = test.confidence_interval(0.95)
        return cls(mean, deviation, (float(low), float(high)), float(test.pvalue))


@functools.lru_cache(maxsize=4096)
def chance_of_at_least(count: int, total: int, share: float) -> float:
    """Returns the probability of `count` or more events in `total` trials of probability `share`.

    Example:
        >>> chance_of_at_least(2, 2, 0.5)
        0.25
    """
    from scipy import stats

    return float(stats.binom.sf(count - 1, total, share))


@functools.lru_cache(maxsize=1024)
def fewest_beyond(total: int, share: float, level: float = CHANCE_LEVEL) -> int:
    """Returns the smallest count of `total` that shows more than `share`, at a level.

    It is `total + 1` if no count does.

    Example:
        >>> fewest_beyond(64, 0.005), fewest_beyond(1000, 0.005), fewest_beyond(2, 0.5)
        (2, 10, 3)
    """
    from scipy import stats

    fewest = max(int(stats.binom.isf(level, total, share)), math.floor(share * total)) + 1
    # The quantile may have exactly the level's probability, which is not below the level.
    return fewest if chance_of_at_least(fewest, total, share) < level else fewest + 1


def exceeds(count: int, total: int, share: float, level: float = CHANCE_LEVEL) -> bool:
    """Whether `count` of `total` shows more than `share`, beyond what chance explains.

    So a threshold of half a percent needs two examples out of 64, not one, because a single example
    may flip for no reason.

    Example:
        >>> exceeds(1, 64, 0.005), exceeds(2, 64, 0.005)
        (False, True)
    """
    return count >= fewest_beyond(total, share, level)


class Pair(NamedTuple):
    """Counts of the examples on which two attacks, or two readings, disagree.

    Attributes:
        gains: how many only the second one finds.
        losses: how many only the first one finds.
        total: how many were looked at.
    """

    gains: int
    losses: int
    total: int

    @classmethod
    def of(cls, first: np.ndarray, second: np.ndarray) -> "Pair":
        """Counts two masks over the same examples.

        Example:
            >>> Pair.of(np.array([True, True, False]), np.array([True, False, True]))
            Pair(gains=1, losses=1, total=3)
        """
        return cls(int((second & ~first).sum()), int((first & ~second).sum()), len(first))

    @property
    def chance(self) -> float:
        """How often two equal attacks would differ so much in this direction (exact sign test)."""
        return chance_of_at_least(self.gains, self.gains + self.losses, 0.5)

    def exceeds(self, share: float, level: float = CHANCE_LEVEL) -> bool:
        """Whether the second one finds more, and more than `share` that the first one misses.

        Example:
            >>> Pair(5, 0, 64).exceeds(0.01), Pair(5, 1, 64).exceeds(0.01)
            (True, False)
        """
        return self.chance < level and exceeds(self.gains, self.total, share, level)


def fewest_gains(total: int, share: float, level: float = CHANCE_LEVEL) -> int:
    """Returns how many gains a `Pair` without losses needs to exceed `share`.

    Example:
        >>> fewest_gains(64, 0.01)
        5
    """
    return max(fewest_beyond(total, share, level), math.floor(-math.log2(level)) + 1)


@functools.lru_cache(maxsize=1024)
def found_share(count: int, total: int) -> float | None:
    """Returns the smallest true share that shows `count` of `total` images in four of five samples.

    It is None if there are fewer than `count` images.

    Example:
        >>> round(found_share(2, 64), 3), round(found_share(1, 64), 3)
        (0.046, 0.025)
    """
    from scipy import stats

    if count > total:
        return None
    # As a function of the share, the binomial tail is the distribution function of a beta variable.
    return float(stats.beta.ppf(POWER, count, total - count + 1))


def mean_exceeds(values: np.ndarray, limit: float, level: float = CHANCE_LEVEL) -> bool:
    """Whether the mean of the population that the values come from exceeds a limit (Student's t).

    Example:
        >>> mean_exceeds(np.array([0.9, 1.1, 1.0, 1.2, 1.1]), 0.5)
        True
        >>> mean_exceeds(np.array([0.0, 0.0, 0.0, 0.0, 6.0]), 0.5)
        False
    """
    from scipy import stats

    values = np.asarray(values, np.float64)
    # `ttest_1samp` decides alike, but it warns if all values are equal.
    quantile = stats.t.ppf(1.0 - level, len(values) - 1)
    return bool(values.mean() - quantile * stats.sem(values) > limit)


def found_excess(values: np.ndarray, level: float = CHANCE_LEVEL) -> float:
    """Returns how far above a limit a mean must lie to be found, given the spread of the values."""
    from scipy import stats

    values = np.asarray(values, np.float64)
    quantiles = stats.t.ppf([1.0 - level, POWER], len(values) - 1).sum()
    return float(quantiles * stats.sem(values))


def share_exceeds(
    parts: np.ndarray, wholes: np.ndarray, share: float, level: float = CHANCE_LEVEL
) -> tuple[bool, float]:
    """Whether the parts are more than a share of all wholes together, beyond chance.

    The second number is the least share that so many values of such a spread would show.

    Example:
        >>> found, least = share_exceeds(np.array([3.0, 4, 3, 5, 4]), np.full(5, 10.0), 0.2)
        >>> found, round(least, 2)
        (True, 0.31)
    """
    # The mean of this is above zero exactly if the share of the sums is above the given one.
    surplus = parts - share * wholes
    least = share + found_excess(surplus, level) / max(float(np.mean(wholes)), 1e-30)
    return mean_exceeds(surplus, 0.0, level), least


def resolution(count: int, total: int, what: str = "a share", of: str = "images") -> str:
    """Says how small an effect a check can see if it needs `count` of `total` to fire.

    Example:
        >>> resolution(2, 64, "a gain")
        'with 64 images a gain of less than 4.6 points cannot be told from nothing'
    """
    share = found_share(count, total)
    if share is None:
        return f"{total} {of} are too few: {count} would have to show it"
    size = f"{100 * share:.1f} points"
    return f"with {total} {of} {what} of less than {size} cannot be told from nothing"
