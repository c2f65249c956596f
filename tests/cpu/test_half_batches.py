"""Halves of a batch side by side give the logits, features and gradients of the whole."""

import keras
import numpy as np
import pytest
import small_limits
import tensorflow as tf

from he_keras import cpu
from he_keras.attacks import Victim
from he_keras.cpu import functions


@pytest.fixture(scope="module")
def model():
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(3)]
    return keras.Sequential([keras.Input((4,)), *layers])


@pytest.fixture(autouse=True)
def any_network_is_worth_it(monkeypatch):
    small_limits.take_every_trick(monkeypatch)


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("what", ["logits", "features"])
def test_halves_give_what_the_whole_gives(model, count, what):
    images = tf.constant(np.random.default_rng(0).random((count, 4)), tf.float32)

    @tf.function(input_signature=[tf.TensorSpec([None, 4])])
    def in_halves(images):
        with tf.GradientTape() as tape:
            tape.watch(images)
            outputs = getattr(Victim(model).for_many_passes(), what)(images)
        return outputs, tape.gradient(outputs, images)

    with tf.GradientTape() as tape:
        tape.watch(images)
        whole = getattr(Victim(model), what)(images)
    outputs, gradient = in_halves(images)
    np.testing.assert_allclose(outputs, whole, atol=1e-6)
    np.testing.assert_allclose(gradient, tape.gradient(whole, images), atol=1e-6)


@pytest.mark.parametrize("count", [2, 3])
def test_halves_can_be_differentiated_twice(model, count):
    images = tf.constant(np.random.default_rng(0).random((count, 4)), tf.float32)

    def second_derivative(victim):
        with tf.GradientTape() as outer:
            outer.watch(images)
            with tf.GradientTape() as inner:
                inner.watch(images)
                total = tf.reduce_sum(victim.logits(images) ** 2)
            squares = tf.reduce_sum(inner.gradient(total, images) ** 2)
        return outer.gradient(squares, images)

    halves = tf.function(lambda: second_derivative(Victim(model).for_many_passes()))()
    np.testing.assert_allclose(halves, second_derivative(Victim(model)), rtol=1e-4, atol=1e-6)


def test_each_half_is_a_network_of_its_own(model):
    sizes = []

    def watched(images):
        sizes.append(images.shape[0])
        return model(images)

    tf.function(cpu.batch_function(watched, model))(tf.zeros((5, 4)))
    assert sizes == [3, 3]


def test_only_networks_of_some_size_alone_on_several_cores_are_worth_it(model, monkeypatch):
    assert functions.is_worthwhile(model)
    assert not functions.is_worthwhile(lambda images: images)
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        assert functions.is_worthwhile(model)
    monkeypatch.setattr(functions.os, "cpu_count", lambda: 1)
    assert not functions.is_worthwhile(model)
    # The true limits.
    monkeypatch.undo()
    monkeypatch.setattr(functions.os, "cpu_count", lambda: 2)
    widths = {249: False, 250: True}
    for width, is_large in widths.items():
        dense = keras.layers.Dense(width, use_bias=False)
        network = keras.Sequential([keras.Input((400,)), dense])
        assert functions.is_worthwhile(network) == is_large
