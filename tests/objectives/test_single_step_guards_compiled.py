"""GradAlign, ELLE and FastAdv+ on two replicas, and compiled by XLA: as on one device, eagerly."""

import keras
import numpy as np
import pytest
import replicated_training
import tensorflow as tf
from replicated_training import both, mirrored, train

import he_keras as he
from he_keras.objectives.elle import ELLE, NonlinearityWatch
from he_keras.objectives.fast_adv_plus import FastAdvPlus
from he_keras.objectives.grad_align import GradAlign

pytestmark = pytest.mark.slow

THREAT = replicated_training.THREAT
OBJECTIVES = {
    "grad_align": lambda: GradAlign(THREAT, 2.0),
    "elle": lambda: ELLE(THREAT, 300.0),
    "elle_a": lambda: ELLE(THREAT, 300.0, adaptive=True),
    "fast_adv_plus": lambda: FastAdvPlus(THREAT, 2, 3, initialization="zero"),
}


@pytest.fixture
def same_draws(monkeypatch):
    """Replicas draw from seeds of their own: here every draw is a function of image and stream."""
    drawn = tf.random.stateless_uniform

    def stream_alone(seed, stream):
        return tf.constant([stream, stream])

    def start(threat, images, seed, radius=None):
        phase = tf.cast(tf.where(seed[0] == seed[1], seed[0], 0), images.dtype)
        return threat.clip_to_bounds(images + 0.08 * tf.sin(40.0 * images + phase))

    def uniform(shape, seed, *args, **options):
        # Keras draws the first weights with bounds; ELLE draws shares without.
        is_share = set(options) == {"dtype"}
        return tf.fill(shape, 0.3) if is_share else drawn(shape, seed, *args, **options)

    monkeypatch.setattr(tf.random, "fold_in", stream_alone)
    monkeypatch.setattr(he.ThreatModel, "random_start", start)
    monkeypatch.setattr(tf.random, "stateless_uniform", uniform)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_two_replicas_train_as_one_device(name, monkeypatch, same_draws):
    monkeypatch.setitem(replicated_training.OBJECTIVES, name, OBJECTIVES[name])
    models = both(name)
    before = models[0].get_weights()[0]
    results = []
    for model in models:
        if name == "fast_adv_plus":
            with model.distribute_strategy.scope():
                model.objective.start_recovery()
        results.append(train(model, 21, epochs=2))
    replicated_training.assert_equal_training(models, results)
    assert np.abs(models[0].get_weights()[0] - before).max() > 1e-3
    states = []
    for model in models:
        with model.distribute_strategy.scope():
            states.append(model.objective.state_arrays())
    for key, array in states[0].items():
        np.testing.assert_allclose(states[1][key], array, rtol=1e-3)
        assert np.any(array) or name != "elle_a"


def test_every_replica_knows_the_error_of_the_whole_batch():
    strategy = mirrored()
    with strategy.scope():
        watch = NonlinearityWatch(9.0)

    @tf.function
    def observe(number):
        def on_replica():
            context = tf.distribute.get_replica_context()
            is_first = context.replica_id_in_sync_group == 0
            # Five examples on one replica, one on the other.
            watch.observe(tf.cond(is_first, lambda: tf.fill([5], number), lambda: 7.0 * tf.ones(1)))

        strategy.run(on_replica)

    errors = [1.0, 2.0, 3.0]
    for number in errors:
        observe(tf.constant(number))
    means = (5 * np.array(errors) + 7.0) / 6
    for copy in strategy.experimental_local_results(watch._state):
        _, count, mean, squares = copy.numpy()
        np.testing.assert_allclose(
            [count, mean, squares], [3, means.mean(), 3 * means.var()], rtol=1e-5
        )


@pytest.mark.parametrize("name", OBJECTIVES)
def test_xla_takes_the_same_steps(name, same_draws):
    generator = np.random.default_rng(1)
    images = generator.uniform(0.2, 0.8, (8, 4, 4, 1)).astype("float32")
    labels = generator.integers(0, 3, 8)
    ends = []
    for options in ({"jit_compile": True}, {"run_eagerly": True}):
        keras.utils.set_random_seed(1)
        layers = [keras.Input((4, 4, 1)), keras.layers.Flatten()]
        layers.append(keras.layers.Dense(6, activation="tanh"))
        model = he.HEAdversarialModel(
            keras.Sequential(layers), he.CosineHead(3, scale=4.0), OBJECTIVES[name](), None
        )
        model.compile(keras.optimizers.SGD(0.05), **options)
        if name == "fast_adv_plus":
            model.objective.start_recovery()
        model.fit(images, labels, batch_size=4, epochs=2, shuffle=False, verbose=0)
        ends.append(model.get_weights() + list(model.objective.state_arrays().values()))
    for compiled, eager in zip(*ends, strict=True):
        np.testing.assert_allclose(compiled, eager, rtol=1e-3, atol=1e-5)
