"""A small evaluation, as a module for tests and as a program that can be killed."""

import functools
import sys

import keras
import numpy as np

import he_keras as he

THREAT = he.ThreatModel("linf", 0.06)
NUM_EXAMPLES = 50
BATCH_SIZE = 10
BLOCK_SIZE = 20


@functools.lru_cache
def model():
    """A network that knows the classes because its weights are the class centres."""
    keras.utils.set_random_seed(0)
    classifier = keras.Sequential(
        [keras.Input((2, 3, 1)), keras.layers.Flatten(), keras.layers.Dense(3)]
    )
    centres = np.eye(3).repeat(2, axis=1) * 0.25 + 0.35
    classifier.layers[1].set_weights([30 * centres.T, -15 * (centres**2).sum(axis=1)])
    return classifier


def examples():
    """Images around the class centres; not all of them on the right side."""
    random = np.random.RandomState(0)
    labels = random.randint(0, 3, NUM_EXAMPLES)
    centres = np.eye(3).repeat(2, axis=1) * 0.25 + 0.35
    images = np.clip(centres[labels] + 0.13 * random.randn(NUM_EXAMPLES, 6), 0, 1)
    return images.astype("float32").reshape(-1, 2, 3, 1), labels


@functools.cache
def single_attacks(seed=0):
    """Three attacks, none of which finds everything; compiled once for all evaluations."""
    weak = {"seed": seed, "batch_size": BATCH_SIZE}
    return [
        he.attacks.PGD(THREAT, 2, step_size=0.015, random_start=False, name="first", **weak),
        he.attacks.Square(THREAT, num_queries=15, name="second", **weak),
        he.attacks.PGD(THREAT, 5, loss="cw", name="third", **weak),
    ]


@functools.cache
def attacks(seed=0):
    """One attack, and an ensemble of two."""
    first, *others = single_attacks(seed)
    settings = {"seed": seed, "batch_size": BATCH_SIZE}
    return [first, he.attacks.Ensemble(THREAT, others, name="both", **settings)]


def when_written(folder):
    """When each recorded batch in a folder was written."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*.npz")}


def _main() -> None:
    import pytest
    import small_limits

    small_limits.set_block_size(pytest.MonkeyPatch(), BLOCK_SIZE)
    if sys.argv[1] == "--verify":
        print(he.evaluation.verify(model(), examples(), sys.argv[2]).summary())
        return
    he.evaluate_robustness(
        model(), examples(), THREAT, attacks(), sys.argv[1], BATCH_SIZE, "survivors", checks=False
    )


if __name__ == "__main__":
    _main()
