"""LLR against NumPy on linear models; its settings, passes, statistics and search."""

import json

import keras
import numpy as np
import numpy_training as closed_form
import pytest
import tensorflow as tf
from closed_form_objectives import HEADS, THREAT, examples
from numpy_training import BATCH_SIZE, CLASSES
from small_objectives import (
    MOMENTUM,
    CallCounter,
    build_model,
    moving_statistics,
    train_one_step,
)
from small_objectives import examples as small_examples

import he_keras as he
from he_keras import objectives
from he_keras.objectives.llr import LLR
from he_keras.objectives.local_linearity import Search, Tangent, most_nonlinear_point

K = 3


def llr(**options):
    return LLR(THREAT, num_steps=K, **{"warm_up_steps": 0, **options})


# The loss


def numpy_losses(head, x, labels, x_adv, weights, smoothing=0.0):
    """`a l + lambda |l(x') - l - <d, G>| + mu |<d, G>|`, with G by hand."""

    def loss(points):
        logits = head.with_margin(head.logits(points), labels)
        log_p = closed_form.log_softmax(logits)
        target = np.full(log_p.shape, smoothing / (CLASSES - 1))
        target[np.arange(len(labels)), labels] = 1.0 - smoothing
        return -np.sum(target * log_p, axis=1), np.exp(log_p) - target

    clean, residual = loss(x)
    slope = np.sum((x_adv - x) * head.backward(x, residual)[1], axis=1)
    deviation = np.abs(loss(x_adv)[0] - clean - slope)
    nominal, linearity, steepness = weights
    return nominal * clean + linearity * deviation + steepness * np.abs(slope)


def twin_models(head_name, objective):
    """A Keras model, its NumPy head with the same weights, images, labels, perturbed images."""
    numpy_head, make_head = HEADS[head_name]
    network = keras.Sequential([keras.Input(closed_form.SHAPE), keras.layers.Flatten()])
    model = he.HEAdversarialModel(network, make_head(), objective, None)
    generator = np.random.default_rng(11)
    for weight in model.trainable_variables:
        weight.assign(generator.normal(0.0, 1.0, weight.shape))
    x, labels = (part[:BATCH_SIZE] for part in examples())
    x_adv = np.clip(x + generator.uniform(-0.1, 0.1, x.shape), 0, 1).astype("float32")
    return model, numpy_head([each.astype(float) for each in model.get_weights()]), x, labels, x_adv


def rows(images):
    return images.reshape(len(images), -1).astype(float)


@pytest.mark.parametrize(
    ("head_name", "options", "weights"),
    [
        ("linear", {}, (1.0, 4.0, 3.0)),
        ("linear", {"weights": "released"}, (2.0, 4.0, 1.2)),
        ("he", {"label_smoothing": 0.3}, (1.0, 4.0, 3.0)),
        ("m-he", {"linearity_weight": 0.0, "slope_weight": 6.0}, (1.0, 0.0, 6.0)),
        ("m-he", {"nominal_weight": 0.0, "statistics": "moving"}, (0.0, 4.0, 3.0)),
    ],
)
def test_loss_and_gradient_of_the_weights_are_those_of_numpy(head_name, options, weights):
    model, head, x, labels, x_adv = twin_models(head_name, llr(**options))
    smoothing = options.get("label_smoothing", 0.0)
    inputs = rows(x), labels, rows(x_adv)
    with tf.GradientTape() as tape:
        losses = model.objective.loss(model, tf.constant(x), labels, tf.constant(x_adv))
    expected = numpy_losses(head, *inputs, weights, smoothing)
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    for weight, gradient in zip(
        head.weights, tape.gradient(losses, model.trainable_variables), strict=True
    ):
        differences = np.zeros(weight.shape)
        for place in np.ndindex(*weight.shape):
            kept = weight[place]
            for sign in (1, -1):
                weight[place] = kept + sign * 1e-5
                differences[place] += sign * numpy_losses(head, *inputs, weights, smoothing).sum()
            weight[place] = kept
        np.testing.assert_allclose(gradient, differences / 2e-5, rtol=2e-3, atol=2e-4)


def test_logits_are_those_at_the_point_and_at_the_images():
    model, head, x, labels, x_adv = twin_models("he", llr())
    training_pass = model.objective.forward(model, tf.constant(x), labels, tf.constant(x_adv))
    np.testing.assert_allclose(training_pass.logits, head.logits(rows(x_adv)), rtol=1e-4)
    np.testing.assert_allclose(training_pass.clean_logits, head.logits(rows(x)), rtol=1e-4)


# Settings


def test_weightings():
    def weights(**options):
        objective = LLR(THREAT, **options)
        return objective.nominal_weight, objective.linearity_weight, objective.slope_weight

    assert weights() == weights(weights="paper") == (1.0, 4.0, 3.0)
    assert weights(weights="released") == (2.0, 4.0, 1.2)
    assert weights(linearity_weight=3.0, slope_weight=6.0) == (1.0, 3.0, 6.0)
    assert weights(weights="released", nominal_weight=0.0) == (0.0, 4.0, 1.2)


