"""The gradient of a loss by the images, and Adam's steps along it.

The gradient is averaged over the randomness of the model where asked (EoT), and half precision does
not damage it. Each example has its own moments of Adam, so that rows can be dropped.
"""

from typing import Any, NamedTuple

import tensorflow as tf

# float16 holds sizes from 6e-8 to 65504, and gradients shrink on the way from logits to pixels. The
# size of the largest entry of the logits' gradient. From there, gradients may shrink a billion
# times or grow a thousand times before float16 loses them.
_LARGEST_ENTRY = 64.0
_EXPONENT_BITS = {tf.float32: (tf.int32, 0x7F800000), tf.float64: (tf.int64, 0x7FF0000000000000)}
# Of Adam.
_FIRST_DECAY = 0.9
_SECOND_DECAY = 0.999
_FLOOR = 1e-8


def loss_and_gradient(victim, loss_function, x_adv, eot_samples: int = 1):
    """Returns logits, per-example loss, and the gradient of the loss at `x_adv`.

    With `eot_samples > 1` the gradient is the mean over so many passes through a randomised model
    (expectation over transformation, Athalye et al. 2018). Logits and loss are the last pass's, as
    in AutoAttack.

    Args:
        victim: the classifier.
        loss_function: function from logits to per-example losses.
        x_adv: images.
        eot_samples: passes to average over.
    """
    if eot_samples == 1:
        return _one_pass(victim, loss_function, x_adv)

    def body(sample, _logits, _loss, total):
        logits, loss, gradient = _one_pass(victim, loss_function, x_adv)
        return sample + 1, logits, loss, total + gradient

    first = _one_pass(victim, loss_function, x_adv)
    _, logits, loss, total = tf.while_loop(
        lambda sample, *_: sample < eot_samples, body, (tf.constant(1), *first)
    )
    return logits, loss, total / eot_samples


def _one_pass(victim, loss_function, x_adv):
    # Persistent: a victim may return several outputs, such as two kinds of logits.
    with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
        tape.watch(x_adv)
        logits = victim.logits(x_adv)
    loss, gradient = image_gradient(tape, loss_function, x_adv, logits, not victim.training)
    return logits, loss, usable(gradient)


def usable(gradient):
    """Returns a gradient with 0 for NaN and infinity, or says that there is none."""
    if gradient is None:
        raise ValueError(
            "This attack needs gradients; expected logits that depend differentiably on the images "
            "(else use an attack without gradients); received a model without any gradient"
        )
    return tf.where(tf.math.is_finite(gradient), gradient, tf.zeros_like(gradient))


def image_gradient(tape, loss_function, images, outputs, is_per_example: bool = True):
    """Returns per-example losses, and their gradient by the images; None where there is none.

    Args:
        tape: a tape that has recorded everything from images to outputs.
        loss_function: function from outputs to per-example losses.
        images: what to differentiate by.
        outputs: what the network returned, in float32 or better: logits or features. If there are
            several, the tape must be persistent.
        is_per_example: whether each output depends on its own image only. Otherwise, as in training
            mode, the batch has one scale.
    """
    # A tape of its own: one that knows the network would run its backward pass here, too.
    with tf.GradientTape(watch_accessed_variables=False) as loss_tape:
        loss_tape.watch(outputs)
        loss = loss_function(outputs)
    upstream = loss_tape.gradient(loss, outputs)
    if upstream is None:
        return loss, None
    return loss, pulled_back(tape, upstream, images, outputs, is_per_example)


def pulled_back(tape, upstream, images, outputs, is_per_example: bool = True):
    """Takes a gradient by the outputs back to the images, undamaged by half precision.

    The loss of a confident prediction has a tiny gradient, which float16 would round to zero within
    the network. So the network is differentiated with a scaled gradient of its outputs, and the
    scale is taken out again. All scales are powers of two: float32 gives the very same numbers.

    One scale for the whole batch would not do. The gradients of its predictions may differ by a
    factor of a million, and an overflow would leave an image unattacked. Each gradient is scaled by
    its own size, so that a confident prediction overflows no sooner than a wrong one.
    """
    upstream = tf.convert_to_tensor(upstream)
    axes = list(range(1 if is_per_example else 0, upstream.shape.rank))
    largest = tf.reduce_max(tf.abs(upstream), axis=axes, keepdims=True)
    scale = _power_of_two(tf.stop_gradient(largest)) / _LARGEST_ENTRY
    gradient = tape.gradient(outputs, images, output_gradients=upstream / scale)
    if gradient is None:
        return None
    shape = tf.concat([tf.shape(scale)[:1], tf.ones(gradient.shape.rank - 1, tf.int32)], axis=0)
    return gradient * tf.cast(tf.reshape(scale, shape), gradient.dtype)


def _power_of_two(size):
    """The largest power of two up to `size`; 1 where that is zero or infinite."""
    integer, bits = _EXPONENT_BITS[size.dtype]
    power = tf.bitcast(tf.bitwise.bitwise_and(tf.bitcast(size, integer), bits), size.dtype)
    return tf.where((power > 0.0) & tf.math.is_finite(power), power, tf.ones_like(power))


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
