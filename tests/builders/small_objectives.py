"""A small model for any objective, its examples, and what a step does to it."""

import keras
import numpy as np

import he_keras as he

SHAPE = (3, 3, 1)


THREAT = he.ThreatModel("linf", 0.1)


MOMENTUM = 0.9


def examples(count=6):
    generator = np.random.default_rng(0)
    images = generator.uniform(0.2, 0.8, (count, *SHAPE)).astype(np.float32)
    return images, generator.integers(0, 4, count)


class CallCounter(keras.layers.Layer):
    """Notes the training flag of every call; with `run_eagerly`, every call is a real pass."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.flags = []

    def call(self, inputs, training=None):
        self.flags.append(training)
        return inputs


def build_model(objective, head=None, batch_norm=True, counter=None):
    """Batch norm comes first, so that its statistics are those of the images of each pass."""
    keras.utils.set_random_seed(1)
    layers = [keras.Input(SHAPE), keras.layers.Flatten()]
    if counter is not None:
        layers.append(counter)
    if batch_norm:
        layers.append(keras.layers.BatchNormalization(momentum=MOMENTUM, name="batch_norm"))
    layers.append(keras.layers.Dense(5, activation="relu", name="dense"))
    head = he.CosineHead(4, scale=5.0) if head is None else head
    return he.HEAdversarialModel(keras.Sequential(layers), head, objective, None)


def moving_statistics(model):
    layer = model.network.get_layer("batch_norm")
    return np.stack([layer.moving_mean.numpy(), layer.moving_variance.numpy()])


def train_one_step(model, images, labels, **options):
    model.compile(optimizer=keras.optimizers.SGD(0.1), **options)
    model.fit(images, labels, batch_size=len(images), shuffle=False, verbose=0)
    return model
