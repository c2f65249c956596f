"""PGD with feature normalisation, the TRADES attack by name, and a victim's features and head."""

import feature_models as small
import keras
import numpy as np
import pytest
import tensorflow as tf
from feature_models import PARITY, THREAT

import he_keras as he
from he_keras import attacks
from he_keras.attacks import PGD, Victim
from he_keras.attacks.feature_norm_pgd import FeatureNormPGD

# The fast tests hold this attack to the promises of every attack and run its example.
pytestmark = pytest.mark.slow

KINDS = {
    "functional": small.functional,
    "sequential": small.sequential,
    "adversarial": small.adversarial,
}


def normalized_logits_gradient(x, y):
    """Gradient of CE(W phi / |phi|, y) with respect to the images, written out."""
    features, kernel = small.features(x), small.arrays()[1].astype(np.float64)
    length = np.linalg.norm(features, axis=1, keepdims=True)
    unit = features / length
    error = small.softmax(unit @ kernel) - np.eye(small.CLASSES)[y]
    toward = error @ kernel.T
    tangential = toward - unit * np.sum(unit * toward, axis=1, keepdims=True)
    return small.pull_back(x, tangential / length)


@pytest.mark.parametrize(("norm", "epsilon"), [("linf", 0.1), ("l2", 0.4)])
def test_every_step_follows_the_gradient_of_normalized_features(norm, epsilon):
    images, labels = small.images(), small.labels()
    expected = images.astype(np.float64)
    for _ in range(4):
        step = epsilon / 3 * small.unit(normalized_logits_gradient(expected, labels), norm)
        expected = small.project(expected + step, images, norm, epsilon)
    threat = he.ThreatModel(norm, epsilon)
    attack = FeatureNormPGD(threat, 4, epsilon / 3, **PARITY)
    result = attack(small.functional(), images, labels)
    np.testing.assert_allclose(result.x_adv, expected, atol=1e-5)
    plain = PGD(threat, 4, step_size=epsilon / 3, **PARITY)(small.functional(), images, labels)
    moved = np.abs(plain.x_adv - result.x_adv).max(axis=1) > 0.01
    assert moved.mean() > 0.3
    np.testing.assert_array_equal(result.forward_passes, 4 + 2)
    np.testing.assert_array_equal(result.backward_passes, 4)


def test_the_strongest_iterate_is_that_of_the_highest_loss_of_normalized_features():
    images, labels = small.images(), small.labels()
    result = FeatureNormPGD(he.ThreatModel("linf", 0.02), 5)(small.functional(), images, labels)
    held = ~result.success
    assert held.sum() > 10

    def loss(x):
        unit = small.features(x) / np.linalg.norm(small.features(x), axis=1, keepdims=True)
        chance = small.softmax(unit @ small.arrays()[1])
        return -np.log(chance[np.arange(len(labels)), labels])

    assert np.all(loss(result.x_adv)[held] > loss(images)[held])


def test_the_victims_own_logits_decide():
    """The bias alone makes the class here: no perturbation can change it, whatever the loss says"""
    last = small.head()
    last.set_weights([small.arrays()[1], np.array([100.0, 0.0, 0.0, 0.0], np.float32)])
    images, labels = small.images(), np.zeros(24, int)
    result = FeatureNormPGD(THREAT, 3)(small.functional(last), images, labels)
    assert not result.success.any()
    np.testing.assert_array_equal(result.backward_passes, 3)
    # PGD sees a saturated loss; the normalised one has no bias.
    blind = PGD(THREAT, 3, random_start=False)(small.functional(last), images, labels)
    assert np.abs(blind.x_adv - images).max() == 0.0
    assert np.abs(result.x_adv - images).max(axis=1).min() > 0.05


@pytest.mark.parametrize("head", ["dense", "cosine"])
def test_every_kind_of_model_is_attacked_alike(head):
    images = small.images()
    labels = np.argmax(small.functional(small.head(head))(images), axis=1)
    results = {}
    for kind, build in KINDS.items():
        attack = attacks.get("fn-pgd-3", THREAT, eot_samples=2, seed=5, batch_size=9)
        results[kind] = attack(build(small.head(head)), images, labels)
    for result in results.values():
        np.testing.assert_allclose(result.x_adv, results["functional"].x_adv, atol=1e-6)
        np.testing.assert_array_equal(result.success, results["functional"].success)
    held = ~result.success
    np.testing.assert_array_equal(result.backward_passes[held], 3 * 2)


def test_features_are_the_input_of_the_head():
    images = tf.constant(small.images())
    for head in ("dense", "cosine"):
        for build in KINDS.values():
            model = build(small.head(head))
            clean = model(images)
            for scale in ("model", 2.0):
                victim = Victim(model, scale)
                features = victim.features(images)
                np.testing.assert_allclose(features, small.features(images), atol=1e-6)
                logits = victim.logits_of_features(features)
                np.testing.assert_allclose(logits, victim.logits(images), atol=1e-5)
            assert np.abs(logits - clean).max() > 0.1
            kernel, bias = victim.head_weights()
            np.testing.assert_array_equal(kernel, small.arrays()[1])
            assert (bias is None) == (head == "cosine")
            if bias is not None:
                np.testing.assert_array_equal(bias, small.arrays()[2])


