"""Every objective on one device and two replicas, accumulating or not, in both precisions.

The weights that come out are the same, or the combination is refused. Starts are a function of the
image here, since replicas draw from seeds of their own.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from replicated_training import mirrored

import he_keras as he
from he_keras import objectives

pytestmark = pytest.mark.slow

SHAPE = (4, 4, 1)
THREAT = he.ThreatModel("linf", 0.1)
COUNT = 16
#: What an update makes of its batch as a whole is another thing for two halves of it.
OF_THE_BATCH = {
    "awp": "the perturbation of the weights is that of each batch",
    "rat": "the soft labels are those of each batch",
    "free_at": "a perturbation belongs to a row of the batch",
}
OPTIONS = {
    **{name: {"num_steps": 2, "step_size": 0.04} for name in ("pgd_at", "alp", "trades", "mart")},
    "awp": {"num_steps": 2, "step_size": 0.04, "gamma": 0.05},
    "rat": {"num_steps": 2, "step_size": 0.04, "weight_noise": 0.0},
    "llr": {"num_steps": 2, "warm_up_steps": 0, "optimizer": "sign", "statistics": "moving"},
    "free_at": {"num_replays": 2},
    "elle": {"penalty_weight": 3.0},
    "grad_align": {"penalty_weight": 0.5},
}


@pytest.fixture(autouse=True)
def draws_of_the_image(monkeypatch):
    """Starts and shares that do not depend on where in which batch an image is."""

    def random_start(self, images, seed, radius=None):
        return self.project(images + 0.05 * tf.sin(40.0 * images), images)

    def start(self, random_start, images, seeds):
        return self.random_start(images, seeds)

    uniform = tf.random.stateless_uniform
    monkeypatch.setattr(he.ThreatModel, "random_start", random_start)
    monkeypatch.setattr(he.ThreatModel, "start", start)
    monkeypatch.setattr(
        tf.random,
        "stateless_uniform",
        lambda shape, seed, **kwargs: 0.0 * uniform(shape, seed, **kwargs) + 0.3,
    )


def build_model(name, strategy, **options):
    with strategy.scope():
        layers = [keras.Input(SHAPE), keras.layers.Flatten(), keras.layers.Dense(6, "tanh")]
        objective = objectives.get(name, THREAT, **OPTIONS.get(name, {}))
        head = he.CosineHead(3, scale=4.0)
        model = he.HEAdversarialModel(keras.Sequential(layers), head, objective, None)
        generator = np.random.default_rng(7)
        for variable in model.trainable_variables:
            variable.assign(generator.normal(0.0, 0.5, variable.shape))
        if keras.config.dtype_policy().name == "float32":
            optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.1, **options)
        else:
            # Adam makes a whole step of a gradient that is nothing but the rounding of float16. A
            # large scale has a replica's sum overflow where another's, or the whole one, does not.
            optimizer = keras.optimizers.SGD(0.1, momentum=0.9, **options)
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, 128.0)
        model.compile(optimizer)
    return model


def change(name, strategy, batch_size, **options):
    """Trains two updates and returns how the weights changed, as one vector."""
    model = build_model(name, strategy, **options)
    before = model.get_weights()
    generator = np.random.default_rng(0)
    images = generator.uniform(0.2, 0.8, (COUNT, *SHAPE)).astype(np.float32)
    labels = generator.integers(0, 3, COUNT)
    weights = generator.uniform(0.5, 1.5, COUNT)
    model.fit(images, labels, batch_size, sample_weight=weights, shuffle=False, verbose=0)
    pairs = zip(model.get_weights(), before, strict=True)
    return np.concatenate([np.ravel(after - first) for after, first in pairs])


def assert_equal(received, expected, policy):
    tolerance = 1e-3 if policy == "float32" else 0.05
    assert np.isfinite(expected).all() and np.linalg.norm(expected) > 1e-2
    assert np.linalg.norm(received - expected) < tolerance * np.linalg.norm(expected)


#: Tried with a loss scale too: one for each way to craft, and to use the gradient.
IN_HALF_PRECISION = ("pgd_at", "trades", "free_at", "fast_at", "llr", "awp")


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        *((name, "float32") for name in objectives.names()),
        *((name, "mixed_float16") for name in IN_HALF_PRECISION),
    ],
)
def test_the_same_weights_come_out_or_it_is_refused(name, policy):
    keras.config.set_dtype_policy(policy)
    single = tf.distribute.get_strategy()
    expected = change(name, single, 8)
    assert_equal(change(name, mirrored(), 8), expected, policy)
    if name not in OF_THE_BATCH:
        halves = change(name, single, 4, gradient_accumulation_steps=2)
        assert_equal(halves, expected, policy)
    with pytest.raises(ValueError, match="cannot accumulate gradients.* on more than one repl"):
        build_model(name, mirrored(), gradient_accumulation_steps=2)


def test_the_reasons_name_objectives():
    assert set(OF_THE_BATCH) | set(OPTIONS) <= set(objectives.names())
