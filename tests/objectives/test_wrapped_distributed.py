"""RAT and AWP on two replicas: one noise, one perturbation, one set of statistics."""

import keras
import numpy as np
import pytest
import replicated_training
import tensorflow as tf
from replicated_training import both, mirrored, train

import he_keras as he
from he_keras.objectives import PGDAT
from he_keras.objectives.awp import AWP
from he_keras.objectives.rat import RAT, noisy_values

pytestmark = pytest.mark.slow

THREAT = replicated_training.THREAT
OBJECTIVES = {
    "rat": lambda: RAT(base=PGDAT(THREAT, 3, 0.04, random_start=False), alpha=0.5),
    "awp": lambda: AWP(base=PGDAT(THREAT, 3, 0.04, random_start=False), gamma=0.2),
    "awp of rat": lambda: AWP(base=OBJECTIVES["rat"](), gamma=0.1, warm_up_steps=1),
}


@pytest.mark.parametrize(
    ("name", "batch_norm", "count"),
    [
        ("rat", "synchronized", 21),
        ("awp", "synchronized", 21),
        ("awp", None, 17),
        ("awp of rat", None, 21),
    ],
)
def test_two_replicas_train_as_one_device(name, batch_norm, count, monkeypatch):
    monkeypatch.setitem(replicated_training.OBJECTIVES, name, OBJECTIVES[name])
    models = both(name, batch_norm)
    before = models[0].get_weights()[0]
    results = [train(model, count, epochs=2) for model in models]
    replicated_training.assert_equal_training(models, results)
    assert np.abs(models[0].get_weights()[0] - before).max() > 1e-3


def test_replicas_craft_at_the_same_noise_and_keep_their_weights():
    """The seeds of the replicas differ, so that their starts do; the noise does not."""
    strategy = mirrored()
    objective = RAT(base=PGDAT(THREAT, 2, 0.05), weight_noise=0.3)
    with strategy.scope():
        keras.utils.set_random_seed(1)
        layers = [keras.Input((4, 4, 1)), keras.layers.Conv2D(3, 3), keras.layers.Flatten()]
        model = he.HEAdversarialModel(keras.Sequential(layers), he.CosineHead(3), objective)
        model.compile(optimizer=keras.optimizers.SGD(0.0))
        model.optimizer.build(model.trainable_variables)
    before = model.get_weights()
    kernel = model.network.layers[0].kernel

    @tf.function
    def step():
        def on_replica():
            seed = model.step_seed()
            images = tf.fill([2, 4, 4, 1], 0.5)
            crafted = objective.craft(model, images, tf.constant([0, 1]), seed)
            return seed, noisy_values([kernel], 0.3, seed)[0], crafted

        return strategy.run(on_replica)

    seeds, noisy, crafted = map(strategy.experimental_local_results, step())
    assert np.any(seeds[0] != seeds[1]) and np.any(crafted[0] != crafted[1])
    np.testing.assert_array_equal(*noisy)
    assert np.abs(noisy[0] - before[0]).max() > 0.1
    for replica in strategy.experimental_local_results(kernel.value):
        np.testing.assert_array_equal(replica, before[0])


def test_a_step_on_two_replicas_leaves_noisy_weights_nowhere(monkeypatch):
    monkeypatch.setitem(replicated_training.OBJECTIVES, "rat", OBJECTIVES["rat"])
    model = replicated_training.build_model("rat", mirrored())
    model.optimizer.learning_rate = 0.0
    before = model.get_weights()
    train(model, 16)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
