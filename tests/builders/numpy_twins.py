"""A Keras model beside its NumPy twin: same head, weights and objective, compared after `fit`."""

import keras
import numpy as np
from closed_form_objectives import HEADS, examples
from numpy_training import BATCH_SIZE, LEARNING_RATE, SEED, SHAPE

import he_keras as he

#: The batches that `fit` makes of `examples`.
ROWS = (slice(0, 4), slice(4, 6))


def build_twins(trainer, objective, head_name):
    """A Keras model and its NumPy twin with the same weights."""
    numpy_head, make_head = HEADS[head_name]
    network = keras.Sequential([keras.Input(SHAPE), keras.layers.Flatten()])
    model = he.HEAdversarialModel(network, make_head(), objective, None, seed=SEED)
    generator = np.random.default_rng(11)
    weights = [generator.normal(0.0, 1.0, each.shape) for each in model.trainable_variables]
    model.head.set_weights(weights)
    return model, trainer(numpy_head([each.astype(np.float64) for each in model.get_weights()]))


def as_rows(x):
    return x.reshape(len(x), -1).astype(np.float64)


def check_fit(model, expected, in_graph_mode, rtol=1e-3, atol=1e-5, loss_rtol=1e-5):
    """Compares weights and loss after an epoch of two batches; returns what `fit` reported.

    One case of a test file is enough in graph mode; eagerly two steps are faster.
    """
    before = model.get_weights()
    x, y = examples()
    optimizer = keras.optimizers.SGD(LEARNING_RATE)
    model.compile(optimizer=optimizer, run_eagerly=not in_graph_mode)
    history = model.fit(x, y, batch_size=BATCH_SIZE, shuffle=False, verbose=0).history
    losses = [expected.step(as_rows(x)[rows], y[rows], step) for step, rows in enumerate(ROWS)]
    for weight, desired, start in zip(
        model.head.get_weights(), expected.head.weights, before, strict=True
    ):
        np.testing.assert_allclose(weight - start, desired - start, rtol=rtol, atol=atol)
        assert np.abs(weight - start).max() > 0.01
    np.testing.assert_allclose(history["loss"][0], np.concatenate(losses).mean(), rtol=loss_rtol)
    return history