def test_defaults_are_the_released_ones():
    objective = objectives.get("llr", THREAT)
    assert (objective.num_steps, objective.optimizer, objective.learning_rate) == (10, "adam", 0.1)
    assert (objective.statistics, objective.linear_term) == ("batch", False)
    assert objective.batch_norm_passes == ("clean",)


@pytest.mark.parametrize(("step", "share"), [(0, 0.0), (125, 0.25), (500, 1.0), (9000, 1.0)])
def test_the_radius_grows_over_the_first_steps(step, share):
    objective = LLR(THREAT, optimizer="sign", step_size=0.05)
    sizes = objective.sizes_at(step)
    assert float(sizes.threat.epsilon) == pytest.approx(share * 0.1)
    assert float(sizes.step_size(objective.step_size)) == pytest.approx(share * 0.05, rel=1e-4)
    assert LLR(THREAT, warm_up_steps=0).sizes_at(step).threat is THREAT


def test_configuration_is_plain_data_and_comes_back():
    schedule = keras.optimizers.schedules.PolynomialDecay(0.0, 7, 0.05)
    for options in (
        {},
        {"weights": "released", "slope_weight": 2.0, "optimizer": "sign", "step_size": "2/255"},
        {"statistics": "moving", "linear_term": True, "warm_up_steps": 30, "learning_rate": 0.5},
        {"epsilon_schedule": schedule, "nominal_weight": 0.5, "label_smoothing": 0.1},
    ):
        objective = LLR(THREAT, num_steps=2, **options)
        stored = json.loads(json.dumps(keras.saving.serialize_keras_object(objective)))
        restored = keras.saving.deserialize_keras_object(stored)
        assert restored.get_config() == objective.get_config()
        for step in (3, 20, 600):
            radii = [each.sizes_at(step).threat.epsilon for each in (objective, restored)]
            assert float(radii[0]) == float(radii[1])
    assert float(objective.sizes_at(600).threat.epsilon) == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_steps": 0}, "num_steps=0"),
        ({"weights": "mine"}, "weights='mine'"),
        ({"linearity_weight": -1.0}, "linearity_weight=-1.0"),
        ({"slope_weight": float("nan")}, "slope_weight=nan"),
        ({"optimizer": "sgd"}, "optimizer='sgd'"),
        ({"learning_rate": 0.0}, "learning_rate=0.0"),
        ({"step_size": 0.0}, "step_size=0.0"),
        ({"statistics": "clean"}, "statistics='clean'"),
        ({"warm_up_steps": -1}, "warm_up_steps=-1"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=f"expected .*received {message}"):
        LLR(THREAT, **options)
    with pytest.raises(ValueError, match="needs a threat model"):
        LLR(None)
    with pytest.raises(TypeError, match="linear_term=1"):
        LLR(THREAT, linear_term=1)


# The search: l(x + d) = <a, d> + sum b d^2, so that g = |sum b d^2|

SLOPES = np.array([[2.0, -1.0, 0.5], [-1.0, 1.0, 2.0], [0.3, -0.3, 0.3]])
CURVATURES = np.array([[3.0, 2.0, 1.0], [-1.0, -2.0, -0.5], [2.0, -1.0, 1.0]])
CENTRE = np.full((3, 3), 0.5)


def search(start, **options):
    def forward(x):
        return SLOPES * (x - CENTRE) + CURVATURES * (x - CENTRE) ** 2

    def loss(terms):
        return tf.reduce_sum(terms, axis=1)

    tangent = Tangent(tf.zeros(3, tf.float64), tf.constant(SLOPES))
    images, start = tf.constant(CENTRE), tf.constant(start)
    found = most_nonlinear_point(Search(**options), forward, loss, images, tangent, start, THREAT)
    return found.numpy() - CENTRE


@pytest.mark.parametrize("keep", ["last", "best"])
@pytest.mark.parametrize(("optimizer", "step_size"), [("adam", 0.1), ("sign", 0.03)])
def test_the_search_finds_the_corner_of_largest_deviation(optimizer, step_size, keep):
    start = CENTRE + np.random.default_rng(3).uniform(-0.02, 0.02, CENTRE.shape)
    start[2] = CENTRE[2] + [0.05, 0.002, -0.05]
    settings = {"num_steps": 20, "optimizer": optimizer, "step_size": step_size, "keep": keep}
    found = search(start, linear_term=True, **settings)
    signs = np.sign(start - CENTRE)
    np.testing.assert_allclose(found[:2], 0.1 * signs[:2], atol=1e-12)
    # Of mixed curvature: the middle coordinate, which lowers the deviation, stays small.
    np.testing.assert_allclose(found[2, ::2], 0.1 * signs[2, ::2], atol=1e-12)
    if keep == "best":
        assert abs(found[2, 1]) < 0.05


