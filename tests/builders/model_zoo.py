"""Networks of every kind from images of 8 x 8 x 3 to features, small ones."""

import keras
import numpy as np
import tensorflow as tf

import he_keras as he
from he_keras.layers.batch_norm import BatchNormalization

SHAPE = (8, 8, 3)


class Shifting(keras.layers.Layer):
    """Without a `training` argument around a layer whose own default is training mode."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.shift = keras.layers.RandomTranslation(0.3, 0.3)

    def call(self, images):
        return self.shift(images)


class Around(keras.layers.Layer):
    """Holds `Shifting` one level deeper."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = Shifting()
        self.norm = keras.layers.BatchNormalization()

    def call(self, images):
        return self.norm(self.inner(images))


class Subclassed(keras.Model):
    """Says neither its shapes nor the mode."""

    def __init__(self, first=None, **kwargs):
        super().__init__(**kwargs)
        self.first = first or Shifting()
        self.conv = keras.layers.Conv2D(4, 3, activation="relu")
        self.norm = keras.layers.BatchNormalization()
        self.pool = keras.layers.GlobalAveragePooling2D()

    def call(self, images):
        return self.pool(self.norm(self.conv(self.first(images))))


class Gated(keras.Model):
    """Looks at its input's values in TensorFlow, with a flag of its own."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.body = subclassed_body()
        self.steepness = 2.0

    def call(self, images, training=False):
        bright = tf.cast(tf.reduce_mean(images, [1, 2, 3], keepdims=True) > 0.5, images.dtype)
        return self.body(images * (1.0 + self.steepness * bright), training=training)


def subclassed_body():
    layers = [keras.layers.Conv2D(4, 3), keras.layers.Dropout(0.9), keras.layers.Flatten()]
    return keras.Sequential(layers)


def functional(*first):
    """A convolution, batch norms and ReLU after some first layers."""
    images = x = keras.Input(SHAPE)
    for layer in first:
        x = layer(x)
    x = keras.layers.Conv2D(4, 3, padding="same", name="conv")(x)
    x = BatchNormalization(name="folded")(x)
    x = keras.layers.Activation("relu", name="relu")(x)
    x = BatchNormalization(name="passed")(x)
    x = keras.layers.Activation("relu")(x)
    x = keras.layers.Conv2D(6, 3, name="second")(x)
    return keras.Model(images, keras.layers.GlobalAveragePooling2D()(x))


def nested():
    """A functional model as a layer of another, after an augmentation."""
    images = keras.Input(SHAPE)
    return keras.Model(images, functional()(Around()(images)))


NETWORKS = {
    "functional": functional,
    "augmented": lambda: functional(keras.layers.RandomFlip(), keras.layers.RandomRotation(0.2)),
    "custom layer": lambda: functional(Shifting()),
    "deep custom layer": lambda: functional(Around()),
    "noise": lambda: functional(keras.layers.GaussianNoise(0.5), keras.layers.Dropout(0.5)),
    "nested": nested,
    "sequential": lambda: keras.Sequential(
        [keras.Input(SHAPE), Shifting(), keras.layers.Conv2D(4, 3), keras.layers.Flatten()]
    ),
    "sequential, late": subclassed_body,
    "subclassed": Subclassed,
    "subclassed around functional": lambda: Subclassed(first=functional_map()),
    "values": Gated,
    "layer": lambda: keras.layers.Pipeline([Shifting(), keras.layers.Flatten()]),
    "preact-resnet": lambda: he.networks.PreActResNet(SHAPE, (4, 8), (1, 1)),
    "wide-resnet": lambda: he.networks.WideResNet(10, 1, SHAPE),
    "lenet": lambda: he.networks.get("lenet", (8, 8, 3), width=2, standardize=False),
}


def functional_map():
    images = keras.Input(SHAPE)
    x = BatchNormalization()(keras.layers.Conv2D(3, 3, padding="same")(images))
    return keras.Model(images, x)


def model_of(name, head="cosine", seed=0):
    """An `HEAdversarialModel` on that network, every weight away from where it began."""
    keras.utils.set_random_seed(seed)
    heads = {"cosine": lambda: he.CosineHead(4, scale=9.0), "dense": lambda: keras.layers.Dense(4)}
    model = he.HEAdversarialModel(NETWORKS[name](), heads[head]())
    if not model.built:
        model.build((None, *SHAPE))
    generator = np.random.default_rng(seed)
    for weight in model.weights:
        if weight.path.endswith("moving_variance"):
            weight.assign(generator.uniform(0.5, 2.0, weight.shape))
        elif weight.dtype.startswith("float"):
            weight.assign(generator.normal(0.0, 0.3, weight.shape))
    return model


def images(count=6, seed=1):
    pixels = np.random.default_rng(seed).uniform(0, 1, (count, *SHAPE))
    return tf.constant(pixels.astype("float32"))
