"""Small models for the tests of export, with weights that no initialiser draws."""

import keras
import numpy as np

import he_keras as he

SCALE = 12.0
NAMES = ("ant", "bee", "cat", "dog", "eel")


def hypersphere_model(image_shape=(8, 8, 3), head=None, dtype="float32"):
    """A convolution, batch norm and a cosine head of five classes."""
    keras.utils.set_random_seed(3)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(dtype)
    try:
        network = keras.Sequential(
            [
                keras.Input(image_shape),
                keras.layers.Conv2D(8, 3, strides=2),
                he.layers.BatchNormalization(),
                keras.layers.ReLU(),
                keras.layers.GlobalAveragePooling2D(),
            ]
        )
        head = head or he.CosineHead(5, scale=SCALE, margin=0.2)
        objective = he.objectives.PGDAT(he.ThreatModel("linf", 0.05), num_steps=1)
        model = he.HEAdversarialModel(network, head, objective)
    finally:
        keras.config.set_dtype_policy(before)
    random = np.random.RandomState(4)
    # Moving variances must be positive.
    model.set_weights(
        [
            0.5 + random.rand(*value.shape) if variable.name == "moving_variance" else value
            for variable, value in zip(model.weights, _drawn(model, random), strict=True)
        ]
    )
    return model


def _drawn(model, random):
    return [random.normal(size=value.shape).astype("float32") for value in model.get_weights()]


def random_images(count, image_shape=(8, 8, 3), seed=1):
    """uint8 images, and the same as floats in [0, 1]."""
    images = np.random.RandomState(seed).randint(0, 256, (count, *image_shape)).astype(np.uint8)
    return images, images.astype(np.float32) / np.float32(255.0)


def softmax(logits):
    exponentials = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    return exponentials / exponentials.sum(axis=1, keepdims=True)
