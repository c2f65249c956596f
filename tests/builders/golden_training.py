"""Losses and gradients of the golden models."""

import golden_models
import numpy as np
import tensorflow as tf

import he_keras as he

# The stored values are float64; the README expects these relative tolerances of a port.
TOLERANCES = {"float32": 1e-4, "float64": 1e-8}


def build_model(file, head_options, objective):
    head = golden_models.head(file)
    if head_options is not None:
        kernel = head.get_weights()
        head = he.CosineHead(10, scale=golden_models.SCALE, **head_options)
        head.build((None, 64))
        head.set_weights(kernel)
    return he.HEAdversarialModel(golden_models.network(file), head, objective)


def loss_and_gradients(file, head_options, objective):
    """Mean loss and its gradient for each array, as the README names them."""
    stored = golden_models.arrays(f"train_{file}")
    model = build_model(file, head_options, objective)
    images = tf.constant(stored["x_uint8"] / np.float32(255))
    with tf.GradientTape() as tape:
        per_example = objective.loss(model, images, stored["y"], stored["x_adv"], training=True)
        loss = tf.reduce_mean(per_example)
    assert per_example.shape == (8,)
    names = [f"{layer}_{kind}" for layer in ("conv1", "conv2", "dense1") for kind in KINDS]
    names += ["head_kernel", "head_bias"][: len(model.head.trainable_variables)]
    gradients = tape.gradient(loss, model.trainable_variables)
    return loss.numpy(), {
        name: gradient.numpy() for name, gradient in zip(names, gradients, strict=True)
    }


KINDS = ("kernel", "bias")


def assert_close(actual, desired, tolerance):
    """Relative to the largest entry: single entries of a gradient may be zero."""
    np.testing.assert_allclose(actual, desired, rtol=0, atol=tolerance * np.abs(desired).max())
