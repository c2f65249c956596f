"""The Square attack against AutoAttack's stored verdicts and query counts.

With AutoAttack's own random numbers ours is the same search, query for query. With its own random
numbers only the rate can be compared. It depends on one of the 64 images on the HE model, number
55, which AutoAttack breaks with 7 of the seeds 0 to 23 and ours with 7. So means of three seeds,
of AutoAttack itself as of ours, are anything from 50.0 to 51.6 %, see `docs/research/attacks.md`.
"""

import functools

import golden_models
import numpy as np
import pytest
import tensorflow as tf

import he_keras as he
from he_keras.attacks import Victim
from he_keras.attacks.square import Draws, Square

pytestmark = pytest.mark.slow

SEEDS = range(3)
NUM_QUERIES = 5000
LINF = he.ThreatModel("linf", "8/255")


def official_draws(seed, count, size=32, channels=3):
    """The numbers that PyTorch draws for AutoAttack: `count` starts, and queries that all share.

    PyTorch makes a float32 number in [0, 1) of the lower 24 bits of each output of the Mersenne
    Twister; NumPy's legacy generator has the same Twister and the same seeding.
    """
    twister = np.random.RandomState(seed)

    def uniform(*shape):
        bits = np.frombuffer(twister.bytes(4 * int(np.prod(shape))), "<u4")
        return ((bits & 0xFFFFFF) * np.float32(2.0**-24)).astype(np.float32).reshape(shape)

    # Channel-first there: a sign for each image, channel and column.
    start = uniform(count, channels, 1, size).transpose(0, 2, 3, 1)
    queries = uniform(1, NUM_QUERIES, 2 + channels)
    return Draws(start, np.repeat(queries, count, axis=0))


@functools.cache
def search(head):
    """The golden model, and the compiled attack on it with given random numbers."""
    model, attack = golden_models.classifier(head), Square(LINF, NUM_QUERIES)
    run = tf.function(
        lambda x, y, start, queries: attack.search(Victim(model), x, y, Draws(start, queries))
    )
    return model, run


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("head", golden_models.HEADS)
def test_with_the_random_numbers_of_autoattack_every_verdict_is_the_stored_one(head, seed):
    stored = golden_models.arrays(f"stats_{head}")
    x, y = golden_models.images(), golden_models.labels()
    model, run = search(head)
    right = model(x).numpy().argmax(axis=1) == y
    draws = official_draws(seed, np.sum(right))
    crafted = run(x[right], y[right].astype(np.int32), *draws)
    robust = np.zeros(len(y), bool)
    robust[right] = model(crafted.x_adv).numpy().argmax(axis=1) == y[right]
    np.testing.assert_array_equal(robust, stored[f"square/robust_seed{seed}"])
    # Not only who is broken, but by which query. Rounding may decide a tie of two margins.
    spent, expected = crafted.forward_passes, stored[f"square/n_queries_seed{seed}"][right]
    assert np.sum(spent != expected) <= 1


def test_robust_accuracy_is_that_of_autoattack():
    stored = golden_models.arrays("stats_he")
    expected = [stored[f"square/robust_seed{seed}"] for seed in SEEDS]
    always_broken = ~np.any(expected, axis=0) & np.all(
        [stored[f"square/n_queries_seed{seed}"] < 2500 for seed in SEEDS], axis=0
    )
    model = golden_models.classifier("he")
    rates = []
    # Four seeds: one example that is broken in every other run is worth 1.6 points.
    for seed in range(4):
        attack = Square(LINF, seed=seed)
        result = attack(model, golden_models.images(), golden_models.labels())
        rates.append(result.robust_accuracy)
        assert np.min(np.abs(np.mean(expected, axis=1) - rates[-1])) <= 2 / 64
        assert result.success[always_broken].mean() > 0.9
    assert abs(np.mean(rates) - np.mean(expected)) <= 0.01
