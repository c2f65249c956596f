"""What one training step has to know about the other replicas of a `tf.distribute` strategy."""

import contextlib

import keras
import tensorflow as tf


def count() -> int:
    """Number of replicas that train together; 1 without a strategy."""
    return tf.distribute.get_strategy().num_replicas_in_sync


def number():
    """Number of this replica, from 0."""
    context = tf.distribute.get_replica_context()
    return 0 if context is None else context.replica_id_in_sync_group


def total(values):
    """Sums a tensor, or each of a list of tensors, over all replicas."""
    if count() == 1:
        return values
    return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, values)


def mean_result(metric: keras.metrics.Mean):
    """Result of a `Mean` over the examples of all replicas, also where they have unequal shares."""
    if count() == 1:
        return metric.result()
    values = [tf.convert_to_tensor(metric.total), tf.convert_to_tensor(metric.count)]
    return tf.math.divide_no_nan(*total(values))


def share_overflow(gradients: list) -> list:
    """Makes gradients infinite on every replica if they are not finite on one.

    Keras's loss scaling skips a step by what it finds on the first replica alone, before gradients
    are summed: an overflow on another one would reach the weights.
    """
    if count() == 1:
        return gradients
    known = [gradient for gradient in gradients if gradient is not None]
    finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(gradient)) for gradient in known])
    overflows = total(tf.cast(~finite, tf.float32)) > 0
    return [
        None if gradient is None else tf.where(overflows, float("inf"), gradient)
        for gradient in gradients
    ]


def require_examples(images, network):
    """Returns `images`; fails where a replica got none and would normalise by their statistics.

    The last batch of an epoch may have fewer rows than there are replicas. An empty replica adds
    nothing to loss and gradient, but its batch statistics would be NaN.
    """
    if count() == 1 or not _has_own_statistics(network):
        return images
    has_rows = tf.shape(images)[0] > 0
    message = (
        "A replica got no example of this batch, and its batch-norm statistics would be NaN; "
        f"expected at least {count()} examples in every batch, the last one included, or "
        "synchronized=True in the batch normalisation; received an empty share"
    )
    with tf.control_dependencies([tf.debugging.Assert(has_rows, [message])]):
        return tf.identity(images)


@contextlib.contextmanager
def explained_first_batch():
    """Translates what Keras says when the first batch does not split evenly over the replicas."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        if "must have the same size and shape" not in str(error):
            raise
        raise ValueError(
            "Keras cannot start with a batch that does not split evenly over the replicas; "
            "expected a batch size that is a multiple of their number (the last may differ); "
            f"received {error}"
        ) from error


def _has_own_statistics(network) -> bool:
    """True where some layer tracks statistics that it does not average over the replicas."""
    shared = {
        id(variable)
        for layer in _leaves(network)
        if getattr(layer, "synchronized", False)
        for variable in layer.non_trainable_variables
    }
    return any(
        id(variable) not in shared and variable.dtype.startswith(("float", "bfloat"))
        for variable in network.non_trainable_variables
    )


def _leaves(layer) -> list:
    inner = getattr(layer, "layers", None)
    return [leaf for each in inner for leaf in _leaves(each)] if inner else [layer]
