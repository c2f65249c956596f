"""Rows of a batch: the loop over those that are still at work, groups of them, and choices.

The loop of every iterated attack spends passes only on examples that are still at work. These are
gathered into batches of a few fixed sizes, which are multiples of 1/16 of the first one. Copies of
the last row pad them. An outer loop gathers them. An inner loop iterates until the next smaller
size holds the rest. XLA compiles for shapes that stay the same: there all rows pass through the
model until the last one has ended. Examples that have ended keep their state exactly, so that
neither the gathering nor the batch size nor XLA changes a result.
"""

import math

import tensorflow as tf
from tensorflow.python.ops import control_flow_util

#: More sizes waste fewer passes on padding, but each size takes memory of its own.
_SIZES_PER_BATCH = 16
#: So many query images exist at a time, unless a single example needs more.
IMAGES_AT_ONCE = 256


def under_xla() -> bool:
    """Whether the graph that is being built is for XLA, which needs shapes that stay the same."""
    return control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())


def iterate(step, state, inputs, num_steps, is_active=None):
    """Repeats `state = step(index, state, inputs)`, index counting from 0.

    Args:
        step: function of the iteration's number, the state, and the inputs, for any batch size. It
            may treat every row as active.
        state: nest of tensors with one row per example; returned by `step` with the same structure.
        inputs: nest of tensors with one row per example that stay as they are.
        num_steps: how many iterations at most.
        is_active: function from the state to a mask of the rows that have not ended. None runs all
            rows to the end.

    Example:
        >>> import tensorflow as tf
        >>> from he_keras.attacks.framework.rows import iterate
        >>> count_up = lambda index, state, limit: state + 1
        >>> iterate(count_up, tf.constant([0, 5, 9]), tf.zeros(3), 10, lambda state: state < 7)
        <tf.Tensor: shape=(3,), dtype=int32, numpy=array([7, 7, 9], dtype=int32)>
    """
    num_steps = tf.convert_to_tensor(num_steps, tf.int32)
    first = tf.constant(0)
    if is_active is None:
        return _loop(lambda index, state: index < num_steps, step, first, state, inputs)[1]

    def any_left(index, state):
        return (index < num_steps) & tf.reduce_any(is_active(state))

    if under_xla():
        return _loop(any_left, _freezing(step, is_active), first, state, inputs)[1]

    def compacted(index, state):
        return _iterate_active(step, index, state, inputs, num_steps, is_active)

    return _while(any_left, compacted, first, state)[1]


def _freezing(step, is_active):
    """Returns the step that leaves ended rows as they are."""

    def frozen_step(index, state, inputs):
        return select_rows(is_active(state), step(index, state, inputs), state)

    return frozen_step


def _iterate_active(step, index, state, inputs, num_steps, is_active):
    """Gathers the active rows and iterates on them until a smaller batch would hold the rest."""
    active = is_active(state)
    rows = tf.cast(tf.where(active), tf.int32)
    count = tf.shape(rows)[0]
    unit = tf.maximum(tf.size(active) // _SIZES_PER_BATCH, 1)
    size = -(-count // unit) * unit
    positions = tf.minimum(tf.range(size), count - 1)
    padded = tf.gather(rows[:, 0], positions)
    part, part_inputs = tf.nest.map_structure(lambda each: tf.gather(each, padded), (state, inputs))

    def fills_its_size(index, part):
        left = tf.math.count_nonzero(is_active(part)[:count], dtype=tf.int32)
        return (index < num_steps) & (-(-left // unit) * unit == size)

    index, part = _loop(fills_its_size, _freezing(step, is_active), index, part, part_inputs)
    unpadded = tf.range(count)
    return index, tf.nest.map_structure(
        lambda old, new: tf.tensor_scatter_nd_update(old, rows, tf.gather(new, unpadded)),
        state,
        part,
    )


def _loop(condition, step, index, state, inputs):
    def body(index, state):
        return index + 1, step(index, state, inputs)

    return _while(condition, body, index, state)


def _while(condition, body, index, state):
    return tf.while_loop(
        condition,
        body,
        (index, state),
        shape_invariants=(tf.TensorShape([]), tf.nest.map_structure(_any_rows, state)),
    )


def map_groups(function, inputs, images_per_row: int):
    """Applies `function` to groups of consecutive rows and joins what it returns.

    Args:
        function: takes the entries of `inputs` for some rows and returns one tensor, row by row, of
            the first entry's dtype.
        inputs: tuple of tensors, or nests of them, with one row per example.
        images_per_row: query images that `function` makes of each row.
    """
    if under_xla():
        # The last group may be smaller than the others, for which XLA has no shape.
        def one_row(row):
            return function(*tf.nest.map_structure(lambda each: each[tf.newaxis], row))[0]

        return tf.map_fn(one_row, inputs, fn_output_signature=inputs[0].dtype)
    rows_per_group = max(1, IMAGES_AT_ONCE // images_per_row)
    num_rows = tf.shape(inputs[0])[0]
    num_groups = -(-num_rows // rows_per_group)

    def one_group(group):
        rows = slice(group * rows_per_group, (group + 1) * rows_per_group)
        return function(*tf.nest.map_structure(lambda each: each[rows], inputs))

    first = one_group(0)
    results = tf.TensorArray(
        first.dtype,
        size=num_groups,
        infer_shape=False,
        element_shape=tf.TensorShape([None, *first.shape[1:]]),
    )
    _, results = tf.while_loop(
        lambda group, _results: group < num_groups,
        lambda group, results: (group + 1, results.write(group, one_group(group))),
        (tf.constant(1), results.write(0, first)),
        parallel_iterations=1,
    )
    return results.concat()


def select_rows(mask, new, old):
    """Takes each row of a nest of tensors from `new` where `mask`, else from `old`."""
    column = tf.expand_dims(mask, 1)

    def select(new, old):
        if new.shape.rank <= 2:
            return tf.where(mask if new.shape.rank == 1 else column, new, old)
        # As matrices: a mask that spreads over several axes makes TensorFlow seven times slower.
        shape = new.shape[1:]
        new, old = (tf.reshape(each, [-1, math.prod(shape)]) for each in (new, old))
        return tf.reshape(tf.where(column, new, old), [-1, *shape])

    return tf.nest.map_structure(select, new, old)


def mask_like(mask, tensor):
    """Reshapes a per-example mask (or factor) so that it broadcasts against `tensor`."""
    return tf.reshape(mask, [-1] + [1] * (tensor.shape.rank - 1))


def _any_rows(tensor):
    return tf.TensorShape([None, *tensor.shape[1:]])
