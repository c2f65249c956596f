"""Attacks without gradients ask for many images per example: here in batches of bounded size."""

import tensorflow as tf

from he_keras.attacks.framework.survivors import under_xla

#: So many query images exist at a time, unless a single example needs more.
IMAGES_AT_ONCE = 256


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
