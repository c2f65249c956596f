"""The smallest step from a point inside the pixel bounds onto a hyperplane, in three norms.

The hyperplane is `{z: <normal, z> = b}`. Every coordinate that has a normal component moves towards
it, at most as far as the bounds leave room; how the way is shared among the coordinates depends on
the norm:

- linf: all by the same length `s`, or as far as there is room;
- l2: each by `s` times its normal component, or as far as there is room;
- l1: the largest normal components first, each as far as there is room.

Paper: Croce & Hein 2020, "Minimally distorted adversarial examples with a fast adaptive boundary
attack", Sec. 2.2. The authors sort the coordinates of each example; here Newton's method (linf, l2)
and a search over floating-point numbers (l1) find the same root exactly and several times faster.
"""

from typing import Any

import tensorflow as tf


def step_to_hyperplane(points, normal, excess, norm: str, bounds: tuple[float, float]):
    """Returns the step of least l_p length that leads from each point onto its hyperplane.

    Where no point inside the bounds lies on the hyperplane, the step leads as close as possible: to
    a corner of the box. A normal of zero gives no step.

    Args:
        points: points inside the bounds, `(n, ...)`.
        normal: normal vectors, of the same shape.
        excess: `<normal, point> - b` of each point, `(n,)`; its sign says on which side it lies.
        norm: "linf", "l2" or "l1".
        bounds: smallest and largest value of a coordinate.

    Example:
        >>> import tensorflow as tf
        >>> from he_keras.attacks.hyperplane_projection import step_to_hyperplane
        >>> points, normal = tf.constant([[0.5, 0.1]]), tf.constant([[1.0, 2.0]])
        >>> step = step_to_hyperplane(points, normal, tf.constant([0.6]), "linf", (0.0, 1.0))
        >>> [round(float(length), 3) for length in step[0]]
        [-0.4, -0.1]
    """
    shape = tf.shape(points)
    points, normal = (tf.reshape(each, [shape[0], -1]) for each in (points, normal))
    excess = tf.reshape(excess, [-1, 1])
    low, high = bounds
    direction = -tf.sign(normal) * tf.sign(excess)
    room = tf.maximum(tf.where(direction > 0, high - points, points - low), 0.0)
    lengths = _LENGTHS[norm](tf.abs(normal), room, tf.abs(excess))
    return tf.reshape(direction * lengths, shape)


def _equal_lengths(component, room, way):
    """linf: all coordinates have the same speed."""
    gain = component * room
    length = _time_until(way, component, gain, lambda time: time >= room)
    return tf.where(_is_out_of_reach(way, gain), room, tf.minimum(length, room))


def _proportional_lengths(component, room, way):
    """l2: the speed of a coordinate is its normal component."""
    # Relative to the largest, so that the squares of small components do not underflow.
    largest = tf.reduce_max(component, axis=1, keepdims=True)
    component = tf.math.divide_no_nan(component, largest)
    way = tf.math.divide_no_nan(way, largest)
    gain = component * room
    time = _time_until(way, tf.square(component), gain, lambda time: time * component >= room)
    return tf.where(_is_out_of_reach(way, gain), room, tf.minimum(time * component, room))


def _time_until(way, rate, gain, has_arrived):
    """Solves `sum_i min(time * rate_i, gain_i) = way` by Newton's method, from below.

    The sum is concave and piecewise linear in the time, hence a Newton step never goes too far, and
    the root is exact as soon as the set of coordinates that have arrived stays the same. That takes
    3 to 10 steps, and no example influences another: a root that is found does not change any more.

    Args:
        way: what the coordinates have to contribute together, `(n, 1)`.
        rate: contribution of each coordinate per unit of time.
        gain: its contribution when it has used its room.
        has_arrived: function from the time to a mask of coordinates that have used their room.
    """
    zero = tf.zeros([], way.dtype)
    way = tf.where(_is_out_of_reach(way, gain), zero, way)

    def newton_step(time, _):
        arrived = has_arrived(time)
        left = way - _sum(tf.where(arrived, gain, zero))
        following = tf.math.divide_no_nan(left, _sum(tf.where(arrived, zero, rate)))
        following = tf.maximum(time, following)
        return following, tf.reduce_any(following > time)

    start = tf.math.divide_no_nan(way, _sum(rate))
    return tf.while_loop(lambda _, moved: moved, newton_step, (start, tf.constant(True)))[0]


def _largest_first_lengths(component, room, way):
    """l1: coordinates use their room in the order of their normal components.

    Floating-point numbers >= 0 are ordered like the integers of the same bits. Bisecting these
    gives exactly the component at which the way is used up, without sorting.
    """
    gain = component * room
    order = tf.bitcast(component, tf.int64 if component.dtype == tf.float64 else tf.int32)

    def gain_above(rank):
        return _sum(tf.where(order > rank, gain, 0.0))

    def halve(lower, upper):
        middle = lower + (upper - lower) // 2
        suffices = gain_above(middle) <= way
        # An interval of one number is final.
        return tf.where(suffices, lower, middle), tf.where(suffices, middle, upper)

    upper = tf.reduce_max(order, axis=1, keepdims=True)
    intervals = -tf.ones_like(upper), upper
    _, last = tf.while_loop(lambda lower, upper: tf.reduce_any(upper - lower > 1), halve, intervals)
    # What is left for the last component is a small difference of large sums: in float64.
    used_room = tf.where(order > last, room, 0.0)
    exact_gain = tf.cast(component, tf.float64) * tf.cast(used_room, tf.float64)
    rest = tf.cast(tf.cast(way, tf.float64) - _sum(exact_gain), way.dtype)
    # Equal components use it up one after the other.
    tied_gain = tf.where(order == last, gain, 0.0)
    rest -= tf.cumsum(tied_gain, axis=1, exclusive=True)
    partial = tf.math.divide_no_nan(tf.clip_by_value(rest, 0.0, tied_gain), component)
    return tf.where(order > last, room, tf.minimum(partial, room))


def _is_out_of_reach(way, gain):
    return _sum(gain) <= way


def _sum(values):
    return tf.reduce_sum(values, axis=1, keepdims=True)


_LENGTHS: dict[str, Any] = {
    "linf": _equal_lengths,
    "l2": _proportional_lengths,
    "l1": _largest_first_lengths,
}
