"""`reestimate_batch_norm`: the statistics of given batches, against NumPy, and nothing else."""

import keras
import numpy as np
import pytest

from he_keras.callbacks import WeightAveraging, reestimate_batch_norm

IMAGES = np.random.default_rng(0).uniform(size=(12, 4)).astype("float32")
LABELS = np.arange(12) % 3
BATCHES = [(IMAGES[:8], LABELS[:8]), (IMAGES[8:], LABELS[8:])]


def states(model):
    return [np.array(each.numpy()) for each in model.variables]


def assert_equal(received, expected):
    for one, other in zip(received, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_statistics_are_the_mean_of_the_batches(momentum=0.7):
    first, second = (keras.layers.BatchNormalization(momentum=momentum) for _ in range(2))
    inner = keras.Sequential([keras.layers.Dense(3, "tanh"), second])
    model = keras.Sequential([keras.Input((4,)), first, inner, keras.layers.Dropout(0.5)])
    kernel = inner.layers[0].get_weights()[0].astype(np.float64)
    before = states(model)
    reestimate_batch_norm(model, BATCHES)
    expected = []
    for images, _ in BATCHES:
        x = images.astype(np.float64)
        hidden = np.tanh((x - x.mean(0)) / np.sqrt(x.var(0) + 1e-3) @ kernel)
        expected.append([x.mean(0), x.var(0), hidden.mean(0), hidden.var(0)])
    received = first.non_trainable_weights + second.non_trainable_weights
    for variable, of_8, of_4 in zip(received, *expected, strict=True):
        np.testing.assert_allclose(variable.numpy(), (8 * of_8 + 4 * of_4) / 12, atol=1e-6)
    assert first.momentum == second.momentum == momentum
    changed = {id(each) for each in received}
    for variable, value in zip(model.variables, before, strict=True):
        assert id(variable) in changed or np.array_equal(variable.numpy(), value)


def test_perturb_sees_the_statistics_from_before():
    layer = keras.layers.BatchNormalization()
    model = keras.Sequential([keras.Input((4,)), layer])
    seen = []

    def perturb(model, images, labels):
        seen.append((layer.moving_mean.numpy().tolist(), labels.tolist()))
        return images + 1.0

    reestimate_batch_norm(model, BATCHES, perturb)
    assert seen == [([0.0] * 4, each.tolist()) for _, each in BATCHES]
    np.testing.assert_allclose(layer.moving_mean.numpy(), IMAGES.mean(0) + 1, atol=1e-6)


def test_layers_that_do_not_train_keep_their_statistics():
    model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization()])
    model.layers[0].trainable = False
    before = states(model)
    reestimate_batch_norm(model, BATCHES)
    assert_equal(states(model), before)


def test_no_batches_and_renormalisation_are_refused():
    model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization()])
    with pytest.raises(ValueError, match="No images for the batch-norm.*received none"):
        reestimate_batch_norm(model, [])
    model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization(renorm=True)])
    with pytest.raises(ValueError, match="expected layers with renorm=False"):
        reestimate_batch_norm(model, BATCHES)
    averaging = WeightAveraging(reestimate=BATCHES)
    averaging.set_model(model)
    with pytest.raises(ValueError, match="received renorm=True"):
        averaging.on_train_begin()


def test_failure_puts_everything_back():
    layer = keras.layers.BatchNormalization()
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dropout(0.5), layer])
    before = states(model)
    with pytest.raises(ValueError):
        reestimate_batch_norm(model, [BATCHES[0], np.ones((2, 7), "float32")])
    assert_equal(states(model), before)
    assert layer.momentum == 0.99


def test_half_precision_and_models_without_batch_norm():
    layer = keras.layers.BatchNormalization(dtype="mixed_float16")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Rescaling(100.0), layer])
    reestimate_batch_norm(model, [IMAGES])
    np.testing.assert_allclose(layer.moving_mean.numpy(), 100 * IMAGES.mean(0), rtol=1e-3)
    assert layer.moving_mean.dtype == "float32"
    plain = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    before = states(plain)
    reestimate_batch_norm(plain, BATCHES)
    assert_equal(states(plain), before)
