"""Where an iterated attack starts."""

import math
import numbers

import numpy as np
import tensorflow as tf

from he_keras.threat import ThreatModel, draw_per_seed

#: Standard deviation of the released HE and TRADES training start.
GAUSSIAN_START = 0.001


def draw_start(threat: ThreatModel, random_start: bool | float | str, images, seeds):
    """Returns the first iterate for a `random_start` as `ProjectedGradient` explains it."""
    if random_start is False:
        return images
    if random_start == "gaussian":
        return images + GAUSSIAN_START * draw_per_seed(_standard_normal, images, seeds)
    radius = None if random_start is True else float(random_start)
    return threat.random_start(images, seeds, radius)


def checked_start(random_start) -> bool | float | str:
    """Returns True, False, "gaussian" or a positive radius, as plain Python values."""
    if isinstance(random_start, (bool, np.bool_)):
        return bool(random_start)
    if isinstance(random_start, str) and random_start == "gaussian":
        return random_start
    if isinstance(random_start, numbers.Real) and 0 <= float(random_start) < math.inf:
        return float(random_start) or False
    raise ValueError(
        'Invalid random_start; expected True, False, a radius or "gaussian"; '
        f"received random_start={random_start!r}"
    )


def _standard_normal(shape, seed, dtype):
    return tf.random.stateless_normal(shape, seed, dtype=dtype)
