"""Losses: float64 NumPy versions, the HE paper's values and Lemma 2, extremes, derivatives."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from he_keras import losses
from he_keras.layers import CosineHead

PROPERTY = settings(max_examples=40, deadline=None, derandomize=True, database=None)


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def pick(logits, labels):
    return np.asarray(logits, np.float64)[np.arange(len(labels)), labels]


def numpy_margin(logits, labels):
    others = [np.delete(row, label).max() for row, label in zip(logits, labels, strict=True)]
    return pick(logits, labels) - np.array(others, np.float64)


def numpy_dlr(logits, labels):
    ordered = np.sort(np.asarray(logits, np.float64), axis=1)
    return -numpy_margin(logits, labels) / (ordered[:, -1] - ordered[:, -3] + 1e-12)


def numpy_dlr_targeted(logits, labels, targets):
    ordered = np.sort(np.asarray(logits, np.float64), axis=1)
    spread = ordered[:, -1] - 0.5 * (ordered[:, -3] + ordered[:, -4]) + 1e-12
    return -(pick(logits, labels) - pick(logits, targets)) / spread


def numpy_kl(clean_logits, logits):
    log_q, log_p = log_softmax(clean_logits), log_softmax(logits)
    return np.sum(np.exp(log_q) * (log_q - log_p), axis=1)


def numpy_soft_cross_entropy(clean_logits, logits):
    return -np.sum(np.exp(log_softmax(clean_logits)) * log_softmax(logits), axis=1)


LABEL_LOSSES = {
    "cross_entropy": (losses.cross_entropy, lambda o, y: -pick(log_softmax(o), y)),
    "margin": (losses.margin, numpy_margin),
    "cw_margin": (losses.cw_margin, lambda o, y: -numpy_margin(o, y)),
    "dlr": (losses.dlr, numpy_dlr),
    "true_logit": (losses.true_logit, pick),
}
PAIR_LOSSES = {
    "kl_divergence": (losses.kl_divergence, numpy_kl),
    "soft_cross_entropy": (losses.soft_cross_entropy, numpy_soft_cross_entropy),
}


def random_logits(seed=0, shape=(8, 6), scale=3.0):
    generator = np.random.default_rng(seed)
    return scale * generator.normal(size=shape), generator.integers(shape[1], size=shape[0])


def gradients(function, *inputs):
    """Gradients of the sum of `function(*inputs)`, as arrays."""
    tensors = [tf.constant(each) for each in inputs]
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        total = tf.reduce_sum(function(*tensors))
    return [gradient.numpy() for gradient in tape.gradient(total, tensors)]


def central_difference(function, point, step=1e-6):
    slopes = np.zeros_like(point)
    for index in np.ndindex(point.shape):
        shift = np.zeros_like(point)
        shift[index] = step
        slopes[index] = (function(point + shift) - function(point - shift)) / (2 * step)
    return slopes


@pytest.mark.parametrize("dtype, tolerance", [("float32", 2e-5), ("float64", 1e-12)])
@pytest.mark.parametrize("name", [*LABEL_LOSSES, *PAIR_LOSSES])
def test_every_loss_equals_its_numpy_version(name, dtype, tolerance):
    logits, labels = random_logits()
    logits = logits.astype(dtype)
    if name in LABEL_LOSSES:
        function, reference = LABEL_LOSSES[name]
        second, arguments = labels, (tf.constant(logits), labels)
    else:
        function, reference = PAIR_LOSSES[name]
        second = random_logits(seed=1)[0].astype(dtype)
        arguments = (tf.constant(logits), tf.constant(second))
    expected = reference(logits, second)
    for result in (function(*arguments), tf.function(function)(*arguments)):
        assert result.dtype.name == dtype and result.shape == (8,)
        np.testing.assert_allclose(result, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype, tolerance", [("float32", 2e-5), ("float64", 1e-12)])
def test_targeted_dlr_equals_its_numpy_version_for_every_target(dtype, tolerance):
    logits, labels = random_logits()
    for offset in range(1, 6):
        targets = (labels + offset) % 6
        result = losses.dlr_targeted(tf.constant(logits, dtype), labels, targets)
        expected = numpy_dlr_targeted(logits.astype(dtype), labels, targets)
        np.testing.assert_allclose(result, expected, rtol=tolerance, atol=tolerance)


def test_losses_by_hand():
    logits, labels = tf.constant([[5.0, 1.0, 3.0, 2.0], [5.0, 1.0, 3.0, 2.0]]), np.array([0, 2])
    assert losses.margin(logits, labels).numpy().tolist() == [2.0, -2.0]
    assert losses.cw_margin(logits, labels).numpy().tolist() == [-2.0, 2.0]
    np.testing.assert_allclose(losses.dlr(logits, labels), [-2 / 3, 2 / 3], rtol=1e-6)
    targeted = losses.dlr_targeted(logits, labels, np.array([1, 0]))
    np.testing.assert_allclose(targeted, [-4 / 3.5, 2 / 3.5], rtol=1e-6)
    halves, quarters = tf.math.log([[0.5, 0.5]]), tf.math.log([[0.25, 0.75]])
    expected = 0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75)
    np.testing.assert_allclose(losses.kl_divergence(halves, quarters), [expected], rtol=1e-5)
    cross = losses.soft_cross_entropy(halves, quarters)
    np.testing.assert_allclose(cross, [expected + np.log(2)], rtol=1e-6)


# Mean loss of the released code (float64) for these cosines and labels.
RELEASED_COSINES = np.sin(0.7 * np.arange(40)).reshape(4, 10)
RELEASED_LABELS = np.array([0, 3, 5, 9])
RELEASED_VALUES = [
    (10.0, 0.2, 11.885336),
    (15.0, 0.2, 17.496522),
    (20.0, 0.3, 25.175471),
    (15.0, 0.0, 14.513370),
]


@pytest.mark.parametrize("scale, margin, expected", RELEASED_VALUES)
@pytest.mark.parametrize("dtype, tolerance", [("float64", 5e-7), ("float32", 5e-6)])
def test_hypersphere_loss_equals_the_released_one(scale, margin, expected, dtype, tolerance):
    """With unit features and weights the head's logits are the given cosines, times the scale."""
    switches = dict(feature_norm=False, weight_norm=False, kernel_initializer="identity")
    head = CosineHead(10, scale=scale, margin=margin, dtype=dtype, **switches)
    logits = head(RELEASED_COSINES.astype(dtype))
    loss = losses.cross_entropy(head.with_margin(logits, RELEASED_LABELS), RELEASED_LABELS)
    assert float(tf.reduce_mean(loss)) == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize("margin", [0.0, 0.2])
