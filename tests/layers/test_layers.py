"""CosineHead and FeatureNorm: NumPy versions, zero vectors, dtype policies, derivatives."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf

from he_keras import attacks
from he_keras.layers import CosineHead, FeatureNorm
from he_keras.layers.cosine_head import arccos_with_finite_slope
from he_keras.layers.feature_norm import normalize
from he_keras.threat import ThreatModel

SWITCHES = [(True, True), (True, False), (False, True), (False, False)]
HEADS = [dict(feature_norm=fn, weight_norm=wn) for fn, wn in SWITCHES] + [dict(angle="arc")]
POLICIES = ["float32", "mixed_float16", "mixed_bfloat16", "float16", "bfloat16", "float64"]


def built_head(features=6, classes=4, dtype="float64", **options):
    head = CosineHead(classes, dtype=dtype, **options)
    head.build((None, features))
    return head


def numpy_logits(head, features):
    """The head in float64."""
    kernel = head.kernel.numpy().astype(np.float64)
    features = np.asarray(features, np.float64)
    if head.feature_norm:
        features = features / np.linalg.norm(features, axis=1, keepdims=True)
    if head.weight_norm:
        kernel = kernel / np.linalg.norm(kernel, axis=0)
    products = features @ kernel
    return head.scale * (products if head.angle == "cosine" else -np.arccos(products))


def gradients(function, *inputs):
    """Gradients of the sum of `function`'s result, as arrays."""
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(inputs)
        total = tf.reduce_sum(function())
    return [gradient.numpy() for gradient in tape.gradient(total, list(inputs))]


def central_difference(function, point, step=1e-5):
    """Derivative of a scalar function at `point`, coordinate by coordinate."""
    slopes = np.zeros_like(point)
    for index in np.ndindex(point.shape):
        shift = np.zeros_like(point)
        shift[index] = step
        slopes[index] = (function(point + shift) - function(point - shift)) / (2 * step)
    return slopes


@pytest.mark.parametrize("options", HEADS)
@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), ("float64", 1e-12)])
def test_logits_of_every_switch_equal_numpy(options, dtype, tolerance):
    head = built_head(scale=7.0, dtype=dtype, **options)
    features = np.random.default_rng(0).normal(size=(5, 6)).astype(dtype)
    logits = head(features)
    assert logits.dtype.name == dtype and logits.shape == (5, 4)
    np.testing.assert_allclose(logits, numpy_logits(head, features), rtol=0, atol=7 * tolerance)
    np.testing.assert_allclose(head.unscaled(features) * 7.0, logits, rtol=1e-6)


def test_head_by_hand():
    head = CosineHead(3, scale=10.0)
    head.build((None, 2))
    head.kernel.assign([[2.0, 0.0, -5.0], [0.0, 0.5, 0.0]])
    features = np.array([[3.0, 4.0]], np.float32)
    np.testing.assert_allclose(head(features), [[6.0, 8.0, -6.0]], rtol=1e-6)
    np.testing.assert_allclose(head.cosines(features), [[0.6, 0.8, -0.6]], rtol=1e-6)
    assert [weight.name for weight in head.weights] == ["kernel"]
    arc = CosineHead(3, scale=10.0, angle="arc")
    arc.build((None, 2))
    arc.kernel.assign(head.kernel)
    angles = [math.acos(0.6), math.acos(0.8), math.acos(-0.6)]
    np.testing.assert_allclose(arc(features)[0], [-10 * angle for angle in angles], rtol=1e-6)
    np.testing.assert_allclose(arc.cosines(features), [[0.6, 0.8, -0.6]], rtol=1e-6)


def test_default_initializer_is_uniform_within_one_over_the_root_of_the_features():
    kernel = built_head(features=64, classes=500).kernel.numpy()
    bound = 1 / math.sqrt(64)
    assert 0.999 * bound < np.abs(kernel).max() <= bound
    assert kernel.var() == pytest.approx(bound**2 / 3, rel=0.02)
    assert abs(kernel.mean()) < 0.01 * bound


@pytest.mark.parametrize("angle", ["cosine", "arc"])
def test_margin_is_subtracted_from_the_true_class_in_units_of_the_scale(angle):
    head = built_head(scale=15.0, margin=0.2, angle=angle)
    logits = np.random.default_rng(1).normal(size=(2, 4))
    shifted = head.with_margin(tf.constant(logits), np.array([2, 0])).numpy()
    expected = logits - np.array([[0, 0, 3.0, 0], [3.0, 0, 0, 0]])
    np.testing.assert_allclose(shifted, expected, rtol=1e-12)
    halved = head.with_margin(tf.constant(logits), np.array([2, 0]), margin=0.1).numpy()
    np.testing.assert_allclose(halved, (logits + expected) / 2, rtol=1e-12)
    features = tf.constant(np.random.default_rng(2).normal(size=(2, 6)))
    before = head(features)
    head.margin = 5.0
    assert np.array_equal(before, head(features))


