"""A Keras call opened around plain code: mode, precision, and what stays as it was."""

import keras
import model_zoo
import numpy as np
import pytest
import tensorflow as tf

from he_keras.attacks import Victim
from he_keras.layers.call_context import call_context, full_precision


def moves(layer, images):
    return bool(np.abs(layer(images) - images).max() > 0)


def test_layers_inside_get_the_mode_and_keras_gets_its_own_back():
    shift, images = keras.layers.RandomTranslation(0.5, 0.5, seed=1), model_zoo.images()
    assert moves(shift, images)
    with call_context(training=False):
        assert not moves(shift, images)
        with call_context(training=True):
            assert moves(shift, images)
        assert not moves(shift, images)
    assert moves(shift, images)


def test_an_error_inside_closes_the_call():
    shift, images = keras.layers.RandomTranslation(0.5, 0.5, seed=1), model_zoo.images()
    with pytest.raises(KeyError), call_context(training=False):
        raise KeyError
    assert moves(shift, images)


def test_a_flag_that_is_given_counts_more():
    shift, images = keras.layers.RandomTranslation(0.5, 0.5, seed=1), model_zoo.images()
    with call_context(training=False):
        assert np.abs(shift(images, training=True) - images).max() > 0


def test_victims_run_functions_heads_and_methods_in_inference_mode():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.shift = keras.layers.RandomTranslation(0.3, 0.3)
            self.head = keras.layers.Pipeline([model_zoo.Shifting(), keras.layers.Flatten()])

        def features(self, images, training=False):
            return tf.reshape(self.shift(images), [-1, 192])

        def call(self, images):
            return self.features(images)

    model, images = Own(), model_zoo.images()
    rows = tf.reshape(images, [-1, 192])
    for answer in (
        Victim(model).features(images),
        Victim(lambda batch: model.features(batch)).logits(images),
        Victim(model.features).logits(images),
        Victim(lambda batch: tf.reshape(model_zoo.Shifting()(batch), [-1, 192])).logits(images),
    ):
        np.testing.assert_array_equal(answer, rows)


def test_variables_are_read_as_they_are_stored():
    class Reading(keras.layers.Layer):
        def build(self, shape):
            self.factor = self.add_weight(shape=(), initializer=lambda *_, **__: 1.0 + 2.0**-20)

        def call(self, inputs):
            with full_precision():
                self.stored = tf.convert_to_tensor(self.factor)
            return inputs * self.factor

    layer = Reading(dtype="mixed_float16")
    assert layer(tf.ones([1])).dtype == tf.float16
    assert layer.stored.numpy() == np.float32(1.0 + 2.0**-20)