def test_hypersphere_loss_through_normalisation_equals_equation_6(margin):
    head = CosineHead(5, scale=15.0, margin=margin, dtype="float64")
    generator = np.random.default_rng(2)
    features, labels = generator.normal(size=(7, 6)), generator.integers(5, size=7)
    logits = head(features)
    loss = losses.cross_entropy(head.with_margin(logits, labels), labels)
    kernel = head.kernel.numpy()
    lengths = np.linalg.norm(features, axis=1, keepdims=True) * np.linalg.norm(kernel, axis=0)
    cosines = features @ kernel / lengths
    expected = -pick(log_softmax(15.0 * (cosines - margin * np.eye(5)[labels])), labels)
    np.testing.assert_allclose(loss, expected, rtol=1e-12)


def random_network(seed, make_head):
    """A float64 network from 4 inputs through 6 features into a new head."""
    keras.utils.set_random_seed(seed)
    head = make_head()
    body = keras.Sequential(
        [
            keras.Input((4,), dtype="float64"),
            keras.layers.Dense(8, "tanh", dtype="float64"),
            keras.layers.Dense(6, "softplus", dtype="float64"),
        ]
    )
    return lambda points: head(body(points))


LEMMA_HEADS = [
    lambda: keras.layers.Dense(5, dtype="float64"),
    lambda: CosineHead(5, scale=4.0, dtype="float64"),
    lambda: CosineHead(5, scale=4.0, angle="arc", dtype="float64"),
]


