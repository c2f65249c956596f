"""A zoo of deliberately broken classifiers of scikit-learn's digits, each beside its honest twin.

The honest models are random features with a closed-form read-out: built in a moment, and neither
hopeless nor perfect under attack. Every broken model takes one of them and does one thing wrong.

    python tests/builders/broken_models.py

prints which checks fire on which model, as the Markdown table of docs/reference/checks.md.
"""

import functools
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import he_keras as he
from he_keras.evaluation.checks import preflight, sanity_checks
from he_keras.evaluation.checks.table import CHECKS

THREAT = he.ThreatModel("linf", 0.08)
FEATURES = 96
NUM_EXAMPLES = 64
HONEST = ("honest", "honest_cosine")
SKIPPED_WITHOUT_EVALUATION = {"worst-case-holds"}
ALL_AFTER = "all after the attacks"

#: What must fire, before and after the attacks; further checks may.
MUST_FIRE = {
    "softmax_output": {"logits"},
    "quantised_input": {"differentiable", "noisy-loss-surface"},
    "saturated_quantiser": {
        "zero-gradients",
        "black-box",
        "random-noise",
        "half-range-attack",
        "unbounded-attack",
        "planted-adversarial",
    },
    "straight_through_quantiser": {"gradient-direction", "noisy-loss-surface"},
    "noise_layer": {"deterministic", "noisy-loss-surface", "silent-success"},
    "shattered_gradient": {
        "gradient-direction",
        "noisy-loss-surface",
        "iterative-beats-single-step",
        "half-range-attack",
        "unbounded-attack",
        "planted-adversarial",
    },
    "scale_1000": {"zero-gradients", "loss-gap", "logit-rescale"},
    "training_batch_norm": {"batch-independence", "frozen-state", "silent-success"},
    "wrong_range": {"clean-accuracy"},
    "stochastic_activation": {"deterministic", "noisy-loss-surface", "silent-success"},
    "shuffled_labels": {"clean-accuracy", "label-order"},
    "cosine_scale_1": {"loss-gap", "logit-rescale"},
    "masked_head": {"gradient-direction", "transfer-without-head", "black-box"},
}


