"""How much accuracy a model loses against a baseline on the same examples, with its interval.

Paper: Tango, "Equivalence test and confidence interval for the difference in proportions for the
    paired-sample design", Statistics in Medicine 17 (1998). At a difference of zero its statistic
    is McNemar's.
Deviation: none; the ends of the interval are found by bisection, as in the paper.
"""

import dataclasses
import math

#: Of the standard normal distribution: an interval of 95 %, as everywhere in the reports.
_QUANTILE = 1.959963984540054


@dataclasses.dataclass(frozen=True)
class PairedLoss:
    """Counts of the examples that tell a model from its baseline.

    Attributes:
        lost: examples that only the baseline classifies correctly.
        gained: examples that only the model classifies correctly.
        total: all examples.

    Example:
        >>> from he_keras.evaluation.gate.paired_loss import PairedLoss
        >>> loss = PairedLoss(lost=12, gained=2, total=50)
        >>> loss.share, [round(end, 3) for end in loss.interval()]
        (0.2, [0.061, 0.345])
    """

    lost: float
    gained: float
    total: float

    @property
    def share(self) -> float:
        """Accuracy of the baseline minus that of the model."""
        return (self.lost - self.gained) / self.total

    def interval(self) -> tuple[float, float]:
        """Returns the 95 % interval of the loss."""
        swapped = PairedLoss(self.gained, self.lost, self.total)
        return -swapped._upper_end(), self._upper_end()

    def is_shown_below(self, limit: float) -> bool:
        """Whether the whole interval is at most `limit`: the test of non-inferiority.

        A model whose true loss is `limit` passes in one of forty samples.
        """
        return self._score(limit) <= -_QUANTILE

    def is_shown_above(self, limit: float) -> bool:
        """Whether the whole interval is above `limit`."""
        return self._score(limit) > _QUANTILE

    def examples_needed(self, limit: float) -> int | None:
        """Returns how many examples would show a loss below `limit`, if all else stays as it is.

        None if the loss is not below it here, so that no number of examples would.

        Example:
            >>> from he_keras.evaluation.gate.paired_loss import PairedLoss
            >>> PairedLoss(0, 0, 100).examples_needed(0.01)
            381
        """
        score = self._score(limit)
        # The score grows as the square root of the number of examples.
        return math.ceil(self.total * (_QUANTILE / score) ** 2) if score < 0 else None

    def _score(self, difference: float) -> float:
        """The distance of the counts from a true difference, in standard deviations."""
        total, lost, gained = self.total, self.lost, self.gained
        # The most likely share of gained examples solves a quadratic equation.
        middle = (2 * total - lost + gained) * difference - lost - gained
        rest = -gained * difference * (1 - difference)
        root = math.sqrt(max(middle * middle - 8 * total * rest, 0.0))
        variance = total * ((root - middle) / (2 * total) + difference * (1 - difference))
        return (lost - gained - total * difference) / math.sqrt(max(variance, 1e-300))

    def _upper_end(self) -> float:
        from scipy import optimize

        # At an end of the range the variance vanishes.
        most = 1 - 1e-12
        if self.share >= most:
            return 1.0
        low = max(self.share, -most)
        return float(optimize.brentq(lambda each: self._score(each) + _QUANTILE, low, most))