@pytest.mark.parametrize("angle, low, high", [("cosine", -15, 15), ("arc", -15 * math.pi, 0)])
def test_output_ignores_lengths_and_is_bounded(angle, low, high):
    head = built_head(features=3, dtype="float32", angle=angle)
    generator = np.random.default_rng(3)
    columns = generator.normal(size=(3, 4)).astype("float32")
    head.kernel.assign(columns)
    features = np.vstack([generator.normal(size=(50, 3)), columns.T, -columns.T]).astype("float32")
    logits = head(features).numpy()
    assert low - 1e-5 <= logits.min() and logits.max() <= high + 1e-5
    assert logits.max() == pytest.approx(high, abs=2e-2 if angle == "arc" else 1e-5)
    # Near a cosine of +-1 the angle is only known to the square root of float32's precision.
    tolerance = 15 * 1e-3 if angle == "arc" else 15 * 1e-6
    for factor in (1e-9, 1e-3, 1e9):
        np.testing.assert_allclose(head(features * np.float32(factor)), logits, atol=tolerance)
    head.kernel.assign(columns * np.float32([1e-9, 1e-3, 1.0, 1e9]))
    np.testing.assert_allclose(head(features), logits, rtol=0, atol=tolerance)


@pytest.mark.parametrize("angle", ["cosine", "arc"])
def test_gradients_have_no_radial_part(angle):
    """Normalisation is differentiated: moving along z or W_k changes nothing, across it does."""
    head = built_head(angle=angle)
    features = tf.constant(np.random.default_rng(4).normal(size=(5, 6)))
    weights = tf.constant(np.random.default_rng(5).normal(size=(5, 4)))
    variable = head.kernel.value
    by_features, by_kernel = gradients(lambda: head(features) * weights, features, variable)
    kernel = head.kernel.numpy()
    assert np.abs(np.sum(by_features * features.numpy(), axis=1)).max() < 1e-12
    assert np.abs(np.sum(by_kernel * kernel, axis=0)).max() < 1e-12
    assert np.linalg.norm(by_features) > 1 and np.linalg.norm(by_kernel) > 1
    unit = features.numpy() / np.linalg.norm(features, axis=1, keepdims=True)
    lengths = np.linalg.norm(kernel, axis=0)
    cosines = unit @ (kernel / lengths)
    slopes = weights.numpy() * head.scale
    if angle == "arc":
        slopes = slopes / np.sqrt(1 - cosines**2)
    tangent = unit.T @ slopes - kernel / lengths * np.sum(cosines * slopes, axis=0)
    np.testing.assert_allclose(by_kernel, tangent / lengths, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("switches", [(True, False), (False, True), (False, False)])
def test_a_switched_off_normalisation_leaves_its_radial_part(switches):
    feature_norm, weight_norm = switches
    head = built_head(feature_norm=feature_norm, weight_norm=weight_norm)
    features = tf.constant(np.random.default_rng(6).normal(size=(5, 6)))
    logits = head(features)
    by_features, by_kernel = gradients(lambda: head(features) ** 2, features, head.kernel.value)
    radial = np.sum(by_features * features.numpy())
    assert radial == pytest.approx(0 if feature_norm else 2 * np.sum(logits**2), abs=1e-9)
    radial = np.sum(by_kernel * head.kernel.numpy())
    assert radial == pytest.approx(0 if weight_norm else 2 * np.sum(logits**2), abs=1e-9)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("options", HEADS)
def test_zero_feature_and_zero_kernel_column_are_finite(policy, options):
    head = built_head(features=3, classes=3, dtype=policy, **options)
    head.kernel.assign([[1.0, 0.0, 2.0], [0.0, 0.0, -1.0], [3.0, 0.0, 0.5]])
    features = tf.constant([[0.0, 0.0, 0.0], [1.0, 2.0, 3.0]], head.compute_dtype)
    logits = head(features).numpy()
    by_features, by_kernel = gradients(lambda: head(features) ** 2, features, head.kernel.value)
    for array in (logits, by_features, by_kernel):
        assert np.isfinite(array).all()
    middle = -head.scale * math.pi / 2 if head.angle == "arc" else 0.0
    np.testing.assert_allclose(logits[0], middle, rtol=1e-6)
    np.testing.assert_allclose(logits[:, 1], middle, rtol=1e-6)
    assert np.any(logits[1] != middle) and np.any(by_features[1]) and np.any(by_kernel[:, 0])
    if head.feature_norm:
        assert not by_features[0].any()
    if head.weight_norm:
        assert not by_kernel[:, 1].any()


@pytest.mark.parametrize("policy", POLICIES)
def test_feature_norm_is_finite_at_zero_under_every_policy(policy):
    layer = FeatureNorm(dtype=policy)
    vectors = tf.constant([[0.0, 0.0], [3.0, 4.0]], layer.compute_dtype)
    unit = layer(vectors)
    assert unit.dtype.name == ("float64" if policy == "float64" else "float32")
    np.testing.assert_allclose(unit, [[0, 0], [0.6, 0.8]], rtol=1e-6)
    (slope,) = gradients(lambda: layer(vectors)[:, 0], vectors)
    tolerance = 1e-2 if "float16" in policy else 1e-6
    np.testing.assert_allclose(slope.astype("float64"), [[0, 0], [0.128, -0.096]], rtol=tolerance)


def test_feature_norm_survives_squares_that_half_precision_cannot_hold():
    layer = FeatureNorm(dtype="mixed_float16")
    vectors = tf.constant([[6e-4, 8e-4], [3e4, 4e4]], tf.float16)
    expected = vectors.numpy().astype("float64")
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(layer(vectors), expected, rtol=1e-6)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("head_policy", ["float32", None])
@pytest.mark.parametrize("angle", ["cosine", "arc"])
def test_head_inside_a_model_computes_in_float32(policy, head_policy, angle):
    """A kernel rounded to half precision would be off by 1e-4 or more."""
    keras.config.set_dtype_policy(policy)
    inputs = keras.Input((4,))
    features = keras.layers.Dense(6)(inputs)
    head = CosineHead(3, angle=angle, dtype=head_policy)
    model = keras.Model(inputs, [features, head(features)])
    wide = "float64" if policy == "float64" and head_policy is None else "float32"
    assert model.outputs[1].dtype == wide and head.kernel.dtype == wide
    kernel = np.random.default_rng(7).normal(size=(6, 3)).astype("float32")
    head.kernel.assign(kernel)
    data = np.random.default_rng(8).uniform(size=(5, 4)).astype("float32")
    for call in (model, tf.function(model)):
        given, logits = call(data)
        assert given.dtype.name == model.dtype_policy.compute_dtype
        assert logits.dtype.name == wide
        expected = numpy_logits(head, given.numpy().astype("float64"))
        np.testing.assert_allclose(logits / head.scale, expected / head.scale, rtol=0, atol=1e-6)
    assert np.array_equal(head.kernel.numpy(), kernel)


class CosinesOfTheHead(keras.Model):
    """A model that uses the head's methods instead of calling it."""

    def __init__(self, head):
        super().__init__()
        self.head = head

    def call(self, features):
        return self.head.cosines(features)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float16", "bfloat16"])
def test_full_precision_features_stay_in_full_precision(policy):
    """Neither the features nor the kernel are cast to the policy's compute dtype."""
    keras.config.set_dtype_policy(policy)
    features = np.random.default_rng(7).normal(size=(5, 6)).astype("float32")
    head = built_head(dtype=policy, scale=1.0)
    expected = numpy_logits(head, features)
    model = CosinesOfTheHead(head)
    model.autocast = False
    for call in (head, head.cosines, model):
        np.testing.assert_allclose(call(tf.constant(features)), expected, rtol=0, atol=1e-6)
    unit = features / np.linalg.norm(features.astype("float64"), axis=1, keepdims=True)
    for features_or_tiny in (features, features * np.float32(1e-9)):
        result = FeatureNorm(dtype=policy)(tf.constant(features_or_tiny))
        np.testing.assert_allclose(result, unit, rtol=0, atol=1e-6)


@pytest.mark.parametrize("layer", [CosineHead(3), CosineHead(3, angle="arc"), FeatureNorm()])
@pytest.mark.parametrize("policy", POLICIES)
def test_symbolic_and_eager_calls_agree_on_shape_and_dtype(layer, policy):
    layer = type(layer).from_config({**layer.get_config(), "dtype": policy})
    symbolic = layer(keras.Input((5,), dtype=layer.compute_dtype))
    eager = layer(tf.ones((2, 5), layer.compute_dtype))
    assert symbolic.shape == (None, *eager.shape[1:]) and symbolic.dtype == eager.dtype.name
    assert tuple(layer.compute_output_shape((2, 5))) == tuple(eager.shape)
    unbuilt = keras.Sequential([keras.layers.Dense(5), type(layer).from_config(layer.get_config())])
    assert unbuilt.compute_output_shape((2, 7)) == tuple(eager.shape)


def test_feature_norm_normalises_the_last_axis_of_any_rank():
    vectors = np.random.default_rng(9).normal(size=(2, 3, 4))
    expected = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
    np.testing.assert_allclose(FeatureNorm(dtype="float64")(vectors), expected, rtol=1e-12)
    assert FeatureNorm()(keras.Input((3, 4))).shape == (None, 3, 4)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_arc_slope_is_capped_at_the_ends_and_exact_elsewhere(dtype):
    inner = np.array([-0.999, -0.7, -0.1, 0.0, 0.3, 0.9, 0.999], dtype)
    cosines = tf.constant(np.concatenate([[-1.0], inner, [1.0, 1.0 + 1e-6]]), dtype)
    (slope,) = gradients(lambda: -arccos_with_finite_slope(cosines), cosines)
    exact = 1 / np.sqrt(1 - inner.astype("float64") ** 2)
    np.testing.assert_allclose(slope[1:-2], exact, rtol=1e-4 if dtype == "float32" else 1e-12)
    cap = 1 / math.sqrt(1 - (1 - 1e-6) ** 2)
    np.testing.assert_allclose(slope[[0, -2, -1]], cap, rtol=0.05 if dtype == "float32" else 1e-9)
    values = arccos_with_finite_slope(cosines).numpy()
    np.testing.assert_allclose(values[[0, -2, -1]], [math.pi, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(values[1:-2], np.arccos(inner), rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_arc_head_has_finite_gradients_on_and_opposite_a_class_vector(dtype):
    head = built_head(features=3, classes=2, dtype=dtype, angle="arc")
    head.kernel.assign([[2.0, 1.0], [0.0, 1.0], [0.0, 1.0]])
    features = tf.constant([[3.0, 0.0, 0.0], [-3.0, 0.0, 0.0]], dtype)
    results = gradients(lambda: head(features), features, head.kernel.value)
    assert all(np.isfinite(result).all() for result in results)
    np.testing.assert_allclose(head(features)[:, 0], [0.0, -head.scale * math.pi], atol=1e-5)


def double_backward(function):
    """Returns x -> (squared length of f's gradient, and its own gradient)."""

    def evaluate(point):
        point = tf.constant(point)
        with tf.GradientTape() as outer:
            outer.watch(point)
            with tf.GradientTape() as inner:
                inner.watch(point)
                value = tf.reduce_sum(function(point))
            squared = tf.reduce_sum(tf.square(inner.gradient(value, point)))
        return squared.numpy(), outer.gradient(squared, point).numpy()

    return evaluate


@pytest.mark.parametrize("case", ["normalize", "arccos", "cosine", "arc"])
def test_double_backward_equals_finite_differences(case):
    generator = np.random.default_rng(10)
    weights = generator.normal(size=(3, 4))
    heads = {angle: built_head(features=4, classes=4, angle=angle) for angle in ("cosine", "arc")}
    functions = {
        "normalize": lambda x: normalize(x) * weights,
        "arccos": lambda x: arccos_with_finite_slope(0.5 * tf.sin(x)) * weights,
        "cosine": lambda x: heads["cosine"](x) * weights,
        "arc": lambda x: heads["arc"](x) * weights,
    }
    evaluate = double_backward(functions[case])
    point = generator.normal(size=(3, 4))
    _, second = evaluate(point)
    numeric = central_difference(lambda x: evaluate(x)[0], point)
    assert np.abs(second).max() > 0.1
    np.testing.assert_allclose(second, numeric, rtol=1e-5, atol=1e-5 * np.abs(numeric).max())


def test_second_derivatives_at_a_zero_vector_are_zero():
    squared, second = double_backward(normalize)(np.zeros((2, 3), np.float32))
    assert squared == 0 and not second.any()


@pytest.mark.fast_cases("cosine")
@pytest.mark.parametrize("angle", ["cosine", "arc"])
def test_inference_and_attacks_leave_weights_bit_identical(angle):
    model = keras.Sequential(
        [
            keras.Input((4, 4, 1)),
            keras.layers.Conv2D(3, 3),
            keras.layers.BatchNormalization(),
            keras.layers.Flatten(),
            FeatureNorm(),
            CosineHead(3, angle=angle),
        ]
    )
    before = [weight.tobytes() for weight in model.get_weights()]
    images = np.random.default_rng(11).uniform(size=(6, 4, 4, 1)).astype("float32")
    first = model.predict(images, verbose=0)
    attack = attacks.PGD(ThreatModel("linf", 0.3), num_steps=3, stop_when_broken=False)
    result = attack(model, images, np.argmax(first, axis=1))
    assert result.distance.min() > 0.01
    assert [weight.tobytes() for weight in model.get_weights()] == before
    assert np.array_equal(model.predict(images, verbose=0), first)


@pytest.mark.parametrize("compiled", [False, True])
def test_nan_features_give_nan_logits_instead_of_zeros(compiled):
    head = CosineHead(3, scale=2.0)
    head.build((None, 2))
    run = tf.function(head.call) if compiled else head
    logits = run(tf.constant([[np.nan, 1.0], [1.0, 2.0]])).numpy()
    assert np.isnan(logits[0]).all()
    assert np.isfinite(logits[1]).all()
