"""Two halves of a batch at the same time: faster on a CPU with few cores.

TensorFlow runs the operations of one network one after the other, and only some of them keep every
core busy. Cut in two, a batch gives it two independent networks: one computes while the other waits
for memory. Logits and gradients are those of the whole batch, up to rounding.
"""

import math
import os
from collections.abc import Callable

import keras
import tensorflow as tf

from he_keras.cpu.switch import applies

#: A network with fewer weights is so small that it costs more to start its operations twice.
_FEWEST_WEIGHTS = 100_000


def batch_function(function: Callable, model) -> Callable:
    """Returns a function with the same values, by halves of the batch where that is faster.

    Args:
        function: a function of images that treats each one by itself.
        model: the classifier that the function runs, a `keras.Model` or any callable.
    """
    return (lambda images: by_halves(function, images)) if is_worthwhile(model) else function


def is_worthwhile(model) -> bool:
    """Whether this is a Keras model of some size, alone on a CPU with several cores."""
    if not isinstance(model, keras.Model) or not model.built:
        return False
    # Replicas keep the cores busy by themselves.
    is_alone = tf.distribute.get_strategy().num_replicas_in_sync == 1
    if not is_alone or (os.cpu_count() or 1) < 2 or not applies("half_batches"):
        return False
    return sum(math.prod(weight.shape) for weight in model.weights) >= _FEWEST_WEIGHTS


def by_halves(function: Callable, images):
    """Returns `function(images)` by halves, which only a graph gains by.

    Both halves have the same size. If the number of images is odd, the middle one is in both, so
    that no half is ever empty.

    Example:
        >>> import tensorflow as tf
        >>> from he_keras.cpu.half_batches import by_halves
        >>> double = tf.function(lambda images: by_halves(lambda half: 2 * half, images))
        >>> double(tf.constant([1, 2, 3])).numpy().tolist()
        [2, 4, 6]
    """
    first, second = _halves(images)
    return _joined(function(first), function(second), tf.shape(images)[0])


@tf.custom_gradient
def _halves(images):
    """Returns both halves; their gradients are joined where TensorFlow would add them to zeros."""
    count = tf.shape(images)[0]
    half = (count + 1) // 2

    def gradient(first, second):
        # Nobody reads what comes of the second half's copy of the middle image.
        return _joined(first, second, count)

    return (images[:half], images[count - half :]), gradient


def _joined(first, second, count):
    """Joins two equally long parts, without the second's first row where `count` is odd."""
    return tf.concat([first, second[2 * tf.shape(second)[0] - count :]], axis=0)
