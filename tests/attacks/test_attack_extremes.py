"""Every registered attack on models without a slope, with NaN, and with 2 to 1,000 classes."""

import numpy as np
import pytest
import registered_attacks
import tensorflow as tf

import he_keras as he
from he_keras import attacks

pytestmark = pytest.mark.slow

THREATS = {"linf": he.ThreatModel("linf", "8/255"), "l2": he.ThreatModel("l2", 0.25)}
EXAMPLES = 6
#: They need the model's features or head, or come with a model of their own.
OTHER_MODELS = ("feature", "fn-pgd", "transfer")
#: Settings of PGD, and ensembles of attacks that are tried alone: nothing else happens in them.
LIKE_OTHERS = (
    "bim",
    "mim",
    "autoattack-fast-first",
    "autoattack-plus",
    "autoattack-rand",
    "fast",
    "screen",
)
NAMES = [
    name
    for name in attacks.names()
    if registered_attacks.base_name(name) not in (*OTHER_MODELS, *LIKE_OTHERS)
]

every_attack = pytest.mark.parametrize("name", NAMES)


def images():
    return np.random.default_rng(0).uniform(size=(EXAMPLES, 8, 8, 3)).astype(np.float32)


def linear(num_classes):
    random = np.random.default_rng(1)
    weights = random.normal(size=(192, num_classes)).astype(np.float32)
    return lambda batch: tf.reshape(batch, [-1, 192]) @ tf.cast(weights, batch.dtype)


def run(name, model, labels):
    threat = THREATS["l2" if registered_attacks.base_name(name) == "cw-l2" else "linf"]
    if "cw-l2" in name:
        threat = THREATS["l2"]
    result = registered_attacks.build(name, threat)(model, images(), labels)
    assert np.isfinite(result.x_adv).all()
    assert result.x_adv.min() >= 0.0 and result.x_adv.max() <= 1.0
    reach = np.asarray(threat.distance(result.x_adv, images()))
    assert reach.max() <= threat.epsilon + 1e-6
    assert not np.isnan(result.distance).any()
    return result


@every_attack
def test_no_slope(name):
    """The logits depend on the image, by a factor of zero."""
    logits = tf.constant([[3.0, 1.0, 0.0, -1.0, -2.0]])
    flat = lambda batch: logits + 0.0 * tf.reduce_sum(batch, axis=[1, 2, 3])[:, None]  # noqa: E731
    result = run(name, flat, np.zeros(EXAMPLES, int))
    assert not result.success.any() and not result.non_finite.any()


@every_attack
def test_nan_is_reported_and_counts_as_broken_among_a_thousand_classes(name):
    """The second half of the images gives NaN, whatever an attack does to it."""
    model, bright = linear(1000), tf.constant(images()[EXAMPLES // 2 :])

    def brittle(batch):
        flat = tf.reshape(batch, [-1, 1, 192])
        apart = tf.reduce_max(tf.abs(flat - tf.reshape(bright, [1, -1, 192])), axis=2)
        is_bright = tf.reduce_any(apart < 0.05, axis=1)[:, None]
        return tf.where(is_bright, np.nan, model(batch))

    labels = model(images()).numpy().argmax(axis=1)
    result = run(name, brittle, labels)
    np.testing.assert_array_equal(result.non_finite, [False] * 3 + [True] * 3)
    assert result.success[3:].all()


@every_attack
def test_two_classes(name):
    model = linear(2)
    labels = model(images()).numpy().argmax(axis=1)
    try:
        result = run(name, model, labels)
    except ValueError as error:
        assert "Too few classes" in str(error)
        return
    assert result.success.shape == (EXAMPLES,)