def test_the_released_search_follows_the_loss_alone():
    start = CENTRE + 0.001
    settings = {"num_steps": 5, "optimizer": "adam", "step_size": 0.1}
    released = search(start, linear_term=False, **settings)
    # Where the slope dominates, sgn * grad l has the sign of slope times sum of curvatures.
    np.testing.assert_allclose(released[:2], 0.1 * np.sign(SLOPES[:2]) * [[1], [-1]], atol=1e-12)
    assert np.abs(search(start, linear_term=True, **settings) - released).max() > 0.1


def test_one_step_of_adam_is_a_step_of_its_learning_rate():
    start = CENTRE + 0.001
    found = search(start, num_steps=1, optimizer="adam", step_size=0.01)
    deviation = np.sum(CURVATURES * 0.001**2, axis=1, keepdims=True)
    slope = SLOPES + 2 * CURVATURES * 0.001
    np.testing.assert_allclose(found, 0.001 + 0.01 * np.sign(deviation * slope), atol=1e-6)


def test_the_best_iterate_is_never_worse_than_the_last():
    start = CENTRE + np.random.default_rng(5).uniform(-0.1, 0.1, CENTRE.shape)
    settings = {"num_steps": 4, "optimizer": "sign", "step_size": 0.07, "linear_term": True}

    def deviations(perturbation):
        return np.abs(np.sum(CURVATURES * perturbation**2, axis=1))

    best, last = (deviations(search(start, keep=keep, **settings)) for keep in ("best", "last"))
    assert np.all(best >= last) and np.any(best > last)
    assert np.all(best >= deviations(start - CENTRE))
    # The last iterate is one of those that count.
    settings = {"num_steps": 1, "optimizer": "sign", "step_size": 0.01, "linear_term": True}
    risen = search(CENTRE + 0.01, keep="best", **settings)[:2]
    np.testing.assert_allclose(risen, 0.02, atol=1e-12)


def test_craft_starts_uniformly_and_stays_within_the_threat_model():
    model, _, x, labels, _ = twin_models("he", llr())
    x = tf.constant(np.where(x > 0.8, 1.0, x).astype("float32"))
    x_adv = model.objective.craft(model, x, labels, (3, 1)).numpy()
    assert np.abs(x_adv - x).max() <= 0.1 + 1e-6 and x_adv.max() <= 1.0
    np.testing.assert_array_equal(x_adv, model.objective.craft(model, x, labels, (3, 1)))
    assert np.any(x_adv != model.objective.craft(model, x, labels, (3, 2)))
    # At radius 0, where the warm-up begins, nothing moves, and the loss is the nominal one.
    objective = llr(warm_up_steps=10)
    np.testing.assert_array_equal(objective.craft(model, x, labels, step_number=tf.constant(0)), x)
    nominal = objective.cross_entropy(model, model(x), labels)
    np.testing.assert_allclose(objective.loss(model, x, labels, x), nominal, rtol=1e-6)


# Passes and batch norm


MOVING = pytest.param("moving", marks=pytest.mark.slow)


@pytest.mark.parametrize("statistics", ["batch", MOVING])
def test_number_and_mode_of_forward_passes(statistics):
    """Eager, the loop of the search calls the model once a step."""
    counter = CallCounter()
    model = build_model(llr(statistics=statistics), counter=counter)
    counter.flags.clear()
    train_one_step(model, *small_examples(), run_eagerly=True)
    if statistics == "batch":
        assert counter.flags == [True] + [False] * K + [True, False]
    else:
        assert counter.flags == [False] * (K + 3) + [True]


@pytest.mark.parametrize("statistics", ["batch", MOVING])
def test_batch_norm_statistics_come_from_the_clean_images_once(statistics):
    images, labels = small_examples()
    model = build_model(llr(statistics=statistics, warm_up_steps=2))
    model.objective.craft(model, tf.constant(images), labels)
    np.testing.assert_array_equal(moving_statistics(model), [np.zeros(9), np.ones(9)])
    model.compile(optimizer=keras.optimizers.SGD(0.1))
    history = model.fit(images, labels, batch_size=len(images), verbose=0).history
    assert set(history) == {"loss", "accuracy", "clean_accuracy", "epsilon"}
    assert np.isfinite(history["loss"]).all() and history["epsilon"] == [0.0]
    flat = images.reshape(len(images), -1).astype(float)
    batch = np.stack([flat.mean(axis=0), flat.var(axis=0)])
    expected = MOMENTUM * np.stack([np.zeros(9), np.ones(9)]) + (1 - MOMENTUM) * batch
    np.testing.assert_allclose(moving_statistics(model), expected, atol=2e-6)