@pytest.mark.parametrize("make_head", LEMMA_HEADS)
@pytest.mark.parametrize("seed", [0, 1])
def test_lemma_2_gradient_is_a_combination_of_residual_logits(make_head, seed):
    """Eq. 9, with residual logits o_i - o_j, which are W_ij^T z' for a linear head."""
    network = random_network(seed, make_head)
    generator = np.random.default_rng(seed)
    clean = generator.normal(size=(3, 4))
    points = tf.constant(clean + generator.normal(size=(3, 4)))
    labels = generator.integers(5, size=3)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(points)
        logits = network(points)
        hard = tf.reduce_sum(losses.cross_entropy(logits, labels))
        soft = tf.reduce_sum(losses.soft_cross_entropy(network(clean), logits))
        divergence = tf.reduce_sum(losses.kl_divergence(network(clean), logits))
        each_logit = tf.reduce_sum(logits, axis=0)
        columns = tf.unstack(each_logit)
    slopes = np.stack([tape.gradient(column, points).numpy() for column in columns])
    clean_probabilities, probabilities = (
        np.exp(log_softmax(network(each).numpy())) for each in (clean, points)
    )
    for target, loss in (
        (np.eye(5)[labels], hard),
        (clean_probabilities, soft),
        (clean_probabilities, divergence),
    ):
        expected = np.zeros_like(clean)
        for i in range(5):
            for j in range(5):
                weight = target[:, i] * probabilities[:, j]
                expected -= weight[:, None] * (slopes[i] - slopes[j])
        assert np.abs(expected).max() > 1e-3
        np.testing.assert_allclose(tape.gradient(loss, points), expected, rtol=1e-9, atol=1e-12)


def test_batches_of_extreme_logits_stay_finite_and_right():
    rows = [
        [1e4, 0, 0, 0, -1e4],
        [-1e4, 1e4, 1e4, 1e4, 1e4],
        [1e4, 1e4 - 1, 5, -1e4, 0],
        [0, 0, 0, 0, 0],
        [3, 3, 3, 3, -3],
        [1e-30, 0, 0, 0, 0],
    ]
    logits, labels = np.array(rows, np.float32), np.array([4, 0, 1, 2, 4, 0])
    for function, reference in LABEL_LOSSES.values():
        result = function(tf.constant(logits), labels)
        np.testing.assert_allclose(result, reference(logits, labels), rtol=1e-5, atol=1e-6)
        (slope,) = gradients(lambda o, f=function: f(o, labels), logits)
        assert np.isfinite(slope).all()
    targets = (labels + 1) % 5
    result = losses.dlr_targeted(tf.constant(logits), labels, targets)
    np.testing.assert_allclose(result, numpy_dlr_targeted(logits, labels, targets), rtol=1e-5)
    for function, reference in PAIR_LOSSES.values():
        result = function(tf.constant(logits), tf.constant(logits[::-1].copy()))
        np.testing.assert_allclose(result, reference(logits, logits[::-1]), rtol=1e-5, atol=1e-6)
        slopes = gradients(function, logits, logits[::-1].copy())
        assert all(np.isfinite(slope).all() for slope in slopes)


def test_large_scale_margin_loss_does_not_overflow():
    """The released loss overflows in float32 beyond s (cos - m) = 88."""
    head = CosineHead(3, scale=500.0, margin=0.5)
    logits = tf.constant([[500.0, -500.0, 0.0]])
    loss = losses.cross_entropy(head.with_margin(logits, np.array([1])), np.array([1]))
    assert float(loss[0]) == 1250.0


@PROPERTY
@given(
    arrays(np.float32, (3, 5), elements=st.floats(-1e4, 1e4, width=32)),
    arrays(np.int32, 3, elements=st.integers(0, 4)),
)
def test_cw_gradient_never_vanishes(logits, labels):
    """-1 on the true class, and weights that sum to 1 on the largest others, ties included."""
    (slope,) = gradients(lambda o: losses.cw_margin(o, labels), logits)
    assert np.array_equal(pick(slope, labels), [-1.0] * 3)
    others = np.where(np.eye(5, dtype=bool)[labels], 0, slope)
    masked = np.where(np.eye(5, dtype=bool)[labels], -np.inf, logits)
    assert np.all(others[masked < masked.max(axis=1, keepdims=True)] == 0)
    np.testing.assert_allclose(others.sum(axis=1), 1.0, rtol=1e-6)


