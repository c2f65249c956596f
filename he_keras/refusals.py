"""What code refuses that TensorFlow has compiled: a condition in the graph, and its sentence."""

import re

import tensorflow as tf

#: What TensorFlow makes of a failed assertion with a message and two numbers.
_REFUSED = re.compile(r"assertion failed: \[([A-Z][^\n]*? in)\] \[(\S+)\] \[(\S+)\]")


def only_if(holds, value, message: str, received):
    """Returns `value`; unless the condition holds, the step raises an error with the extremes.

    Args:
        holds: a boolean tensor.
        value: a floating-point tensor.
        message: a sentence that ends with "received ... in".
        received: the tensor whose smallest and largest value the error names.

    Example:
        >>> import tensorflow as tf
        >>> from he_keras.refusals import only_if
        >>> image = tf.constant([0.5, 2.0])
        >>> only_if(False, image, "Too bright; expected [0, 1]; received values in", image)
        Traceback (most recent call last):
        tensorflow.python.framework.errors_impl.InvalidArgumentError: Too bright; expected ...
    """
    values = [message, tf.reduce_min(received), tf.reduce_max(received)]
    if tf.executing_eagerly() and not holds:
        sentence = f"{message} [{values[1]}, {values[2]}]"
        raise tf.errors.InvalidArgumentError(None, None, sentence)
    with tf.control_dependencies([tf.debugging.Assert(holds, values)]):
        # XLA drops assertions. Where it compiles everything, as on a TPU, the loss becomes NaN.
        return tf.where(holds, value, tf.constant(float("nan"), value.dtype))


def one_for_each(rows, images, value, message: str):
    """Returns `value`; unless there is a row for each image, the step raises an error."""
    counts = tf.stack([tf.shape(rows)[0], tf.shape(images)[0]])
    text = f"{message}; expected one for each image; received numbers in"
    return only_if(tf.equal(counts[0], counts[1]), value, text, counts)


def only_finite(value, message: str):
    """Returns `value`; NaN and infinity raise an error when the step runs."""
    text = f"{message}; expected finite numbers; received values in"
    return only_if(tf.reduce_all(tf.math.is_finite(value)), value, text, value)


def sentence_of(error: tf.errors.InvalidArgumentError) -> str:
    """Returns the sentence of what a compiled step refused; "" for any other error."""
    found = _REFUSED.search(error.message)
    # TensorFlow writes a backslash before a quotation mark.
    return f"{found[1]} [{found[2]}, {found[3]}]".replace("\\'", "'") if found else ""
