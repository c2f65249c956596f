"""Training in half precision: logits, losses, attacks and perturbations stay in float32."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import he_keras as he
from he_keras import objectives
from he_keras.attacks import Victim
from he_keras.attacks.framework.gradients import image_gradient, loss_and_gradient
from he_keras.layers.input_standardization import InputStandardization

SHAPE = (4, 4, 1)
THREAT = he.ThreatModel("linf", 0.1)
HEADS = {"linear": lambda: keras.layers.Dense(3), "he": lambda: he.CosineHead(3, scale=5.0)}


def examples(count=10):
    generator = np.random.default_rng(0)
    images = generator.uniform(0.1, 0.9, (count, *SHAPE)).astype(np.float32)
    return images, generator.integers(0, 3, count)


def build_model(objective=None, head="he", network=None):
    if network is None:
        layers = [keras.Input(SHAPE), keras.layers.Flatten(), keras.layers.Dense(6, "relu")]
        network = keras.Sequential(layers)
    objective = objectives.PGDAT(THREAT, 2, random_start=False) if objective is None else objective
    attack = he.attacks.get("pgd-2", THREAT)
    model = he.HEAdversarialModel(network, HEADS[head](), objective, attack)
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


@pytest.mark.fast_cases("mixed_float16-he", "mixed_bfloat16-linear", "float64-he")
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


def confident_pair(objective, doubt, of=min):
    """One model in both precisions, and labels of which the least certain has that doubt left."""
    models = []
    for policy in ("float32", "mixed_float16"):
        keras.config.set_dtype_policy(policy)
        models.append(build_model(objective, "linear"))
    images, _ = map(tf.constant, examples())
    logits = models[0](images).numpy()
    top = np.sort(logits, axis=1)
    # The weights of the head are scaled, and so is every gap between logits.
    factor = -np.log(doubt) / of(top[:, -1] - top[:, -2])
    for model in models:
        model.head.kernel.assign(model.head.kernel * factor)
        model.head.bias.assign(model.head.bias * factor)
    return models, images, tf.constant(logits.argmax(axis=1))


@pytest.mark.parametrize(
    ("name", "doubt"),
    [
        *itertools.product(["pgd_at", "n_fgsm", "fast_adv_plus", "llr"], [1e-5]),
        # A divergence between predictions without any doubt is zero in single precision, too.
        *itertools.product(["trades", "rat"], [1e-2]),
    ],
)
def test_the_adversary_moves_every_pixel_of_a_confident_prediction(name, doubt):
    """Without a scale, float16 rounds the gradient of a small loss to zero within the network."""
    options = {"warm_up_steps": 0} if name == "llr" else {}
    if name in ("pgd_at", "trades", "rat"):
        options = {"num_steps": 1, "step_size": 0.1, "random_start": 0.001}
    objective = objectives.get(name, THREAT, **options)
    pair, images, labels = confident_pair(objective, doubt)
    crafted = []
    for model in pair:
        objective.build(SHAPE)
        crafted.append(objective.craft(model, images, labels, (1, 2)).numpy() - images.numpy())
    expected, moved = crafted
    assert moved.dtype == np.float32
    # The signs of gradients that are nearly zero differ, by the rounding of the weights alone.
    assert (np.sign(moved) == np.sign(expected)).mean() > 0.93


def test_gradients_in_half_precision_are_those_of_single_precision():
    """Their size too, which LLR and the penalty attacks use: to the rounding of float16."""
    (single, half), images, labels = confident_pair(objectives.Standard(), 1e-6, of=max)

    def gradient(model):
        return loss_and_gradient(
            Victim(model), lambda logits: he.losses.cross_entropy(logits, labels), images
        )[2].numpy()

    expected, actual = gradient(single), gradient(half)
    sizes = np.abs(expected).max(axis=(1, 2, 3))
    assert (sizes > 0).all() and sizes.max() > 1e3 * sizes.min()
    difference = np.abs(actual - expected).max(axis=(1, 2, 3))
    assert (difference < 0.03 * sizes).all()


def test_an_overflow_of_one_image_is_its_own():
    """A scale for the batch would leave all images unattacked, or none of the confident ones."""
    keras.config.set_dtype_policy("mixed_float16")
    model = build_model(objectives.Standard(), "linear")
    images, labels = map(tf.constant, examples())
    weights = tf.constant([1e30] + [1e-6] * 9)
    gradient = loss_and_gradient(
        Victim(model), lambda logits: weights * he.losses.cross_entropy(logits, labels), images
    )[2].numpy()
    assert np.isfinite(gradient).all()
    assert (gradient != 0).mean(axis=(1, 2, 3)).min() > 0.9


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_scaling_changes_no_bit_where_nothing_underflows(dtype):
    keras.config.set_dtype_policy(dtype)
    model = build_model(objectives.Standard())
    images, labels = map(tf.constant, examples())
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(images)
        logits = model(images, training=False)
        loss = he.losses.cross_entropy(logits, labels)

    def cross_entropy(logits):
        return he.losses.cross_entropy(logits, labels)

    _, scaled = image_gradient(tape, cross_entropy, images, logits)
    np.testing.assert_array_equal(scaled, tape.gradient(loss, images))


@pytest.mark.slow
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
