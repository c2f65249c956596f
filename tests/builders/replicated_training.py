"""The same training with one replica and with two."""

import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import he_keras as he
from he_keras import objectives

SHAPE = (4, 4, 1)


THREAT = he.ThreatModel("linf", 0.1)


BATCH_SIZE = 8


TOLERANCE = 1e-5


class FixedStartTRADES(objectives.TRADES):
    """Its adversary starts at a fixed offset, since the KL has no gradient at the image."""

    def craft(self, model, images, labels, seed=(0, 0)):
        offset = 0.02 * tf.sin(7.0 * tf.range(16, dtype=tf.float32))
        start = images + tf.reshape(offset, SHAPE)
        crafted = self.attack.ascend(he.attacks.Victim(model), images, labels, start).x_adv
        return tf.stop_gradient(self.threat.project(crafted, images))


def iterated(build):
    return build(THREAT, num_steps=3, step_size=0.04, random_start=False)


OBJECTIVES = {
    "standard": lambda: objectives.Standard(THREAT),
    "pgd_at": lambda: iterated(objectives.PGDAT),
    "alp": lambda: iterated(objectives.ALP),
    "trades": lambda: FixedStartTRADES(THREAT, num_steps=3, step_size=0.04),
    "free_at": lambda: objectives.FreeAT(THREAT, num_replays=2),
    "mart": lambda: iterated(objectives.MART),
    "n_fgsm": lambda: objectives.NFGSM(THREAT, noise_ratio=0.0),
    "n_fgsm released": lambda: objectives.NFGSM(THREAT, noise_ratio=0.0, attack_training_mode=True),
    "fast_at": lambda: objectives.FastAT(THREAT, initialization="zero"),
    "fast_at released": lambda: objectives.FastAT(
        THREAT, initialization="zero", attack_training_mode=True
    ),
}


@functools.cache
def mirrored():
    """One strategy for all tests.

    The default reduction is by collective operations. Those of a second strategy in the same
    process, such as another test file's, clash with those of the first.
    """
    reduction = tf.distribute.ReductionToOneDevice()
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=reduction)


def examples(count):
    generator = np.random.default_rng(0)
    images = generator.uniform(0.0, 1.0, (count, *SHAPE)).astype(np.float32)
    return images, generator.integers(0, 3, count)


def build_network(batch_norm):
    # Not ReLU: where a single unit is active, the direction of the features is constant, and signs
    # of the gradient are those of rounding errors.
    dense = keras.layers.Dense(6, activation="tanh", kernel_regularizer="l2")
    layers = [keras.Input(SHAPE), keras.layers.Flatten(), dense]
    if batch_norm:
        synchronized = batch_norm == "synchronized"
        layers.append(keras.layers.BatchNormalization(synchronized=synchronized))
    return keras.Sequential(layers)


def build_model(objective, strategy=None, batch_norm=None, **options):
    """Builds and compiles a model, in the scope of the strategy, with weights that are fixed."""
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        head = he.CosineHead(3, scale=4.0)
        model = he.HEAdversarialModel(build_network(batch_norm), head, OBJECTIVES[objective]())
        generator = np.random.default_rng(7)
        for variable in model.trainable_variables:
            variable.assign(generator.normal(0.0, 0.5, variable.shape))
        model.compile(optimizer=keras.optimizers.SGD(0.02, momentum=0.9), **options)
    return model


def both(objective, batch_norm=None, **options):
    """One device, which steps eagerly to save the tracing, and two replicas."""
    return [
        build_model(objective, None, batch_norm, run_eagerly=True, **options),
        build_model(objective, mirrored(), batch_norm, **options),
    ]


class StepLosses(keras.callbacks.Callback):
    """Keeps the logs of every step."""

    def __init__(self):
        super().__init__()
        self.logs = []

    def on_train_batch_end(self, batch, logs=None):
        self.logs.append({name: float(value) for name, value in logs.items()})


def train(model, count, epochs=1, weights=None, **options):
    images, labels = examples(count)
    parts = (images, labels) if weights is None else (images, labels, weights)
    data = tf.data.Dataset.from_tensor_slices(parts).batch(BATCH_SIZE)
    steps = StepLosses()
    history = model.fit(data, epochs=epochs, verbose=0, callbacks=[steps], **options).history
    return history, steps.logs


def assert_equal_training(models, results):
    """Weights, per-step logs and epoch results agree."""
    (single_history, single_steps), (several_history, several_steps) = results
    for single, several in zip(single_steps, several_steps, strict=True):
        assert several == pytest.approx(single, rel=TOLERANCE, abs=1e-7)
    assert several_history.keys() == single_history.keys()
    for name, values in single_history.items():
        np.testing.assert_allclose(several_history[name], values, rtol=TOLERANCE, atol=1e-7)
    for weight, expected in zip(models[1].get_weights(), models[0].get_weights(), strict=True):
        np.testing.assert_allclose(weight, expected, atol=TOLERANCE)
