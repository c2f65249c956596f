"""Layers that augment images inside a network: found at any depth."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import he_keras as he
from he_keras.networks.checks import augmentation_layers

layers = keras.layers
SHAPE = (8, 8, 3)


class Shift(layers.Layer):
    """A custom augmentation that Keras knows nothing of."""

    def call(self, images, training=False):
        return tf.roll(images, 1, axis=1) if training else images


class Wrapped(layers.Layer):
    """Hides an augmentation, and passes no mode on."""

    def __init__(self):
        super().__init__()
        self.inner = [layers.Activation("relu"), layers.RandomRotation(0.1)]

    def call(self, images):
        for layer in self.inner:
            images = layer(images)
        return images


class Normalise(layers.Layer):
    def call(self, images, training=False):
        return images - 0.5


class DropPath(layers.Layer):
    """Custom randomness in training, but after weights: no augmentation."""

    def call(self, images, training=False):
        return images * tf.random.uniform([]) if training else images


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.body = keras.Sequential([layers.RandomTranslation(0.1, 0.1), layers.Flatten()])

    def call(self, images, training=None):
        return self.body(images, training=training)


def network(*first):
    return keras.Sequential([keras.Input(SHAPE), *first, layers.Flatten(), layers.Dense(4)])


def functional(*first):
    images = hidden = keras.Input(SHAPE)
    for layer in first:
        hidden = layer(hidden)
    return keras.Model(images, layers.Dense(4)(layers.Flatten()(hidden)))


FOUND = {
    "flip": (lambda: network(layers.RandomFlip(name="a")), ["a"]),
    "translation": (lambda: functional(layers.RandomTranslation(0.1, 0.1, name="a")), ["a"]),
    "two": (lambda: network(layers.RandomZoom(0.1), layers.RandomCrop(6, 6, name="a")), 2),
    "nested": (
        lambda: network(keras.Sequential([layers.Rescaling(1.0), layers.RandomFlip(name="a")])),
        ["a"],
    ),
    "after weights": (lambda: network(layers.Conv2D(3, 3), layers.RandomFlip(name="a")), ["a"]),
    "pipeline": (lambda: network(layers.Pipeline([layers.RandomFlip(name="a")])), ["a"]),
    "training only": (lambda: network(layers.Equalization((0, 1), name="a")), ["a"]),
    "custom": (lambda: functional(Shift(name="a")), ["a"]),
    "custom nested": (lambda: network(keras.Sequential([Shift(name="a")])), ["a"]),
    "custom wrapper": (lambda: network(Wrapped()), 1),
    "subclassed": (Subclassed, 1),
}


@pytest.mark.parametrize("kind", FOUND)
def test_augmentation_is_found(kind):
    make, expected = FOUND[kind]
    found = augmentation_layers(make())
    assert len(found) == expected if isinstance(expected, int) else found == expected


def test_what_is_no_augmentation_is_left_alone():
    kept = network(
        layers.Rescaling(1 / 255),
        layers.Resizing(6, 6),
        layers.CenterCrop(5, 5),
        layers.GaussianNoise(0.1),
        layers.Dropout(0.1),
        Normalise(),
        layers.Conv2D(3, 3),
        layers.BatchNormalization(),
        DropPath(),
    )
    assert augmentation_layers(kept) == []
    assert augmentation_layers(he.networks.get("preact-resnet-18", (32, 32, 3))) == []


def model_of(body, objective):
    model = he.HEAdversarialModel(body, layers.Dense(2), objective, evaluation_attack=None)
    model.compile(optimizer=keras.optimizers.SGD(0.1))
    return model


@pytest.mark.parametrize("name", ["pgd_at", "free_at", "trades"])
def test_training_behind_an_augmentation_is_refused_before_any_step(name):
    body = network(layers.RandomTranslation(0.2, 0.2))
    model = model_of(body, he.objectives.get(name, he.ThreatModel()))
    images, labels = np.zeros((4, *SHAPE), "float32"), np.zeros(4, int)
    with pytest.raises(ValueError, match="in the data: train.map.*layers random_translation"):
        model.fit(images, labels, verbose=0)
    with pytest.raises(ValueError, match="augments images in training"):
        model.train_on_batch(images, labels)
    assert int(model.optimizer.iterations) == 0


def test_training_on_clean_images_may_augment():
    model = model_of(network(layers.RandomFlip()), he.objectives.Standard())
    images, labels = np.zeros((4, *SHAPE), "float32"), np.zeros(4, int)
    model.fit(images, labels, verbose=0)
    assert int(model.optimizer.iterations) == 1
