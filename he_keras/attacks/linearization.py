"""The decision boundary of a classifier, linearised at each point: what FAB and DeepFool move by.

Between the label `y` and another class `k` it is the hyperplane on which `o_k - o_y` becomes zero,
in the first-order model of the logits `o`. Its l_p distance is `|o_k - o_y| / |g_k|_q` with
`g_k = grad(o_k - o_y)` and q the dual norm of p (DeepFool, Moosavi-Dezfooli et al. 2016).

The gradients of the classes are computed one after the other from one forward pass, and only the
nearest boundary so far is kept. So memory does not grow with the number of classes.
"""

from typing import Any, NamedTuple

import tensorflow as tf

from he_keras import losses
from he_keras.attacks.gradients import input_gradient
from he_keras.attacks.survivors import select_rows

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


def nearest_boundary(victim, points, labels, norm: str, candidates=None):
    """Returns the nearest linearised boundary of each point, and how many backward passes it cost.

    Logits and gradients that are NaN or infinite count as zero.

    Args:
        victim: the classifier.
        points: where to linearise, `(n, ...)`.
        labels: int tensor `(n,)`.
        norm: the norm that "nearest" refers to.
        candidates: int tensor `(n, m)` of classes other than the label; None takes all of them.
    """
    # Persistent: the loop below takes several gradients of the same forward pass.
    with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
        tape.watch(points)
        logits = victim.logits(points)
    if candidates is None:
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


def other_classes(logits, labels, count: int):
    """Returns the `count` classes of largest logit except the label, largest first: `(n, count)`.

    Fewer if there are fewer classes.
    """
    is_label = tf.one_hot(labels, tf.shape(logits)[1], True, False, dtype=tf.bool)
    # The label comes first in the ranking and is then left out.
    ranked = tf.where(is_label, logits.dtype.max, logits)
    num_classes = logits.shape[1] or tf.shape(logits)[1]
    smaller = min if isinstance(num_classes, int) else tf.minimum
    return tf.math.top_k(ranked, k=smaller(count + 1, num_classes)).indices[:, 1:]


def _boundary(tape, logits, points, labels, others, norm: str) -> Boundary:
    """The linearised boundary between each label and one other class."""
    num_classes = tf.shape(logits)[1]
    weights = tf.one_hot(others, num_classes, dtype=logits.dtype)
    weights -= tf.one_hot(labels, num_classes, dtype=logits.dtype)
    gradient = input_gradient(_WeightedTape(tape, weights), logits, points)
    gap = losses.true_logit(logits, others) - losses.true_logit(logits, labels)
    gap = tf.cast(tf.where(tf.math.is_finite(gap), gap, 0.0), points.dtype)
    return Boundary(gap, gradient, tf.abs(gap) / (_dual_norm(gradient, norm) + _NORM_FLOOR))


class _WeightedTape(NamedTuple):
    """A tape whose gradients are of the weighted sum of the target.

    The sum itself could not be recorded: the weights are known only inside the loop over classes.
    """

    tape: tf.GradientTape
    weights: Any

    def gradient(self, target, sources):
        return self.tape.gradient(target, sources, output_gradients=self.weights)


def _dual_norm(gradient, norm: str):
    size = tf.abs(tf.reshape(gradient, [tf.shape(gradient)[0], -1]))
    if norm == "linf":
        return tf.reduce_sum(size, axis=1)
    if norm == "l2":
        return tf.norm(size, axis=1)
    return tf.reduce_max(size, axis=1)
