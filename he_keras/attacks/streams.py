"""Two halves of a batch side by side: faster on a processor with few cores.

TensorFlow runs the operations of one network one after the other, and only some of them keep every
core busy. Cut in two, a batch gives it two independent networks: one computes while the other waits
for memory. Logits and gradients are those of the whole batch, up to rounding.
"""

import math
import os

import keras
import tensorflow as tf

from he_keras.layers.convolution import on_processor

#: Below so many weights a network is so small that starting its operations costs more.
_WORTHWHILE_WEIGHTS = 100_000


def worthwhile_streams(model) -> int:
    """Returns 2 for a Keras model of some size on a processor with several cores, else 1."""
    if not isinstance(model, keras.Model) or not model.built:
        return 1
    if (os.cpu_count() or 1) < 2 or not on_processor():
        return 1
    num_weights = sum(math.prod(weight.shape) for weight in model.weights)
    return 2 if num_weights >= _WORTHWHILE_WEIGHTS else 1


def in_streams(function, images, streams: int):
    """Returns `function(images)`, in a graph by halves if there are two streams.

    Both halves have the same size: of an odd number the middle image is in both, so that no half is
    ever empty.

    Example:
        >>> import tensorflow as tf
        >>> from he_keras.attacks.streams import in_streams
        >>> double = tf.function(lambda images: in_streams(lambda part: 2 * part, images, 2))
        >>> double(tf.constant([1, 2, 3])).numpy().tolist()
        [2, 4, 6]
    """
    if streams == 1 or tf.executing_eagerly():
        return function(images)
    first, second = _halves(images)
    outputs = function(first), function(second)
    return _joined(*outputs, tf.shape(images)[0])


@tf.custom_gradient
def _halves(images):
    """Returns both halves; their gradients are joined where TensorFlow would add them to zeros."""
    count = tf.shape(images)[0]
    half = (count + 1) // 2

    def gradient(first, second):
        # What the second half's copy of the middle image leads to is read by nobody.
        return _joined(first, second, count)

    return (images[:half], images[count - half :]), gradient


def _joined(first, second, count):
    """Both parts, equally long, without the middle row of the second where `count` is odd."""
    return tf.concat([first, second[2 * tf.shape(second)[0] - count :]], axis=0)
