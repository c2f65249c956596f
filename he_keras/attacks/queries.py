"""Attacks without gradients ask for many images per example: here in batches of bounded size."""

import tensorflow as tf

#: So many query images exist at a time, unless a single example needs more.
IMAGES_AT_ONCE = 256


def map_groups(function, inputs, images_per_row: int):
    """Applies `function` to groups of consecutive rows and joins what it returns.

    Args:
        function: takes the entries of `inputs` for some rows and returns one tensor, row by row.
        inputs: tuple of tensors with one row per example.
        images_per_row: query images that `function` makes of each row.
    """
    rows_per_group = max(1, IMAGES_AT_ONCE // images_per_row)
    num_rows = tf.shape(inputs[0])[0]
    num_groups = -(-num_rows // rows_per_group)

    def one_group(group):
        rows = slice(group * rows_per_group, (group + 1) * rows_per_group)
        return function(*(tensor[rows] for tensor in inputs))

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


def seed_per_example(seeds, images):
    """Returns seeds of shape `(n, 2)`; a single seed for the whole batch is counted up."""
    if seeds.shape.rank == 2:
        return seeds
    return seeds + tf.stack([0, 1]) * tf.range(tf.shape(images)[0])[:, tf.newaxis]
