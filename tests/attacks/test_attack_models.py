"""Attacks on every kind of model, dtype and shape; logits that are not finite."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from attack_victims import (
    CLASSES,
    PIXELS,
    THREAT,
    Counting,
    Module,
    dense,
    functional,
    images,
    labels,
    linear,
    weights,
)

import he_keras as he
from he_keras.attacks import (
    BIM,
    MIM,
    PGD,
    Attack,
    Victim,
)


class Subclassed(keras.Model):
    """Without a `training` argument, and built by its first call."""

    def __init__(self):
        super().__init__()
        self.flatten = keras.layers.Flatten()
        self.dense = keras.layers.Dense(
            CLASSES, use_bias=False, kernel_initializer=keras.initializers.Constant(weights())
        )

    def call(self, batch):
        return self.dense(self.flatten(batch))


# A `tf.function` that is a method keeps only a weak reference to its object.
MODULE = Module()


MODELS = {
    "functional": functional,
    "sequential": lambda: keras.Sequential([keras.layers.Flatten(), dense()]),
    "subclassed": Subclassed,
    "adversarial": lambda: he.HEAdversarialModel(
        keras.Sequential([keras.Input((2, 2, 3)), keras.layers.Flatten()]), dense()
    ),
    "layer": lambda: keras.layers.Pipeline([keras.layers.Flatten(), dense()]),
    "lambda": lambda: lambda batch: linear(batch),
    "partial": lambda: functools.partial(linear),
    "object": Counting,
    "tf.function": lambda: tf.function(linear),
    "bound method": lambda: Module().logits,
    "compiled bound method": lambda: MODULE.compiled_logits,
    "python branches": lambda: branching,
}


@functools.cache
def result_on_linear():
    return PGD(THREAT, 3)(linear, images(), labels())


def branching(batch):
    """Autograph turns the `if` on a tensor into graph code, as it would in a `tf.function`."""
    if tf.reduce_sum(batch) < 0:
        return -linear(batch)
    return linear(batch)


@pytest.mark.fast_cases(
    "functional", "subclassed", "lambda", "compiled bound method", "python branches"
)
@pytest.mark.parametrize("kind", MODELS)
def test_every_kind_of_model_is_attacked_alike(kind):
    attack = PGD(THREAT, 3, batch_size=8)
    expected = result_on_linear()
    result = attack(MODELS[kind](), images(), labels())
    np.testing.assert_allclose(result.x_adv, expected.x_adv, atol=1e-6)
    np.testing.assert_array_equal(result.success, expected.success)
    assert result.robust_accuracy == pytest.approx(1 - expected.success.mean())


def test_keras_models_run_in_inference_mode():
    """Dropout and batch norm in training mode would change the logits and the statistics."""
    layers = keras.layers
    stack = [layers.Flatten(), layers.BatchNormalization(), layers.Dropout(0.9), dense()]
    model = keras.Sequential([keras.Input((2, 2, 3)), *stack])
    alone = keras.layers.Pipeline(stack)
    batch = tf.constant(images())
    inference = model(batch, training=False)
    for wrapped in (model, alone):
        np.testing.assert_array_equal(Victim(wrapped).logits(batch), inference)
    before = stack[1].get_weights()
    PGD(THREAT, 2)(model, images(), labels())
    for old, new in zip(before, stack[1].get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    Victim(model, training=True).logits(batch)
    assert np.abs(stack[1].get_weights()[2] - before[2]).max() > 0


@pytest.mark.fast_cases("dtype1")
@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16, tf.float64])
def test_logits_of_another_precision(dtype):
    expected = result_on_linear()
    result = PGD(THREAT, 3)(lambda batch: tf.cast(linear(batch), dtype), images(), labels())
    assert result.x_adv.dtype == np.float32
    assert np.mean(result.success == expected.success) >= 0.9


@pytest.mark.fast_cases("float64-float64")
@pytest.mark.parametrize(("given", "returned"), [("float64", "float64"), ("float16", "float32")])
def test_dtype_of_the_images(given, returned):
    model = functional()
    for callable_model in (model, linear):
        result = PGD(THREAT, 3)(callable_model, images().astype(given), labels())
        assert result.x_adv.dtype == np.dtype(returned)
        assert result.distance.max() <= 0.05 + 1e-6
        assert result.success.any() and not result.success.all()


def test_labels_of_every_integer_type_and_as_a_column():
    attack = BIM(THREAT, 2)
    expected = attack(linear, images(), labels())
    for given in (labels().astype(np.uint8), labels()[:, None], tf.constant(labels()), [*labels()]):
        result = attack(linear, tf.constant(images()), given)
        np.testing.assert_array_equal(result.x_adv, expected.x_adv)


def test_one_attack_for_images_of_two_shapes():
    """Not relaxed to images of unknown shape, which models that reshape could not take."""
    attack = BIM(THREAT, 2)

    def corner(batch):
        return tf.reshape(batch, [-1, batch.shape[1] * batch.shape[2] * 3])[:, :PIXELS] @ weights()

    for size in (2, 4, 6, 2):
        batch = np.random.default_rng(size).uniform(size=(5, size, size, 3)).astype(np.float32)
        assert attack(corner, batch, np.zeros(5, int)).x_adv.shape == batch.shape


# Numbers that are not finite, gradients that are zero.


def test_nan_is_reported_and_counted_as_broken():
    def brittle(batch):
        is_bright = batch[:, :1, 0, 0] > 0.5
        return tf.where(is_bright, np.nan, linear(batch))

    right = linear(images()).numpy().argmax(axis=1)
    result = PGD(THREAT, 5)(brittle, images(), right)
    bright = images()[:, 0, 0, 0] > 0.5
    assert 0 < bright.sum() < len(bright)
    np.testing.assert_array_equal(result.non_finite[bright], True)
    np.testing.assert_array_equal(result.success[bright], True)
    np.testing.assert_array_equal(result.x_adv[bright], images()[bright])
    assert np.isfinite(result.x_adv).all()
    # An attack may also find the edge beyond which the model returns NaN.
    at_the_edge = ~bright & result.non_finite
    assert np.all(result.x_adv[at_the_edge][:, 0, 0, 0] > 0.5)
    np.testing.assert_array_equal(result.success[at_the_edge], True)
    assert (~result.non_finite & ~result.success).any()


def test_nan_everywhere_leaves_finite_images():
    result = PGD(THREAT, 3, stop_when_broken=False)(
        lambda x: linear(x) * np.nan, images(), labels()
    )
    assert result.non_finite.all() and result.success.all()
    assert np.isfinite(result.x_adv).all() and result.distance.max() <= 0.05 + 1e-6


def test_infinite_logits_are_reported():
    result = BIM(THREAT, 2)(lambda x: linear(x) * np.inf, images(), labels())
    assert result.non_finite.all() and np.isfinite(result.x_adv).all()


@pytest.mark.fast_cases("linf", "l2")
@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_zero_and_nan_gradients_leave_the_image(norm, monkeypatch):
    # Nine short attacks, which are not worth a trace each.
    monkeypatch.setattr(Attack, "runs_in_graph", False)
    factor = tf.Variable(1.0)

    @tf.custom_gradient
    def with_gradient_factor(batch):
        return tf.identity(batch), lambda upstream: upstream * factor

    def model(batch):
        return linear(with_gradient_factor(batch))

    threat = he.ThreatModel(norm, 0.05)
    right = linear(images()).numpy().argmax(axis=1)
    ids = np.stack([np.zeros(20, np.int32), np.arange(20, dtype=np.int32)], axis=1)
    expected = threat.random_start(tf.constant(images()), ids)
    assert np.abs(expected - images()).max() > 1e-4
    started = MIM(threat, 3, keep="last", stop_when_broken=False, random_start=True)
    attacks = BIM(threat, 3), MIM(threat, 3)
    for value in (0.0, np.nan):
        factor.assign(value)
        for attack in attacks:
            result = attack(model, images(), right)
            np.testing.assert_allclose(result.x_adv, images(), atol=1e-7)
            assert not result.success.any() and not result.non_finite.any()
        np.testing.assert_allclose(started(model, images(), right).x_adv, expected, atol=1e-6)
    factor.assign(1.0)
    assert np.abs(attacks[0](model, images(), right).x_adv - images()).max() > 0.001
