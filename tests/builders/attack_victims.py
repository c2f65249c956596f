"""Small classifiers with known weights, and images for them, for the tests of attacks."""

import functools

import keras
import numpy as np
import tensorflow as tf

import he_keras as he

THREAT = he.ThreatModel("linf", 0.05)
PIXELS, CLASSES = 12, 4
PARITY = {"random_start": False, "keep": "last", "stop_when_broken": False}


@functools.cache
def weights():
    random = np.random.default_rng(0)
    return random.normal(size=(PIXELS, CLASSES)).astype(np.float32)


@functools.cache
def images(count=20):
    return np.random.default_rng(1).uniform(size=(count, 2, 2, 3)).astype(np.float32)


def linear(batch):
    return tf.linalg.matmul(tf.reshape(batch, [-1, PIXELS]), tf.cast(weights(), batch.dtype))


def labels(count=20):
    """What `linear` predicts, but for every fifth image."""
    predicted = linear(tf.constant(images(count))).numpy().argmax(axis=1)
    predicted[::5] = (predicted[::5] + 1) % CLASSES
    return predicted


def seeds_of(count, draw=0):
    """The seeds that an attack of seed 0 hands to `run`: number of the draw, and of the example."""
    return np.stack([np.full(count, draw), np.arange(count)], axis=1).astype(np.int32)


class Counting:
    """A linear classifier that counts how often Python runs it, and which batch sizes it sees."""

    def __init__(self, model=linear):
        self.model = model
        self.calls = 0

    def __call__(self, batch):
        self.calls += 1
        return self.model(batch)


def dense():
    layer = keras.layers.Dense(CLASSES, use_bias=False)
    layer.build((None, PIXELS))
    layer.set_weights([weights()])
    return layer


def functional():
    inputs = keras.Input((2, 2, 3))
    return keras.Model(inputs, dense()(keras.layers.Flatten()(inputs)))


def cosine_model(scale=15.0, margin=0.2):
    network = keras.Sequential([keras.Input((2, 2, 3)), keras.layers.Flatten()])
    head = he.CosineHead(CLASSES, scale=scale, margin=margin)
    model = he.HEAdversarialModel(network, head)
    head.set_weights([weights()])
    return model


class Module(tf.Module):
    def __init__(self):
        super().__init__()
        self.weights = tf.Variable(weights())

    def logits(self, batch):
        return tf.reshape(batch, [-1, PIXELS]) @ self.weights

    @tf.function
    def compiled_logits(self, batch):
        return self.logits(batch)