@functools.cache
def digits():
    """Images 8x8x1 in [0, 1] and labels: training part and test part."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = (data.images / 16.0).astype(np.float32)[..., np.newaxis]
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = images[order], data.target[order]
    return (images[:1200], labels[:1200]), (images[1200:], labels[1200:])


def sample(count=NUM_EXAMPLES):
    images, labels = digits()[1]
    return images[:count], labels[:count]


@functools.cache
def body(seed):
    """Flatten, random dense layer, batch norm with the statistics of the training images."""
    random = np.random.default_rng(seed)
    kernel = random.normal(size=(64, FEATURES)).astype(np.float32) / 8.0
    bias = random.uniform(-0.5, 0.5, FEATURES).astype(np.float32)
    inputs = keras.Input((8, 8, 1))
    dense = keras.layers.Dense(FEATURES, activation="softplus")
    norm = keras.layers.BatchNormalization()
    model = keras.Model(inputs, norm(dense(keras.layers.Flatten()(inputs))))
    dense.set_weights([kernel, bias])
    hidden = np.logaddexp(0.0, digits()[0][0].reshape(-1, 64) @ kernel + bias)
    ones = np.ones(FEATURES)
    norm.set_weights([ones, 0 * ones, hidden.mean(axis=0), hidden.var(axis=0) + 1e-3])
    return model


def readout(seed, ridge=300.0):
    """Least squares onto +18 for the class and -2 for the others."""
    images, labels = digits()[0]
    features = body(seed).predict(images, verbose=0).astype(np.float64)
    features = np.hstack([features, np.ones((len(features), 1))])
    targets = 20.0 * np.eye(10)[labels] - 2.0
    gram = features.T @ features + ridge * np.eye(features.shape[1])
    solution = np.linalg.solve(gram, features.T @ targets)
    return solution[:-1], solution[-1]


@functools.cache
def honest(seed=0):
    head = keras.layers.Dense(10)
    model = keras.Model(body(seed).input, head(body(seed).output))
    head.set_weights(readout(seed))
    return model


@functools.cache
def honest_cosine(seed=0, scale=15.0):
    """A cosine head whose class vectors are the columns of the least-squares solution."""
    head = he.CosineHead(10, scale=scale)
    model = keras.Model(body(seed).input, head(body(seed).output))
    head.set_weights([readout(seed)[0]])
    return model


def softmax_output(seed=0):
    return keras.Sequential([honest(seed), keras.layers.Softmax()])


def quantised_input(seed=0):
    """Rounds pixels to five values, which has no gradient."""
    model = honest(seed)
    return lambda images: model(tf.round(4.0 * images) / 4.0, training=False)


def saturated_quantiser(seed=0):
    """Rounds pixels by steep sigmoids, whose gradient underflows to zero nearly everywhere."""
    model = honest(seed)

    def logits(images):
        steps = [tf.sigmoid(4000.0 * (images - level)) for level in (0.11, 0.36, 0.61, 0.86)]
        return model(tf.add_n(steps) / 4.0, training=False)

    return logits


def straight_through_quantiser(seed=0):
    """Rounds pixels, and pretends in the gradient that it did not."""
    model = honest(seed)

    def logits(images):
        rounded = tf.round(4.0 * images) / 4.0
        return model(images + tf.stop_gradient(rounded - images), training=False)

    return logits


def noise_layer(seed=0):
    """Adds noise to the pixels at every call."""
    model = honest(seed)

    def logits(images):
        noise = tf.random.normal(tf.shape(images), stddev=0.15)
        return model(images + noise, training=False)

    return logits


def shattered_gradient(seed=0):
    """Adds ripples of small height and enormous slope to every pixel."""
    model = honest(seed)
    return lambda images: model(images + 0.01 * tf.sin(3e4 * images), training=False)


def scale_1000(seed=0):
    model = honest(seed)
    return lambda images: 1000.0 * model(images, training=False)


def training_batch_norm(seed=0):
    model = keras.models.clone_model(honest(seed))
    model.set_weights(honest(seed).get_weights())
    return lambda images: model(images, training=True)


def wrong_range(seed=0):
    """Expects pixels in 0..255."""
    model = honest(seed)
    return lambda images: model(images / 255.0, training=False)


def stochastic_activation(seed=0):
    """Drops a fifth of the features at every call."""
    network = body(seed)
    kernel, bias = (tf.constant(each, tf.float32) for each in readout(seed))

    def logits(images):
        features = network(images, training=False)
        return tf.nn.dropout(features, 0.2) @ kernel + bias

    return logits


def shuffled_labels(seed=0):
    model, order = honest(seed), np.roll(np.arange(10), 3)
    return lambda images: tf.gather(model(images, training=False), order, axis=1)


class MaskedHead(he.CosineHead):
    """Answers rightly, and reverses its gradient."""

    def call(self, features):
        @tf.custom_gradient
        def reversed_gradient(values):
            return values, lambda upstream: -upstream

        return super().call(reversed_gradient(features))


def masked_head(seed=0):
    head = MaskedHead(10)
    model = keras.Model(body(seed).input, head(body(seed).output))
    head.set_weights([readout(seed)[0]])
    return model


def cosine_scale_1(seed=0):
    """The raw cosines that the HE paper evaluates: no class can be predicted with confidence."""
    return honest_cosine(seed, scale=1.0)


def checks(name, seed=0, before=True, after=True):
    """Runs the checks on the model of that name."""
    model = getattr(sys.modules[__name__], name)(seed)
    images, labels = sample()
    found = []
    if before:
        found += preflight(model, *sample(128), THREAT)
    if after:
        found += sanity_checks(model, images, labels, THREAT, seed=seed)
    return found


def row_of(name, found):
    """The row of a model in the table: what fails, what warns and what is skipped."""
    named = {
        verdict: [each.name for each in found if each.verdict == verdict]
        for verdict in ("fail", "warn", "skipped")
    }
    after = [row.name for row in CHECKS if row.when == "after"]
    if set(after) <= set(named["skipped"]):
        others = [each for each in named["skipped"] if each not in after]
        named["skipped"] = [ALL_AFTER, *others]
    cells = [", ".join(named[verdict]) for verdict in named]
    return f"| {' | '.join([name.replace('_', ' '), *cells])} |"


def table(names, seed=0):
    """The Markdown table of what does not pass: one row for each model."""
    lines = ["| model | FAIL | warn | skipped |", "|---|---|---|---|"]
    for name in names:
        keras.utils.set_random_seed(seed)
        lines.append(row_of(name, checks(name, seed)))
    return "\n".join(lines)


if __name__ == "__main__":
    chosen = sys.argv[1:] or [*HONEST, *MUST_FIRE]
    print(table(chosen))
