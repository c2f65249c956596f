"""A training on several replicas, stopped in the middle of an epoch and resumed by a new model."""

import numpy as np
import replicated_training
import tensorflow as tf
from stopping import Stop, StopAfter

import he_keras as he


def fit(model, path, place=(0, 0), batches=100):
    """Two epochs of three batches from a place on; returns the history of the last epoch."""
    images, labels = replicated_training.examples(24)
    data = tf.data.Dataset.from_tensor_slices((images, labels)).batch(8)
    epoch, first = place
    resume = he.callbacks.ExactResume(path, every_batches=1)
    if first or epoch:
        assert resume.restore(model) == place
    with model.distribute_strategy.scope():
        model.optimizer.build(model.trainable_variables)
    history = model.fit(
        data.skip(first) if first else data,
        initial_epoch=epoch,
        epochs=2,
        steps_per_epoch=3 - first,
        verbose=0,
        callbacks=[resume, StopAfter(batches)],
    )
    return {name: values[-1] for name, values in history.history.items()}


def assert_resumes(build, folder):
    """The second half of an interrupted run ends as a run that nobody interrupted."""
    whole, first_half, second_half = build(), build(), build()
    expected = fit(whole, folder / "whole.npz")
    try:
        fit(first_half, folder / "halves.npz", batches=4)
    except Stop:
        pass
    history = fit(second_half, folder / "halves.npz", place=(1, 1))
    assert history == expected
    for weight, other in zip(second_half.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, other)
    with whole.distribute_strategy.scope():
        states = [each.objective.state_arrays() for each in (second_half, whole)]
    assert states[0].keys() == states[1].keys()
    for name, array in states[1].items():
        np.testing.assert_array_equal(states[0][name], array)
        assert np.abs(array).max() > 0
