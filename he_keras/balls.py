"""The mathematics of l_p balls: lengths, steepest steps, projections and random draws.

Every function treats each example of a batch by itself. Random draws take a seed for each example,
so that the batch size changes no result. `ThreatModel` adds the pixel bounds.

Paper: "Boosting Adversarial Training with Hypersphere Embedding", Lemma 1 (Eq. 7): the step of unit
l_p length that increases a linear function most is `U_p(g) = argmax <g, v>` over the unit ball. Its
value is the dual norm of `g`.
"""

import math
from typing import Any

import numpy as np
import tensorflow as tf

NORMS = ("linf", "l2", "l1")
#: The norm in which a hyperplane's normal is measured, for distances in each norm.
DUAL = {"linf": "l1", "l2": "l2", "l1": "linf"}
#: Keeps a division by the length of a zero vector finite; below every length that float32 resolves
#: in an image.
_NORM_FLOOR = 1e-12
#: AutoAttack's: keeps the step of a gradient of zeros finite.
_COUNT_FLOOR = 1e-10
#: A sum over an image that misses the radius by so many units in the last place has reached it.
_SUM_UNITS = 8
#: Added to a radius before a division by it: near the smallest normal number of float32, so it
#: changes no radius but 0.
_ZERO_RADIUS = 1e-37
#: The first number of a seed is multiplied by this, and then targets are counted up. It is far
#: above any number of targets, so no target of one restart draws the numbers of another restart.
_TARGETS_PER_SEED = 1_000_003
#: Weights of neighbouring pixels in the hash: 2**16 divided by the golden ratio, as Knuth
#: recommends for multiplicative hashing of 16-bit numbers.
_HASH_FACTOR = 40_503
_SIXTEEN_BITS = 65_535.0


def example_axes(tensor) -> list[int]:
    """Returns the numbers of all axes but the first."""
    return list(range(1, len(tensor.shape)))


def flat(images):
    """Returns images as one row for each example."""
    return tf.reshape(images, [-1, math.prod(images.shape[1:])])


def length(perturbation, norm: str):
    """Returns the length of each example, with kept axes, so that it broadcasts against images."""
    axes = example_axes(perturbation)
    if norm == "linf":
        return tf.reduce_max(tf.abs(perturbation), axis=axes, keepdims=True)
    if norm == "l2":
        return tf.sqrt(tf.reduce_sum(tf.square(perturbation), axis=axes, keepdims=True))
    return tf.reduce_sum(tf.abs(perturbation), axis=axes, keepdims=True)


def steepest_step(gradient, norm: str):
    """Returns `U_p(gradient)` of Lemma 1: of unit length, or zero for a zero gradient."""
    if norm == "linf":
        return tf.sign(gradient)
    if norm == "l2":
        # A saturated loss leaves gradients around 1e-20. Divided by the largest entry first, their
        # squares do not underflow, and the step keeps its unit length.
        direction = tf.math.divide_no_nan(gradient, length(gradient, "linf"))
        return tf.math.divide_no_nan(direction, length(direction, "l2"))
    is_largest = tf.abs(gradient) >= length(gradient, "linf")
    largest = tf.cast(is_largest, gradient.dtype) * tf.sign(gradient)
    return largest / tf.maximum(length(largest, "l1"), 1.0)


def sparse_step(gradient, number, step_length):
    """Returns the step of this l1 length that is equally long in the largest entries of a gradient.

    Args:
        gradient: the gradient, `(n, ...)`.
        number: in how many entries to step, `(n,)`. Equally large ones are not told apart.
        step_length: l1 length of the step, `(n,)`; a gradient of zeros gives no step.
    """
    rows = flat(gradient)
    size = rows.shape[1]
    rank = tf.clip_by_value(size - number, 0, size - 1)[:, tf.newaxis]
    smallest = tf.gather(tf.sort(tf.abs(rows), axis=1), rank, batch_dims=1)
    signs = tf.where(tf.abs(rows) >= smallest, tf.sign(rows), tf.zeros_like(rows))
    count = tf.reduce_sum(tf.abs(signs), axis=1) + _COUNT_FLOOR
    return tf.reshape((step_length / count)[:, tf.newaxis] * signs, tf.shape(gradient))


