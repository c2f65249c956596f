"""A small network with smooth features, as a Keras model and in NumPy, for attacks on features."""

import functools

import keras
import numpy as np

import he_keras as he

PIXELS, FEATURES, CLASSES = 8, 6, 4
THREAT = he.ThreatModel("linf", 0.1)
PARITY = {"random_start": False, "keep": "last", "stop_when_broken": False}


@functools.cache
def arrays():
    """Weights of the body, kernel and bias of the head."""
    random = np.random.default_rng(3)
    body = random.normal(size=(PIXELS, FEATURES))
    kernel = random.normal(size=(FEATURES, CLASSES))
    return tuple(each.astype(np.float32) for each in (body, kernel, random.normal(size=CLASSES)))


@functools.cache
def images(count=24):
    return np.random.default_rng(4).uniform(size=(count, PIXELS)).astype(np.float32)


def body():
    """The layer from images to features."""
    layer = keras.layers.Dense(FEATURES, activation="tanh", use_bias=False)
    layer.build((None, PIXELS))
    layer.set_weights([arrays()[0]])
    return layer


def head(kind="dense"):
    """A `Dense` layer with bias, or a `CosineHead`."""
    if kind == "dense":
        layer, weights = keras.layers.Dense(CLASSES), list(arrays()[1:])
    else:
        layer, weights = he.CosineHead(CLASSES, scale=9.0), [arrays()[1]]
    layer.build((None, FEATURES))
    layer.set_weights(weights)
    return layer


def functional(last=None):
    inputs = keras.Input((PIXELS,))
    return keras.Model(inputs, (last or head())(body()(inputs)))


def sequential(last=None):
    """Built by its first call, as attacks make it."""
    return keras.Sequential([body(), last or head()])


def adversarial(last=None):
    network = keras.Sequential([keras.Input((PIXELS,)), body()])
    return he.HEAdversarialModel(network, last or head())


def features(x):
    return np.tanh(np.asarray(x, np.float64) @ arrays()[0])


def logits(x):
    return features(x) @ arrays()[1] + arrays()[2]


def pull_back(x, feature_gradient):
    """Gradient with respect to the images, given the one with respect to the features."""
    return (feature_gradient * (1 - features(x) ** 2)) @ arrays()[0].T.astype(np.float64)


def labels(count=24):
    return logits(images(count)).argmax(axis=1)


def softmax(values):
    powers = np.exp(values - values.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def unit(gradient, norm):
    """The steepest step: signs, or a unit vector."""
    if norm == "linf":
        return np.sign(gradient)
    return gradient / np.linalg.norm(gradient, axis=-1, keepdims=True)


def project(x_adv, x, norm, epsilon):
    perturbation = x_adv - x
    if norm == "linf":
        perturbation = np.clip(perturbation, -epsilon, epsilon)
    else:
        length = np.linalg.norm(perturbation, axis=-1, keepdims=True)
        perturbation = perturbation * np.minimum(1.0, epsilon / np.maximum(length, 1e-12))
    return np.clip(x + perturbation, 0.0, 1.0)


def margins(values, y):
    """True logit minus the largest other one."""
    rows = np.arange(len(y))
    others = np.array(values, np.float64)
    others[rows, y] = -np.inf
    return values[rows, y] - others.max(axis=1)


def check_batches_restarts_and_seeds(attack, *attacked):
    """What an attack finds, whatever the batch size; restarts only help, seeds differ.

    What is changed here, past the seal, is not compiled in: one trace serves all.
    """
    settings, before = vars(attack), {**vars(attack)}
    whole = attack(*attacked)
    held = ~whole.success
    for settings["batch_size"] in (5, 1):
        other = attack(*attacked)
        np.testing.assert_allclose(other.x_adv, whole.x_adv, atol=1e-5)
        np.testing.assert_array_equal(other.backward_passes, whole.backward_passes)
        np.testing.assert_array_equal(other.forward_passes, whole.forward_passes)
    settings.update(batch_size=24, num_restarts=3)
    again = attack(*attacked)
    assert np.all(again.margin[held] <= whole.margin[held])
    assert np.mean(again.margin[held]) < np.mean(whole.margin[held]) - 1e-3
    settings.update(num_restarts=1, seed=1)
    other = attack(*attacked)
    assert np.all(np.abs(other.x_adv - whole.x_adv).max(axis=1) > 1e-3)
    settings["seed"] = before["seed"]
    return whole
