"""Confidence intervals of accuracies."""

import math

_NORMAL_QUANTILE_95 = 1.959963984540054


def wilson_interval(num_correct: int, num_examples: int) -> tuple[float, float]:
    """Returns the 95 % interval of a share (Wilson 1927), which stays within 0 and 1.

    It speaks of the examples as a random sample: of other images, not of other seeds or trainings.

    Example:
        >>> from he_keras.evaluation.intervals import wilson_interval
        >>> [round(end, 4) for end in wilson_interval(90, 100)]
        [0.8256, 0.9448]
    """
    share, z = num_correct / num_examples, _NORMAL_QUANTILE_95
    shrink = 1.0 + z * z / num_examples
    centre = (share + z * z / (2 * num_examples)) / shrink
    variance = share * (1 - share) / num_examples + (z / (2 * num_examples)) ** 2
    width = z * math.sqrt(variance) / shrink
    return max(0.0, centre - width), min(1.0, centre + width)