def test_a_head_that_was_called_in_another_model_first():
    last, shared = small.head(), small.body()
    other = keras.Input((small.FEATURES,))
    last(other)
    inputs = keras.Input((small.PIXELS,))
    model = keras.Model(inputs, last(shared(inputs)))
    features = Victim(model).features(tf.constant(small.images()))
    np.testing.assert_allclose(features, small.features(small.images()), atol=1e-6)


def test_features_within_a_function_and_after_a_change_of_weights():
    model = small.functional()
    victim = Victim(model)
    features = tf.function(victim.features)
    before = features(small.images())
    layer = model.layers[1]
    layer.set_weights([0.5 * small.arrays()[0]])
    after = features(small.images())
    np.testing.assert_allclose(np.arctanh(after), 0.5 * np.arctanh(before), atol=1e-4)


def test_features_run_in_inference_mode_and_in_float32():
    layers = keras.layers
    stack = [layers.Dropout(0.9), layers.BatchNormalization(), layers.Dense(3)]
    inputs = keras.Input((small.PIXELS,))
    hidden = inputs
    for layer in stack:
        layer.dtype_policy = "mixed_bfloat16"
        hidden = layer(hidden)
    victim = Victim(keras.Model(inputs, hidden))
    images = tf.constant(small.images())
    features = victim.features(images)
    assert features.dtype == tf.float32
    np.testing.assert_allclose(features, images, rtol=0.02)
    logits = victim.logits_of_features(features)
    assert logits.dtype == tf.float32
    np.testing.assert_array_equal(logits, victim.logits(images))
    assert victim.head_weights()[0].dtype == tf.float32


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.last = keras.layers.Dense(small.CLASSES)

    def call(self, batch):
        return self.last(batch)


class Headless(Subclassed):
    def features(self, batch, training=False):
        return batch


def pooled():
    inputs = keras.Input((4, 4, 3))
    return keras.Model(inputs, keras.layers.Dense(5)(inputs))


def with_another_head():
    model = small.functional()
    model.head = small.head()
    return model


NO_FEATURES = {
    "another head": (with_another_head, r"received the last layer 'dense\w*' \(Dense\)"),
    "function": (lambda: lambda batch: batch, "received function"),
    "subclassed": (Subclassed, "received Subclassed"),
    "unbuilt": (small.sequential, "received Sequential"),
    "activation": (
        lambda: keras.Sequential([keras.Input((8,)), small.body(), keras.layers.Activation("elu")]),
        r"received the last layer 'activation\w*' \(Activation\)",
    ),
    "operation": (
        lambda: keras.Model(
            (inputs := keras.Input((8,))), 2.0 * small.head()(small.body()(inputs))
        ),
        "received the last layer 'multiply",
    ),
    "feature maps": (pooled, r"expected a tensor of shape \(n, features\)"),
}


@pytest.mark.parametrize("kind", NO_FEATURES)
def test_models_without_features(kind):
    build, message = NO_FEATURES[kind]
    shape = (2, 4, 4, 3) if kind == "feature maps" else (2, 8)
    with pytest.raises(ValueError, match=message) as error:
        Victim(build()).features(tf.zeros(shape))
    assert "; expected" in str(error.value) and "; received" in str(error.value)


def test_heads_without_weights_to_use():
    softmax = keras.layers.Dense(small.CLASSES, activation="relu")
    for model, kind in (
        (small.functional(softmax), "received Dense"),
        (lambda batch: batch, "received no layer"),
        (small.functional(keras.layers.Activation("relu")), "received Activation"),
    ):
        with pytest.raises(ValueError, match=f"Dense layer without activation.*{kind}"):
            Victim(model).head_weights()
    with pytest.raises(ValueError, match="as attribute `head`; received Headless"):
        Victim(Headless()).logits_of_features(tf.zeros((2, 8)))
    with pytest.raises(ValueError, match="; expected a model with a method `features"):
        FeatureNormPGD(THREAT, 2)(
            lambda batch: batch[:, :4] - 1.0, small.images(), np.zeros(24, int)
        )


def test_configuration():
    attack = FeatureNormPGD(THREAT, 2, "1/255", random_start=0.02, eot_samples=3, seed=2)
    config = attack.get_config()
    assert not {"loss", "margin", "decay"} & set(config)
    again = FeatureNormPGD.from_config(config)
    assert again.get_config() == config and (again.num_steps, again.eot_samples) == (2, 3)
    with pytest.raises(TypeError, match="loss"):
        FeatureNormPGD(THREAT, 2, loss="cw")


def test_the_trades_attack_has_the_released_settings():
    attack = attacks.get("trades-kl-10", he.ThreatModel("linf", 0.031))
    default = attacks.projected_gradient.TradesKL(he.ThreatModel("linf", 0.031))
    for each in (attack, default):
        assert each.num_steps == 10
        assert each.step_size == pytest.approx(0.007, rel=1e-12)
        assert (each.loss, each.random_start) == ("kl", "gaussian")
        assert each.decay is None and each.margin == 0.0
    assert attack.name == "trades-kl-10" and default.name == "trades-kl"
    own = attacks.get("trades-kl-3", THREAT, step_size=0.01, keep="last")
    assert (own.num_steps, own.step_size, own.keep) == (3, 0.01, "last")
    result = own(small.functional(), small.images(), small.labels())
    held = ~result.success
    np.testing.assert_array_equal(result.backward_passes[held], 3)
    assert np.abs(result.x_adv - small.images())[held].max() == pytest.approx(0.03, abs=0.005)
