"""What one training step has to know about the other replicas of a `tf.distribute` strategy.

The functions are called inside the step, where TensorFlow knows the strategy.
"""

import numpy as np
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
    # The reduction asks for the device of each value, which one read from a variable may not have.
    placed = tf.nest.map_structure(tf.identity, values)
    return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, placed)


def own_variable(initial, name: str, shape=None) -> tf.Variable:
    """Makes a variable of which each replica has a copy of its own; no optimizer trains it.

    Args:
        initial: first value.
        name: name of the variable.
        shape: shape with None for axes that may change; None for the shape of the first value.
    """
    # Outside any graph, where a model that builds itself in its first step would put it.
    with tf.init_scope():
        # TensorFlow 2.21 crashes where workers hand on an empty array of NumPy.
        first = tf.zeros(initial.shape, initial.dtype) if np.size(initial) == 0 else initial
        return tf.Variable(
            first,
            shape=shape,
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
            name=name,
        )


def copies(variable: tf.Variable) -> tuple:
    """Returns the copies of an `own_variable` on the replicas of this process."""
    return tf.distribute.get_strategy().experimental_local_results(variable)


def share_statistics(network, num_examples) -> None:
    """Gives all replicas the mean of the statistics that each tracked of its own examples.

    Batch norm that is not synchronised normalises by a replica's share of the batch. Without this,
    each replica, and each worker, would keep moving averages of its own.

    Args:
        network: a built layer or model.
        num_examples: this replica's share of the batch.
    """
    if count() == 1:
        return
    variables = own_statistics(network)
    if not variables:
        return
    weight = tf.cast(num_examples, tf.float32)
    weighted = [tf.cast(tf.convert_to_tensor(each), tf.float32) * weight for each in variables]
    *sums, weights = total([*weighted, weight])
    for variable, value in zip(variables, sums, strict=True):
        variable.assign(value / weights)


def require_examples(images, network):
    """Returns `images`; fails where a replica got none and would normalise by their statistics.

    The last batch of an epoch may have fewer rows than there are replicas. An empty replica adds
    nothing to loss and gradient, but its batch statistics would be NaN.
    """
    if count() == 1 or not own_statistics(network):
        return images
    has_rows = tf.shape(images)[0] > 0
    message = (
        "A replica got no example of this batch, and its batch-norm statistics would be NaN; "
        f"expected at least {count()} examples in every batch, the last one included, or "
        "synchronized=True in the batch normalisation; received an empty share"
    )
    with tf.control_dependencies([tf.debugging.Assert(has_rows, [message])]):
        return tf.identity(images)


def own_statistics(network) -> list:
    """The statistics that layers track without averaging them over the replicas."""
    shared = {
        id(variable)
        for layer in _leaves(network)
        if getattr(layer, "synchronized", False)
        for variable in layer.non_trainable_variables
    }
    return [
        variable
        for variable in network.non_trainable_variables
        if id(variable) not in shared and variable.dtype.startswith(("float", "bfloat"))
    ]


def _leaves(layer) -> list:
    inner = getattr(layer, "layers", None)
    return [leaf for each in inner for leaf in _leaves(each)] if inner else [layer]
