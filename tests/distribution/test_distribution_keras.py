"""What plain Keras does wrong on several replicas. A failure here means: a repair may go.

The repairs are in `he_keras/distribution/keras_repairs.py`; these tests use none of them.
"""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from replicated_training import mirrored

pytestmark = pytest.mark.slow

LAYER = {"use_bias": False, "kernel_initializer": "ones"}


def plain_model(optimizer=None, strategy=None, **options):
    """`w x`, a stock Keras model on two replicas."""
    with (strategy or mirrored()).scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, **LAYER)])
        model.compile(optimizer=optimizer or "sgd", loss="mse", **options)
    return model


def batches(count, batch_size):
    values = np.arange(1, count + 1, dtype=np.float32)[:, np.newaxis]
    return tf.data.Dataset.from_tensor_slices((values, 3 * values)).batch(batch_size)


def test_first_batch_is_averaged():
    """Three examples: two on one replica, one on the other."""
    with pytest.raises(tf.errors.InvalidArgumentError, match="must have the same size and shape"):
        plain_model().fit(batches(3, 3), verbose=0)


def test_step_logs_are_a_mean():
    """Shares 2, 2 and then 1, 0: what the epoch reports is right, what its last step is not."""
    last = []
    keep = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: last.append(logs))
    model = plain_model(keras.optimizers.SGD(0.0), metrics=["mae"])
    history = model.fit(batches(5, 4), verbose=0, callbacks=[keep]).history
    assert history["mae"][0] == pytest.approx(6.0)
    assert float(last[-1]["mae"]) == pytest.approx(((2 + 4 + 10) / 3 + (6 + 8) / 2) / 2)


def test_an_overflow_is_seen_on_the_first_replica_only():
    with mirrored().scope():
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), 16.0)
    model = plain_model(optimizer)
    values = np.array([[1.0], [1e30]], np.float32)
    model.fit(values, 3 * values, batch_size=2, shuffle=False, verbose=0)
    assert not np.isfinite(model.get_weights()[0]).all()


def test_accumulation_cannot_be_compiled():
    with mirrored().scope():
        optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    with pytest.raises(RuntimeError, match="merge_call"):
        plain_model(optimizer).fit(batches(8, 4), verbose=0)


def test_overwriting_by_the_average_cannot_be_compiled():
    with mirrored().scope():
        optimizer = keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=2)
    with pytest.raises(RuntimeError, match="merge_call"):
        plain_model(optimizer).fit(batches(8, 4), verbose=0)


def test_clipping_is_of_a_share():
    """Each replica's gradient is clipped to length 1, and their sum has length 2."""
    with mirrored().scope():
        optimizer = keras.optimizers.SGD(1.0, clipnorm=1.0)
    model = plain_model(optimizer)
    model.fit(batches(4, 4), verbose=0)
    assert model.get_weights()[0].item() - 1.0 == pytest.approx(2.0)


def test_several_steps_per_execution_fail():
    """With the reduction that MirroredStrategy has by default."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with pytest.raises(tf.errors.InvalidArgumentError, match="while/cond/Placeholder"):
        plain_model(None, strategy, steps_per_execution=2).fit(batches(8, 4), verbose=0)


def test_xla_drops_assertions():
    """Of one device: an assertion that fails in a step stops nothing."""

    class Asserting(keras.layers.Layer):
        def call(self, inputs):
            with tf.control_dependencies([tf.debugging.Assert(False, ["asserted"])]):
                return tf.identity(inputs)

    for jit_compile in (False, True):
        model = keras.Sequential([keras.Input((1,)), Asserting(), keras.layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=jit_compile)
        with contextlib.nullcontext() if jit_compile else pytest.raises(tf.errors.OpError):
            model.fit(batches(4, 4), verbose=0)


def test_xla_fails():
    with pytest.raises((tf.errors.OpError, ValueError, RuntimeError)):
        plain_model(jit_compile=True).fit(batches(8, 4), verbose=0)
