"""What C&W-l2 and ZOO share: the penalised objective, its variable, and the search over `const`.

Both minimise `|x' - x|_2^2 + const * max(margin(x') + confidence, 0)` in rounds, each with another
constant per example: ten times larger until a round succeeds, then by bisection.
"""

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from he_keras import losses
from he_keras.attacks.attack import is_wrong
from he_keras.attacks.survivors import select_rows
from he_keras.threat import ThreatModel

#: Rounds from which the last one repeats the best constant instead of trying a new one.
ROUNDS_WITH_REPEAT = 10
_SHRINK = 0.999999
_LARGEST_CONST = 1e10


class TanhSpace:
    """Images as `centre + half_width * tanh(variable)`: whatever the variable, within bounds."""

    def __init__(self, threat: ThreatModel) -> None:
        low, high = threat.bounds
        self.threat = threat
        self.centre = (high + low) / 2.0
        self.half_width = (high - low) / 2.0

    def variable(self, images):
        """Returns the variable of images; pixels at the bounds move inward by half a millionth."""
        return tf.atanh(_SHRINK * (images - self.centre) / self.half_width)

    def images(self, variable):
        """Returns the images of a variable."""
        # Rounding could take the sum beyond the bounds.
        return self.threat.clip_to_bounds(self.centre + self.half_width * tf.tanh(variable))

    def slope(self, variable):
        """Returns the derivative of each pixel with respect to its variable."""
        return self.half_width * (1.0 - tf.square(tf.tanh(variable)))


class DirectSpace:
    """Images as their own variable, clipped to the bounds."""

    def __init__(self, threat: ThreatModel) -> None:
        self.threat = threat

    def variable(self, images):
        """Returns the images."""
        return images

    def images(self, variable):
        """Returns the variable, clipped."""
        return self.threat.clip_to_bounds(variable)

    def slope(self, variable):
        """Returns ones."""
        return tf.ones_like(variable)


def hinge(logits, labels, confidence: float):
    """`max(margin + confidence, 0)`: what is left to an adversarial of that confidence."""
    return tf.nn.relu(losses.margin(logits, labels) + confidence)


def is_adversarial(logits, labels, confidence: float):
    """True where another class leads the true one by more than `confidence`."""
    raised = confidence * tf.one_hot(labels, tf.shape(logits)[-1], dtype=logits.dtype)
    return is_wrong(logits + raised, labels)


class ConstantSearch(NamedTuple):
    """State of the search, one row per example.

    Attributes:
        const: constant of the current round.
        lower: largest constant that failed.
        upper: smallest constant that succeeded; infinite before the first success.
        round_number: counts from 0.
        found: an adversarial image was seen in this round.
        best: nearest adversarial image so far; the image itself before the first.
        best_distance: its distance; infinite before the first.
    """

    const: Any
    lower: Any
    upper: Any
    round_number: Any
    found: Any
    best: Any
    best_distance: Any


def start_search(images, initial_const: float) -> ConstantSearch:
    """Returns the state before the first round."""
    rows = tf.shape(images)[:1]
    infinite = tf.fill(rows, tf.constant(np.inf, images.dtype))
    return ConstantSearch(
        const=tf.fill(rows, tf.constant(initial_const, images.dtype)),
        lower=tf.zeros(rows, images.dtype),
        upper=infinite,
        round_number=tf.zeros(rows, tf.int32),
        found=tf.zeros(rows, tf.bool),
        best=images,
        best_distance=infinite,
    )


def record(search: ConstantSearch, adversarial, x_adv, distance) -> ConstantSearch:
    """Notes which of the current points are adversarial, and those nearer than any before."""
    nearer = adversarial & (distance < search.best_distance)
    return search._replace(
        found=search.found | adversarial,
        best=select_rows(nearer, x_adv, search.best),
        best_distance=tf.where(nearer, distance, search.best_distance),
    )


def end_round(search: ConstantSearch, ended, num_rounds: int) -> ConstantSearch:
    """Chooses the next constant of the examples whose round has `ended`."""
    lower = tf.where(search.found, search.lower, search.const)
    upper = tf.where(search.found, search.const, search.upper)
    tenfold = tf.minimum(10.0 * search.const, _LARGEST_CONST)
    const = tf.where(tf.math.is_inf(upper), tenfold, 0.5 * (lower + upper))
    round_number = search.round_number + 1
    if num_rounds >= ROUNDS_WITH_REPEAT:
        is_last = round_number == num_rounds - 1
        const = tf.where(is_last, tf.minimum(upper, _LARGEST_CONST), const)
    return search._replace(
        const=tf.where(ended, const, search.const),
        lower=tf.where(ended, lower, search.lower),
        upper=tf.where(ended, upper, search.upper),
        round_number=tf.where(ended, round_number, search.round_number),
        found=search.found & ~ended,
    )