@PROPERTY
@given(
    arrays(np.float64, (2, 5), elements=st.integers(-50, 50), unique=True),
    arrays(np.int32, 2, elements=st.integers(0, 4)),
    st.sampled_from([0.01, 0.5, 15.0, 1000.0]),
    st.floats(-1e3, 1e3),
)
def test_dlr_ignores_scale_and_shift(logits, labels, scale, shift):
    targets = (labels + 1) % 5
    for function in (losses.dlr, lambda o, y: losses.dlr_targeted(o, y, targets)):
        before = function(tf.constant(logits), labels)
        after = function(tf.constant(scale * logits + shift), labels)
        np.testing.assert_allclose(after, before, rtol=1e-7, atol=1e-9)


def test_untargeted_dlr_keeps_to_one_where_the_prediction_is_right():
    logits, _ = random_logits(shape=(50, 6))
    loss = losses.dlr(tf.constant(logits), logits.argmax(axis=1)).numpy()
    assert -1 <= loss.min() and loss.max() < 0


def test_floors_of_the_ratios():
    """Equal logits: 0 / 1e-12 is 0, and a difference below a tied top is divided by the floor."""
    labels, targets = np.array([0, 4]), np.array([1, 0])
    logits = np.array([[2.0, 2.0, 2.0, 2.0, 2.0], [2.0, 2.0, 2.0, 2.0, 1.0]])
    untargeted = losses.dlr(tf.constant(logits), labels).numpy()
    targeted = losses.dlr_targeted(tf.constant(logits), labels, targets).numpy()
    np.testing.assert_allclose(untargeted, [0.0, 1e12], rtol=1e-9)
    np.testing.assert_allclose(targeted, [0.0, 1e12], rtol=1e-9)


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_gradients_of_pair_losses_through_both_arguments(name):
    function, reference = PAIR_LOSSES[name]
    clean, other = random_logits(3, (3, 4), 1.0)[0], random_logits(4, (3, 4), 1.0)[0]
    by_clean, by_other = gradients(function, clean, other)
    numeric_clean = central_difference(lambda q: reference(q, other).sum(), clean)
    numeric_other = central_difference(lambda p: reference(clean, p).sum(), other)
    assert min(np.abs(by_clean).max(), np.abs(by_other).max()) > 0.05
    np.testing.assert_allclose(by_clean, numeric_clean, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(by_other, numeric_other, rtol=1e-6, atol=1e-8)
    difference = np.exp(log_softmax(other)) - np.exp(log_softmax(clean))
    np.testing.assert_allclose(by_other, difference, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("name", LABEL_LOSSES)
def test_gradients_of_label_losses_equal_finite_differences(name):
    function, reference = LABEL_LOSSES[name]
    logits, labels = random_logits(5, (4, 5))
    (slope,) = gradients(lambda o: function(o, labels), logits)
    numeric = central_difference(lambda o: reference(o, labels).sum(), logits)
    np.testing.assert_allclose(slope, numeric, rtol=1e-6, atol=1e-8)


def test_divergence_is_zero_for_equal_logits_and_differs_from_soft_cross_entropy_by_the_entropy():
    clean, other = random_logits(6)[0], random_logits(7)[0]
    np.testing.assert_allclose(losses.kl_divergence(clean, clean + 5.0), 0.0, atol=1e-12)
    entropy = losses.soft_cross_entropy(clean, clean)
    total = losses.kl_divergence(clean, other) + entropy
    np.testing.assert_allclose(losses.soft_cross_entropy(clean, other), total, rtol=1e-12)


def test_tables_name_the_losses_and_the_fewest_classes_they_need():
    assert losses.ATTACK_LOSSES == {
        "ce": losses.cross_entropy,
        "cw": losses.cw_margin,
        "dlr": losses.dlr,
    }
    minimum = {"ce": 2, "kl": 2, "cw": 2, "dlr": 3, "dlr-targeted": 4}
    assert minimum == losses.MIN_CLASSES
    for name, function in losses.ATTACK_LOSSES.items():
        classes = losses.MIN_CLASSES[name]
        assert np.isfinite(function(tf.constant([[1.0, 2.0, 4.0][:classes]]), [0])).all()
    with pytest.raises(tf.errors.InvalidArgumentError):
        losses.dlr(tf.constant([[1.0, 2.0]]), [0])
    with pytest.raises(tf.errors.InvalidArgumentError):
        losses.dlr_targeted(tf.constant([[1.0, 2.0, 3.0]]), [0], [1])
