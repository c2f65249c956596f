"""Gradients with respect to images, averaged over the randomness of the model where asked (EoT)."""

import tensorflow as tf


def loss_and_gradient(victim, loss_function, x_adv, eot_samples: int = 1):
    """Returns logits, per-example loss, and the gradient of the loss at `x_adv`.

    With `eot_samples > 1` the gradient is the mean over so many passes through a randomised model
    (expectation over transformation, Athalye et al. 2018); logits and loss are the last pass's, as
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
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(x_adv)
        logits = victim.logits(x_adv)
        loss = loss_function(logits)
    return logits, loss, input_gradient(tape, loss, x_adv)


def input_gradient(tape, loss, images):
    """Returns the gradient of `loss` with 0 for NaN and infinity, or says that there is none."""
    gradient = tape.gradient(loss, images)
    if gradient is None:
        raise ValueError(
            "This attack needs gradients; expected logits that depend differentiably on the images "
            "(else use an attack without gradients); received a model without any gradient"
        )
    return tf.where(tf.math.is_finite(gradient), gradient, tf.zeros_like(gradient))