def project(perturbation, norm: str, radius):
    """Maps each perturbation to the nearest point of the ball."""
    if norm == "linf":
        return tf.clip_by_value(perturbation, -radius, radius)
    if norm == "l2":
        # The tensor comes first: it decides the dtype of the constant.
        too_long = radius / tf.maximum(length(perturbation, "l2"), _NORM_FLOOR)
        return perturbation * tf.minimum(too_long, 1.0)
    return project_l1(perturbation, tf.abs(perturbation), radius)


def project_l1(perturbation, room, radius):
    """Maps each perturbation to the nearest point of the l1 ball with entries of at most `room`.

    Solves `sum_i clip(|d_i| - a, 0, room_i) = radius` for the shift `a >= 0` by Newton's method.
    The sum falls with `a`, piecewise linearly. A Newton step that leaves the interval in which the
    root must lie is replaced by the middle of that interval. Real perturbations take 4 to 8 steps.
    Where the sum is at most the radius from the start, `a` stays zero.
    """
    size, limit = tf.abs(flat(perturbation)), flat(room)
    tolerance = float(_SUM_UNITS * np.finfo(size.dtype.as_numpy_dtype).eps) * radius

    def shrunk(shift):
        return tf.clip_by_value(size - shift, 0.0, limit)

    def newton_step(shift, lower, upper, _):
        kept = shrunk(shift)
        excess = _sum(kept) - radius
        lower, upper = tf.where(excess > 0, shift, lower), tf.where(excess > 0, upper, shift)
        moving = tf.cast((kept > 0) & (kept < limit), size.dtype)
        following = shift + tf.math.divide_no_nan(excess, _sum(moving))
        is_inside = (following > lower) & (following < upper)
        following = tf.where(is_inside, following, 0.5 * (lower + upper))
        # A root that is found stays, so that no example influences another.
        following = tf.where(tf.abs(excess) <= tolerance, shift, following)
        # Not `!=`, which NaN would never end.
        return following, lower, upper, tf.reduce_any(tf.abs(following - shift) > 0)

    zero, largest = tf.zeros_like(size[:, :1]), tf.reduce_max(size, axis=1, keepdims=True)
    start = zero, zero, largest, tf.constant(True)
    shift = tf.while_loop(lambda *state: state[-1], newton_step, start)[0]
    # Rounding adds up over the coordinates: the last factor puts the perturbation onto the sphere.
    # A scheduled radius may be 0: no 0 / 0.
    kept = shrunk(shift)
    kept /= tf.maximum(_sum(kept) / (radius + _ZERO_RADIUS), 1.0)
    return tf.sign(perturbation) * tf.reshape(kept, tf.shape(perturbation))


def seeds_of_target(seeds, index):
    """Returns other seeds of the same shape for the target of this index."""
    return seeds * [_TARGETS_PER_SEED, 1] + tf.stack([index + 1, 0])


def seed_per_example(seeds, images):
    """Returns seeds of shape `(n, 2)`; a single seed for the whole batch is counted up."""
    if seeds.shape.rank == 2:
        return seeds
    return seeds + tf.stack([0, 1]) * tf.range(tf.shape(images)[0])[:, tf.newaxis]


def seeds_from_content(images, seed: int):
    """Derives a seed for each example from its pixels, where positions in the data are unknown.

    The hash is exact integer arithmetic, so it does not depend on the batch size.
    """
    pixels = tf.cast(tf.reshape(images, [tf.shape(images)[0], -1]) * _SIXTEEN_BITS, tf.int32)
    weights = tf.range(1, tf.shape(pixels)[1] + 1, dtype=tf.int32) * _HASH_FACTOR
    content = tf.reduce_sum(pixels * weights, axis=1)
    return tf.stack([tf.fill(tf.shape(content), seed), content], axis=1)


def draw_per_seed(sampler, images, seed):
    """Calls `sampler(shape, seed, dtype)` once, or once per example for `(n, 2)` seeds."""
    seed = tf.convert_to_tensor(seed)
    shape = tf.shape(images)
    if seed.shape.rank == 1:
        noise = sampler(shape, seed, images.dtype)
    else:
        one = tf.concat([[1], shape[1:]], axis=0)
        noise = map_seeds(
            lambda each: sampler(one, each, images.dtype)[0], seed, images.shape[1:], images.dtype
        )
    return tf.ensure_shape(noise, images.shape)


