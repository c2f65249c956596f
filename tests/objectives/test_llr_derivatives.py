"""LLR's double backward: finite differences, batch statistics, heads at their edges, networks."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from replicated_training import mirrored

import he_keras as he
from he_keras import networks
from he_keras.layers.batch_norm import BatchNormalization
from he_keras.objectives.llr import LLR, pass_with_statistics

THREAT = he.ThreatModel("linf", 0.1)
HEADS = {
    "linear": lambda: keras.layers.Dense(3),
    "he": lambda: he.CosineHead(3, scale=5.0, margin=0.2),
    "m-he": lambda: he.CosineHead(3, scale=5.0, margin=0.1, angle="arc"),
}


def tiny(x):
    x = BatchNormalization()(keras.layers.Conv2D(2, 2, use_bias=False)(x))
    return keras.layers.Flatten()(keras.layers.Activation("softplus")(x))


def small(x):
    """Of everything in the networks something: strides, a shortcut, maximum and mean pooling."""
    for filters, activation in ((4, "softplus"), (6, "swish")):
        shortcut = keras.layers.Conv2D(filters, 1, use_bias=False)(x)
        x = keras.layers.Activation(activation)(BatchNormalization()(x))
        x = keras.layers.Conv2D(filters, 3, padding="same")(x)
        x = keras.layers.MaxPooling2D(2)(keras.layers.Add()([x, shortcut]))
    x = keras.layers.Activation("softplus")(BatchNormalization()(x))
    return keras.layers.GlobalAveragePooling2D()(x)


def build(body, head="linear", policy="float64", size=4, **options):
    """A model with weights and moving averages away from their initial values."""
    keras.config.set_dtype_policy(policy)
    inputs = keras.Input((size, size, 1), dtype=policy)
    objective = LLR(THREAT, num_steps=2, warm_up_steps=0, **options)
    network = keras.Model(inputs, body(inputs))
    model = he.HEAdversarialModel(network, HEADS[head](), objective, None)
    generator = np.random.default_rng(2)
    for weight in model.weights:
        weight.assign(weight + generator.uniform(0.0, 0.6, weight.shape))
    return model


def batch(size=4, count=5, dtype="float64"):
    generator = np.random.default_rng(1)
    x = generator.uniform(0.2, 0.8, (count, size, size, 1))
    x_adv = x + generator.uniform(-0.1, 0.1, x.shape)
    return tf.constant(x, dtype), tf.constant(np.arange(count) % 3), tf.constant(x_adv, dtype)


def value_and_gradient(model, x, labels, x_adv):
    averages = [variable.numpy() for variable in model.non_trainable_variables]
    with tf.GradientTape() as tape:
        total = tf.reduce_mean(model.objective.loss(model, x, labels, x_adv))
    for variable, value in zip(model.non_trainable_variables, averages, strict=True):
        variable.assign(value)
    return float(total), [each.numpy() for each in tape.gradient(total, model.trainable_variables)]


def assert_gradient_is_that_of_differences(model, data, num_directions, width=1e-5):
    """Compares slopes along random directions, each over all weights."""
    _, gradient = value_and_gradient(model, *data)
    compiled = tf.function(
        lambda: tf.reduce_mean(model.objective.loss(model, *data)), reduce_retracing=True
    )
    variables = model.trainable_variables
    values = [variable.numpy() for variable in variables]
    averages = [variable.numpy() for variable in model.non_trainable_variables]
    generator = np.random.default_rng(7)
    for _ in range(num_directions):
        direction = [generator.normal(size=value.shape) for value in values]
        ends = []
        for sign in (1, -1):
            for variable, value, part in zip(variables, values, direction, strict=True):
                variable.assign(value + sign * width * part)
            for variable, value in zip(model.non_trainable_variables, averages, strict=True):
                variable.assign(value)
            ends.append(float(compiled()))
        slope = sum(np.sum(a * b) for a, b in zip(gradient, direction, strict=True))
        assert (ends[0] - ends[1]) / (2 * width) == pytest.approx(slope, rel=1e-6)


@pytest.mark.parametrize("statistics", ["batch", pytest.param("moving", marks=pytest.mark.slow)])
def test_whole_gradient_of_a_tiny_network(statistics):
    model = build(tiny, statistics=statistics)
    assert_gradient_is_that_of_differences(model, batch(), num_directions=12)


@pytest.mark.slow
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("statistics", ["batch", "moving"])
def test_whole_gradient_of_a_small_network(statistics, head):
    model = build(small, head, size=8, statistics=statistics, label_smoothing=0.1)
    assert_gradient_is_that_of_differences(model, batch(8), num_directions=20)


def test_float32_gradient_is_that_of_float64():
    """In float32 the layers take their fused kernel wherever it has the derivatives."""
    model = build(tiny, "he")
    exact = value_and_gradient(model, *batch())
    single = build(tiny, "he", policy="float32")
    single.set_weights(model.get_weights())
    rounded = value_and_gradient(single, *batch(dtype="float32"))
    assert rounded[0] == pytest.approx(exact[0], rel=1e-5)
    for mine, reference in zip(rounded[1], exact[1], strict=True):
        np.testing.assert_allclose(mine, reference, rtol=1e-3, atol=1e-4)


# Statistics


def test_the_perturbed_pass_is_normalised_by_the_clean_batch():
    """At the images themselves nothing deviates, whatever the moving averages."""
    model = build(tiny, policy="float32")
    x, labels, _ = batch(dtype="float32")
    before = model.predict(x, verbose=0)
    passed = model.objective.forward(model, x, labels, x)
    np.testing.assert_allclose(passed.logits, passed.clean_logits, atol=1e-5)
    nominal = model.objective.cross_entropy(model, passed.clean_logits, labels)
    np.testing.assert_allclose(passed.losses, nominal, atol=2e-5)
    assert np.abs(before - passed.clean_logits).max() > 0.1
    # Outside training the moving averages count.
    evaluated = model.objective.forward(model, x, labels, x, training=False)
    np.testing.assert_allclose(evaluated.clean_logits, model(x, training=False), atol=1e-6)


def test_one_image_changes_the_loss_of_another_through_the_statistics():
    model = build(tiny)
    x, labels, x_adv = batch()
    with tf.GradientTape() as tape:
        tape.watch(x)
        first = model.objective.loss(model, x, labels, x_adv)[0]
    assert np.abs(tape.gradient(first, x)[1:]).max() > 1e-4


@pytest.mark.parametrize("layer", [BatchNormalization, keras.layers.BatchNormalization])
def test_statistics_of_a_pass(layer):
    normalization, frozen = layer(momentum=0.7), layer(momentum=0.7)
    frozen.trainable = False
    parts = [normalization, keras.layers.Dropout(0.5, seed=3), frozen, keras.layers.Flatten()]
    model = keras.Sequential([keras.Input((2, 2, 3)), *parts])
    for each in (normalization, frozen):
        each.set_weights(np.random.default_rng(4).uniform(0.5, 1.5, (4, 3)))
    images = np.random.default_rng(0).normal(2.0, 3.0, (6, 2, 2, 3)).astype("float32")
    before = [variable.numpy() for variable in model.non_trainable_variables]
    logits, statistics = pass_with_statistics(model, tf.constant(images), update=False)
    for variable, value in zip(model.non_trainable_variables, before, strict=True):
        np.testing.assert_array_equal(variable, value)
    assert [id(variable) for variable, _ in statistics] == [
        id(normalization.moving_mean),
        id(normalization.moving_variance),
    ]
    flat = images.reshape(-1, 3)
    np.testing.assert_allclose(statistics[0][1], flat.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(statistics[1][1], flat.var(axis=0), rtol=1e-5)
    # With the update the pass is Keras's own: the same logits, averages and dropout state.
    twin = keras.models.clone_model(model)
    twin.set_weights(model.get_weights())
    updated, _ = pass_with_statistics(model, tf.constant(images), update=True)
    np.testing.assert_array_equal(updated, logits)
    np.testing.assert_allclose(twin(images, training=True), logits, atol=1e-5)
    for mine, reference in zip(
        model.non_trainable_variables, twin.non_trainable_variables, strict=True
    ):
        np.testing.assert_allclose(mine, reference, rtol=1e-5)


# Edges and networks


@pytest.mark.parametrize("head", ["he", "m-he"])
def test_second_derivatives_are_finite_where_angles_have_none(head):
    """A zero feature vector, and vectors along and against the weights of a class."""
    network = keras.Sequential([keras.Input((3,)), keras.layers.Flatten()])
    objective = LLR(THREAT, num_steps=2, warm_up_steps=0)
    model = he.HEAdversarialModel(network, HEADS[head](), objective, None)
    model.head.kernel.assign(np.diag([1.0, 1.0, 2.0]).astype("float32"))
    x = np.array([[0, 0, 0], [0.5, 0, 0], [0, 0.4, 0], [0.3, 0.3, 0.3]], "float32")
    x_adv = np.clip(x + [[0.1, 0, 0]], 0, 1).astype("float32")
    labels = np.array([0, 0, 2, 1])
    for points in (x, x_adv):
        with tf.GradientTape() as tape:
            losses = objective.loss(model, tf.constant(x), labels, tf.constant(points))
        assert np.isfinite(losses).all()
        assert np.isfinite(tape.gradient(losses, model.head.kernel.value)).all()
    assert np.isfinite(objective.craft(model, tf.constant(x), labels)).all()


SMALLEST = {
    "lenet": (8, 8, 1),
    "mobilenet-v2": (8, 8, 3),
    "preact-resnet-18": (8, 8, 3),
    "resnet-50": (32, 32, 3),
    "small-cnn": (28, 28, 1),
    "vgg-16-bn": (32, 32, 3),
    "wide-resnet-10-1": (8, 8, 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["relu", "swish"])
@pytest.mark.parametrize("name", SMALLEST)
def test_every_family_of_networks_has_the_double_backward(name, activation):
    options = {"width": 2} if name in ("lenet", "vgg-16-bn") else {}
    network = networks.get(name, SMALLEST[name], activation=activation, **options)
    objective = LLR(THREAT, num_steps=2, warm_up_steps=0)
    model = he.HEAdversarialModel(network, he.CosineHead(3, scale=5.0), objective, None)
    generator = np.random.default_rng(0)
    x = tf.constant(generator.uniform(0, 1, (4, *SMALLEST[name])).astype("float32"))
    labels = np.array([0, 1, 2, 0])
    x_adv = objective.craft(model, x, labels)
    with tf.GradientTape() as tape:
        losses = objective.loss(model, x, labels, x_adv)
    gradients = tape.gradient(losses, model.trainable_variables)
    assert np.isfinite(losses).all()
    assert all(np.isfinite(gradient).all() for gradient in gradients)
    assert np.mean([np.any(gradient) for gradient in gradients]) > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_half_precision_trains(policy):
    keras.config.set_dtype_policy(policy)
    network = networks.get("wide-resnet-10-1", (8, 8, 3), activation="softplus")
    objective = LLR(THREAT, num_steps=2, warm_up_steps=0)
    model = he.HEAdversarialModel(network, he.CosineHead(3), objective, None)
    model.compile(optimizer=keras.optimizers.SGD(0.05))
    x = np.random.default_rng(0).uniform(0, 1, (12, 8, 8, 3)).astype("float32")
    history = model.fit(x, np.arange(12) % 3, batch_size=6, epochs=8, verbose=0).history
    assert np.isfinite(history["loss"]).all()
    assert history["loss"][-1] < history["loss"][0]


def trained_on(strategy, statistics):
    """Weights after two steps at a radius of nearly 0, where random starts do not matter."""
    with strategy.scope():
        keras.utils.set_random_seed(0)
        inputs = keras.Input((6, 6, 1))
        x = BatchNormalization(synchronized=True)(keras.layers.Conv2D(3, 3)(inputs))
        x = keras.layers.Flatten()(keras.layers.Activation("softplus")(x))
        threat = he.ThreatModel("linf", 1e-6)
        objective = LLR(threat, 2, warm_up_steps=0, slope_weight=1e5, statistics=statistics)
        model = he.HEAdversarialModel(keras.Model(inputs, x), HEADS["he"](), objective, None)
        model.compile(optimizer=keras.optimizers.SGD(0.01))
    images = np.random.default_rng(0).uniform(0.2, 0.8, (8, 6, 6, 1)).astype("float32")
    model.fit(images, np.arange(8) % 3, batch_size=8, epochs=2, verbose=0, shuffle=False)
    return [weight.numpy() for weight in model.weights]


@pytest.mark.slow
@pytest.mark.parametrize("statistics", ["batch", "moving"])
def test_two_replicas_with_synchronized_batch_norm_make_one_step(statistics):
    two = trained_on(mirrored(), statistics)
    one = trained_on(tf.distribute.OneDeviceStrategy("CPU:0"), statistics)
    for mine, reference in zip(two, one, strict=True):
        np.testing.assert_allclose(mine, reference, atol=1e-5)
