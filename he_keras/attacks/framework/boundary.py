"""Linearised decision boundaries: the nearest one, and classes in the order of their distance.

Where the logits are nearly linear, the boundary between two classes is nearly a hyperplane. It lies
at the difference of their logits, divided by the dual norm of the gradient of that difference.
"""

from typing import Any, NamedTuple

import tensorflow as tf

from he_keras import losses
from he_keras.attacks.framework.gradients import pulled_back, usable
from he_keras.attacks.framework.result import Goal, other_classes
from he_keras.attacks.framework.rows import select_rows
from he_keras.balls import DUAL, length

#: Keeps the distance to a boundary without a gradient finite. It is then far away.
_NORM_FLOOR = 1e-12


class Boundary(NamedTuple):
    """A linearised boundary for each point.

    Attributes:
        gap: `o_k - o_y` at the point, `(n,)`; negative where the label is predicted.
        gradient: gradient of the gap, of the points' shape.
        distance: l_p distance of the hyperplane, without pixel bounds, `(n,)`.
    """

    gap: Any
    gradient: Any
    distance: Any


def nearest_boundary(victim, points, goal: Goal, norm: str, candidates=None):
    """Returns the nearest linearised boundary of each point, and how many backward passes it cost.

    With targets it is the boundary between the target and the class of the largest other logit.
    Logits and gradients that are NaN or infinite count as zero.

    Args:
        victim: the classifier.
        points: where to linearise, `(n, ...)`.
        goal: what the attack is after.
        norm: the norm that "nearest" refers to.
        candidates: int tensor `(n, m)` of classes other than the label; None takes all of them.
            Where there are targets, these are the candidates.
    """
    tape, logits = _recorded(victim, points)
    labels = goal.labels
    if goal.is_targeted:
        labels = other_classes(logits, goal.targets, 1)[:, 0]
        candidates = goal.targets[:, tf.newaxis]
    elif candidates is None:
        num_classes = tf.shape(logits)[1]
        candidates = (labels[:, tf.newaxis] + tf.range(1, num_classes)) % num_classes

    def boundary(column):
        others = tf.gather(candidates, column, axis=1)
        return _boundary(tape, logits, points, labels, others, norm)

    if candidates.shape[1] == 1:
        return boundary(0), tf.constant(1)

    def compare(column, nearest):
        found = boundary(column)
        return column + 1, select_rows(found.distance < nearest.distance, found, nearest)

    no_gap = tf.zeros_like(labels, points.dtype)
    farthest = Boundary(no_gap, tf.zeros_like(points), no_gap + points.dtype.max)
    count = tf.shape(candidates)[1]
    _, nearest = tf.while_loop(lambda column, _: column < count, compare, (0, farthest))
    return nearest, count


def nearest_classes(victim, points, labels, norm: str, num_candidates: int):
    """Returns logits, classes other than the label, and how many backward passes they cost.

    The class whose linearised boundary is nearest comes first. Only the candidates are put in
    order: with a thousand classes, the gradients of all would cost more than an attack.

    Paper: Melamed et al. 2024, "MALT powers up adversarial attacks".

    Args:
        victim: the classifier.
        points: where to linearise, `(n, ...)`.
        labels: int tensor `(n,)`.
        norm: the norm of the distances.
        num_candidates: how many classes of largest logit are compared, at most.
    """
    tape, logits = _recorded(victim, points)
    candidates = other_classes(logits, labels, num_candidates)
    count = tf.shape(candidates)[1]

    def measure(column, distances):
        others = tf.gather(candidates, column, axis=1)
        distance = _boundary(tape, logits, points, labels, others, norm).distance
        is_here = tf.equal(tf.range(count), column)
        distances = tf.where(is_here, distance[:, tf.newaxis], distances)
        return column + 1, tf.ensure_shape(distances, candidates.shape)

    start = 0, tf.zeros_like(candidates, points.dtype)
    _, distances = tf.while_loop(lambda column, _: column < count, measure, start)
    order = tf.argsort(distances, axis=1, stable=True)
    return logits, tf.gather(candidates, order, batch_dims=1), count


def _recorded(victim, points):
    """Runs the classifier; returns a tape that gives several gradients of this pass, and logits."""
    with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
        tape.watch(points)
        logits = victim.logits(points)
    return tape, logits


def _boundary(tape, logits, points, labels, others, norm: str) -> Boundary:
    """The linearised boundary between each label and one other class."""
    num_classes = tf.shape(logits)[1]
    weights = tf.one_hot(others, num_classes, dtype=logits.dtype)
    weights -= tf.one_hot(labels, num_classes, dtype=logits.dtype)
    # Not of the weighted sum, which is not on the tape: the loop over classes has the weights.
    gradient = usable(pulled_back(tape, weights, points, logits))
    gap = losses.true_logit(logits, others) - losses.true_logit(logits, labels)
    gap = tf.cast(tf.where(tf.math.is_finite(gap), gap, 0.0), points.dtype)
    steepness = tf.reshape(length(gradient, DUAL[norm]), [-1])
    return Boundary(gap, gradient, tf.abs(gap) / (steepness + _NORM_FLOOR))
