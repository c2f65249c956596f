"""Training in half precision: logits, losses, attacks and perturbations stay in float32."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import he_keras as he
from he_keras import objectives
from he_keras.layers.input_standardization import InputStandardization

SHAPE = (4, 4, 1)
THREAT = he.ThreatModel("linf", 0.1)
HEADS = {"linear": lambda: keras.layers.Dense(3), "he": lambda: he.CosineHead(3, scale=5.0)}


@pytest.fixture(autouse=True)
def single_precision_afterwards():
    """Sets the policy back itself; clearing the whole Keras session, as conftest would, is slow."""
    before = keras.config.dtype_policy()
    yield
    keras.config.set_dtype_policy(before)


def examples(count=10):
    generator = np.random.default_rng(0)
    images = generator.uniform(0.1, 0.9, (count, *SHAPE)).astype(np.float32)
    return images, generator.integers(0, 3, count)


def build_model(objective=None, head="he", network=None):
    if network is None:
        layers = [keras.Input(SHAPE), keras.layers.Flatten(), keras.layers.Dense(6, "relu")]
        network = keras.Sequential(layers)
    objective = objectives.PGDAT(THREAT, 2, random_start=False) if objective is None else objective
    model = he.HEAdversarialModel(network, HEADS[head](), objective)
    generator = np.random.default_rng(7)
    for variable in model.trainable_variables:
        variable.assign(generator.normal(0.0, 0.5, variable.shape))
    return model


def fit(model, epochs=1):
    return model.fit(*examples(), batch_size=10, epochs=epochs, shuffle=False, verbose=0).history


def change(model, epochs):
    """Trains and returns how the first kernel changed."""
    before = model.get_weights()[0]
    fit(model, epochs)
    return model.get_weights()[0] - before


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float64"])
def test_training_follows_single_precision(policy, head):
    reference = build_model(head=head)
    reference.compile(optimizer=keras.optimizers.SGD(0.1), run_eagerly=True)
    expected = change(reference, epochs=2)
    keras.config.set_dtype_policy(policy)
    model = build_model(head=head)
    model.compile(optimizer=keras.optimizers.SGD(0.1), run_eagerly=True)
    scaled = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert scaled == (policy == "mixed_float16")
    logits = model(examples()[0], training=False)
    assert logits.dtype == (tf.float64 if policy == "float64" else tf.float32)
    actual = change(model, epochs=2)
    tolerance = {"mixed_float16": 0.02, "mixed_bfloat16": 0.15, "float64": 1e-4}[policy]
    assert np.linalg.norm(actual - expected) < tolerance * np.linalg.norm(expected)
    result = model.evaluate(*examples(), verbose=0, return_dict=True)
    assert np.isfinite(list(result.values())).all()


def test_the_loss_scale_in_the_graph_follows_the_optimizer():
    """Gradients above 65504 overflow in float16: the scale has to halve before a step succeeds."""
    keras.config.set_dtype_policy("mixed_float16")
    reference, model = build_model(), build_model()
    reference.compile(optimizer=keras.optimizers.SGD(0.1), auto_scale_loss=False)
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), 2.0**21)
    model.compile(optimizer=optimizer)
    before = model.get_weights()[0]
    for _ in range(30):
        if int(optimizer.iterations) < 3:
            fit(model)
    assert int(optimizer.iterations) == 3 and float(optimizer.dynamic_scale) < 2.0**21
    expected = change(reference, epochs=3)
    actual = model.get_weights()[0] - before
    assert np.linalg.norm(actual - expected) < 0.02 * np.linalg.norm(expected)


def test_the_loss_is_logged_without_the_loss_scale():
    keras.config.set_dtype_policy("mixed_float16")
    model = build_model()
    model.compile(optimizer=keras.optimizers.SGD(0.0), run_eagerly=True)
    images, labels = map(tf.constant, examples())
    x_adv = model.objective.craft(model, images, labels)
    expected = model.objective.loss(model, images, labels, x_adv, training=True).numpy().mean()
    assert fit(model)["loss"][0] == pytest.approx(expected, rel=1e-3)


def test_loss_scaling_does_not_reach_the_adversary():
    """A sign would not notice; a Euclidean step would be thousands of times too long."""
    keras.config.set_dtype_policy("mixed_float16")
    objective = objectives.PGDAT(he.ThreatModel("l2", 0.5), 1, 0.2, random_start=False)
    model = build_model(objective)
    images, labels = map(tf.constant, examples())
    crafted = []
    for scale in (1.0, 2.0**15):
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), scale)
        model.compile(optimizer=optimizer)
        crafted.append(objective.craft(model, images, labels))
    np.testing.assert_array_equal(*crafted)
    lengths = np.linalg.norm(np.reshape(crafted[0] - images, (10, -1)), axis=1)
    np.testing.assert_allclose(lengths, 0.2, rtol=1e-3)
    assert crafted[0].dtype == tf.float32


def test_free_at_keeps_finite_noise_when_the_loss_scale_overflows():
    keras.config.set_dtype_policy("mixed_float16")
    model = build_model(objectives.FreeAT(THREAT, num_replays=2))
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), 2.0**40)
    model.compile(optimizer=optimizer, run_eagerly=True)
    fit(model)
    assert int(optimizer.iterations) == 0  # every step overflowed
    np.testing.assert_array_equal(model.objective.state_arrays()["noise_0"], 0.0)
    fit(model, epochs=20)
    assert int(optimizer.iterations) > 0
    noise = model.objective.state_arrays()["noise_0"]
    assert np.isfinite(noise).all() and np.abs(noise).max() == pytest.approx(0.1, abs=1e-6)


def test_steps_draw_different_noise_under_loss_scaling():
    keras.config.set_dtype_policy("mixed_float16")
    model = build_model(objectives.FastAT(THREAT))
    model.compile(optimizer=keras.optimizers.SGD(0.1), run_eagerly=True)
    seeds = [model.step_seed().numpy().tolist()]
    fit(model)
    seeds.append(model.step_seed().numpy().tolist())
    assert seeds[0] != seeds[1]


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_images_reach_the_network_in_single_precision(policy):
    """Cast to half precision before standardisation, a perturbation of 1/1000 would vanish."""
    keras.config.set_dtype_policy(policy)
    inputs = keras.Input(SHAPE)
    hidden = InputStandardization(mean=0.75, std=0.001)(inputs)
    network = keras.Model(inputs, keras.layers.Flatten()(hidden))
    model = build_model(network=network)
    images = np.full((1, *SHAPE), 0.7501, np.float32)
    x_adv = images.copy()
    x_adv[0, 0, 0] += 0.0004
    moved = tf.cast(model.features(x_adv) - model.features(images), tf.float32)
    np.testing.assert_allclose(moved[0, 0], 0.4, rtol=0.02)
    assert np.abs(model(x_adv) - model(images)).max() > 0.1  # the same through `call`


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_zero_features_train_without_nan(policy):
    keras.config.set_dtype_policy(policy)
    model = build_model()
    model.network.layers[-1].bias.assign([-100.0] * 6)  # ReLU: all features are zero
    model.compile(optimizer=keras.optimizers.SGD(0.1), run_eagerly=True)
    assert np.isfinite(fit(model)["loss"]).all()
    assert all(np.isfinite(weight).all() for weight in model.get_weights())


def test_the_policy_is_saved_with_the_model(tmp_path):
    keras.config.set_dtype_policy("mixed_float16")
    model = build_model()
    model.compile(optimizer=keras.optimizers.SGD(0.1, momentum=0.9), run_eagerly=True)
    fit(model)
    model.save(tmp_path / "model.keras")
    keras.config.set_dtype_policy("float32")
    loaded = he.load_model(tmp_path / "model.keras")
    assert loaded.dtype_policy.name == "mixed_float16"
    assert isinstance(loaded.optimizer, keras.optimizers.LossScaleOptimizer)
    fit(model)
    fit(loaded)
    for weight, expected in zip(loaded.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, expected)
