"""The steps of Adam, for attacks: each example has its own moments, so that rows can be dropped."""

from typing import Any, NamedTuple

import tensorflow as tf

_FIRST_DECAY = 0.9
_SECOND_DECAY = 0.999
_FLOOR = 1e-8


class Moments(NamedTuple):
    """Running means of the gradient and of its square."""

    first: Any
    second: Any


def zero_moments(variable) -> Moments:
    """Returns the moments before the first step."""
    return Moments(tf.zeros_like(variable), tf.zeros_like(variable))


def adam_step(gradient, moments: Moments, count, step_size):
    """Returns the step to add in order to ascend along `gradient`, and the new moments.

    Args:
        gradient: the gradient.
        moments: the moments after the last step.
        count: number of this step, from 1; broadcasts against `gradient`.
        step_size: Adam's learning rate.
    """
    count = tf.cast(count, gradient.dtype)
    first = _FIRST_DECAY * moments.first + (1.0 - _FIRST_DECAY) * gradient
    second = _SECOND_DECAY * moments.second + (1.0 - _SECOND_DECAY) * tf.square(gradient)
    # `tf.cast` of a Python number would round it to float32 on the way to float64.
    mean = first / (1.0 - tf.pow(tf.constant(_FIRST_DECAY, count.dtype), count))
    size = tf.sqrt(second / (1.0 - tf.pow(tf.constant(_SECOND_DECAY, count.dtype), count)))
    return step_size * mean / (size + _FLOOR), Moments(first, second)