def map_seeds(draw, seeds, shape, dtype):
    """Calls `draw(seed)` for each example's seed; each draw has this shape and dtype."""
    return tf.map_fn(draw, seeds, fn_output_signature=tf.TensorSpec(shape, dtype))


def standard_normal(shape, seed, dtype):
    """Draws from the normal distribution, for `draw_per_seed`."""
    return tf.random.stateless_normal(shape, seed, dtype=dtype)


def uniform(shape, seed, dtype):
    """Draws uniformly from [0, 1), for `draw_per_seed`."""
    return tf.random.stateless_uniform(shape, seed, dtype=dtype)


def uniform_linf(shape, seed, dtype):
    """Draws uniformly from [-1, 1), for `draw_per_seed`."""
    return tf.random.stateless_uniform(shape, seed, -1.0, 1.0, dtype)


def start_noise(images, seeds, norm: str, number=0):
    """Draws the noise whose direction is the start of APGD and FAB: linf uniform, else Gaussian.

    `number` tells several draws of one example apart.
    """
    draw = uniform_linf if norm == "linf" else standard_normal

    def sampler(shape, seed, dtype):
        return draw(shape, tf.random.fold_in(seed, number), dtype)

    return draw_per_seed(sampler, images, seeds)


def _uniform_l2(shape, seed, dtype):
    direction = tf.random.stateless_normal(shape, seed, dtype=dtype)
    dimension = tf.cast(tf.reduce_prod(shape[1:]), dtype)
    one_per_example = tf.concat([shape[:1], tf.ones_like(shape[1:])], axis=0)
    length_seed = tf.random.fold_in(seed, 1)
    length = tf.random.stateless_uniform(one_per_example, length_seed, dtype=dtype)
    norm = tf.norm(tf.reshape(direction, [shape[0], -1]), axis=1)
    norm = tf.reshape(tf.maximum(norm, _NORM_FLOOR), one_per_example)
    return direction / norm * length ** (1.0 / dimension)


def _uniform_l1(shape, seed, dtype):
    tiny = np.finfo(dtype.as_numpy_dtype).tiny
    uniform = tf.random.stateless_uniform(shape, seed, tiny, 1.0, dtype)
    one_per_example = tf.concat([shape[:1], tf.ones_like(shape[1:])], axis=0)
    rest_seed = tf.random.fold_in(seed, 1)
    rest = -tf.math.log(tf.random.stateless_uniform(one_per_example, rest_seed, tiny, 1.0, dtype))
    sign_seed = tf.random.fold_in(seed, 2)
    signs = tf.sign(tf.random.stateless_uniform(shape, sign_seed, -1.0, 1.0, dtype))
    lengths = -tf.math.log(uniform)
    total = tf.reshape(tf.reduce_sum(tf.reshape(lengths, [shape[0], -1]), axis=1), one_per_example)
    return signs * lengths / (total + rest)


#: Draws uniformly from the ball of radius 1 in each norm.
UNIT_BALL = {"linf": uniform_linf, "l2": _uniform_l2, "l1": _uniform_l1}


def step_to_hyperplane(points, normal, excess, norm: str, bounds: tuple[float, float]):
    """Returns the step of least l_p length that leads from each point onto its hyperplane.

    Every coordinate that has a normal component moves towards the hyperplane, at most as far as the
    bounds leave room. The norm decides how the coordinates share the way:

    - linf: all move by the same length `s`, or as far as there is room;
    - l2: each moves by `s` times its normal component, or as far as there is room;
    - l1: the largest normal components come first, each as far as there is room.

    Paper: Croce & Hein 2020, "Minimally distorted adversarial examples with a fast adaptive
    boundary attack", Sec. 2.2. The authors sort the coordinates of each example. Newton's method
    (linf, l2) and a search over floating-point numbers (l1) find the same root, several times
    faster.

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
        >>> from he_keras.balls import step_to_hyperplane
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

    The sum is concave and piecewise linear in the time, so a Newton step never goes too far. The
    root is exact as soon as the set of coordinates that have arrived stays the same. That takes 3
    to 10 steps, and no example influences another: a root that is found does not change any more.

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
    tied_gain = tf.where(tf.equal(order, last), gain, 0.0)
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
