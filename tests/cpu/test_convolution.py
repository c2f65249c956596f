"""Convolutions by matrix products against TensorFlow's own, with derivatives of both orders."""

import keras
import numpy as np
import pytest
import small_limits
import tensorflow as tf

import he_keras as he
from he_keras import cpu
from he_keras.cpu import operations, training_function
from he_keras.cpu.folded_network import FoldedNetwork
from he_keras.cpu.operations import column_convolution, product_convolution, transposed_kernel

SHAPES = [((4, 4), (3, 3)), ((2, 4), (3, 3)), ((5, 3), (1, 5)), ((1, 1), (3, 3))]
TOLERANCES = {"float32": 1e-5, "mixed_bfloat16": 2e-2}


@pytest.fixture(autouse=True)
def any_kernel_is_large(monkeypatch):
    small_limits.take_every_trick(monkeypatch)


def arrays(size, kernel_size, channels=(3, 5), count=2):
    generator = np.random.default_rng(0)
    images = generator.normal(size=(count, *size, channels[0]))
    kernel = generator.normal(size=(*kernel_size, *channels))
    return tf.constant(images, tf.float32), tf.constant(kernel, tf.float32)


def plain(images, kernel, stride=1, padding="SAME"):
    return tf.nn.conv2d(images, kernel, stride, padding)


def by_product(images, kernel):
    return product_convolution(images, kernel, transposed_kernel(kernel))


def by_columns(images, kernel, stride=1, padding="same"):
    return column_convolution(images, kernel, stride, padding)


def derivatives(function, images, kernel, *settings):
    """Values, gradients, and the gradients of the gradients' squares."""
    with tf.GradientTape() as outer:
        outer.watch([images, kernel])
        with tf.GradientTape() as inner:
            inner.watch([images, kernel])
            outputs = function(images, kernel, *settings)
            total = tf.reduce_sum(outputs**3)
        first = inner.gradient(total, [images, kernel])
        squares = tf.add_n([tf.reduce_sum(each**2) for each in first])
    return [outputs, *first, *outer.gradient(squares, [images, kernel])]


@pytest.mark.parametrize("function", [by_product, by_columns])
@pytest.mark.parametrize(("size", "kernel_size"), SHAPES)
@pytest.mark.parametrize("is_graph", [False, True])
def test_derivatives_of_both_orders(function, size, kernel_size, is_graph):
    images, kernel = arrays(size, kernel_size)
    run = tf.function(derivatives) if is_graph else derivatives
    for found, expected in zip(
        run(function, images, kernel), derivatives(plain, images, kernel), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("size", "kernel_size", "stride"),
    [((10, 10), (3, 3), 2), ((9, 6), (3, 2), 2), ((7, 5), (3, 3), 1), ((9, 9), (2, 3), 3)],
)
@pytest.mark.parametrize("is_small", [False, True])
def test_derivatives_of_valid_convolutions(size, kernel_size, stride, is_small, monkeypatch):
    """Of both kinds: with values by the product, and with TensorFlow's."""
    monkeypatch.setattr(operations, "_PRODUCT_WIDTH", 9 if is_small else 0)
    images, kernel = arrays(size, kernel_size)
    found = derivatives(by_columns, images, kernel, stride, "valid")
    expected = derivatives(plain, images, kernel, stride, "VALID")
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4 * np.abs(other).max())


def test_an_unknown_number_of_images():
    images, kernel = arrays((4, 3), (3, 3))
    spec = [tf.TensorSpec([None, 4, 3, 3]), tf.TensorSpec(kernel.shape)]
    for function in (by_product, by_columns):
        run = tf.function(function, input_signature=spec)
        np.testing.assert_allclose(run(images, kernel), plain(images, kernel), rtol=1e-5, atol=1e-5)


def test_images_of_unknown_size_are_left_to_tensorflow():
    layer = keras.layers.Conv2D(5, 3, padding="same")
    images = arrays((4, 4), (3, 3))[0]
    expected = layer(images)
    run = tf.function(
        training_function(layer), input_signature=[tf.TensorSpec([None, None, None, 3])]
    )
    np.testing.assert_allclose(run(images), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "is_small"),
    [
        ({}, True),
        ({"size": (4, 5)}, False),
        ({"size": (4, None)}, False),
        ({"size": (None, 4)}, False),
        ({"strides": (2, 2)}, False),
        ({"padding": "valid"}, True),
        ({"padding": "valid", "size": (10, 10), "strides": (2, 2)}, True),
        ({"padding": "valid", "size": (11, 11), "strides": (2, 2)}, False),
        ({"padding": "valid", "size": (10, 10), "strides": (2, 3)}, False),
        ({"padding": "valid", "size": (2, 2)}, False),
        ({"padding": "valid", "kernel_shape": (2, 2, 9, 9)}, True),
        ({"kernel_shape": (1, 1, 9, 9)}, False),
        ({"kernel_shape": (2, 2, 9, 9)}, False),
    ],
)
def test_which_convolutions_are_small(change, is_small):
    settings = {"size": (4, 4), "kernel_shape": (3, 3, 9, 9), "strides": (1, 1), "padding": "same"}
    assert operations.has_product_values(**(settings | change)) == is_small


def test_small_kernels_are_left_to_tensorflow(monkeypatch):
    # The true limits.
    monkeypatch.undo()
    settings = (4, 4), (3, 3, 256, 256), (1, 1), "same"
    assert not operations.has_product_values((4, 4), (3, 3, 256, 255), (1, 1), "same")
    assert operations.has_product_values(*settings)
    with cpu.disabled("matrix_products"):
        assert not operations.has_product_values(*settings)


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bfloat16", 8)])
def test_half_precision_has_the_product_gradient_on_wider_maps(dtype, width):
    kernel = tf.ones([3, 3, 2, 2], dtype)
    for each in (2, 4, 5, 8, 9):
        found = operations.has_product_gradient((each, each), kernel, (1, 1), "same")
        assert found == (each <= width)


@pytest.mark.parametrize("policy", TOLERANCES)
@pytest.mark.parametrize(
    "settings",
    [
        {"padding": "same"},
        {"padding": "same", "activation": "relu", "use_bias": False},
        {"padding": "same", "strides": 2},
        {"padding": "same", "dilation_rate": 2},
        {"padding": "valid"},
        {"padding": "valid", "strides": 2},
        {"padding": "valid", "strides": (1, 2)},
        {"padding": "same", "groups": 3},
    ],
)
def test_a_training_pass_is_keras_s(policy, settings):
    """Values and gradients, in a graph, as training calls it."""
    images = arrays((4, 4), (3, 3))[0]
    layer = keras.layers.Conv2D(6, 3, dtype=policy, **settings)
    model = keras.Sequential([keras.Input((4, 4, 3)), layer])

    @tf.function
    def gradients(run):
        with tf.GradientTape() as tape:
            tape.watch(images)
            outputs = tf.cast(run(images), tf.float32)
            total = tf.reduce_sum(outputs**2)
        return [outputs, *tape.gradient(total, [images, *model.trainable_variables])]

    ours, theirs = gradients(training_function(model)), gradients(model)
    for found, expected in zip(ours, theirs, strict=True):
        tolerance = TOLERANCES[policy] * max(1.0, float(np.abs(expected).max()))
        np.testing.assert_allclose(found, expected, atol=tolerance)
    assert "convolution_op" not in vars(layer)


def test_training_uses_the_product_where_it_should():
    """Else the tests above would compare TensorFlow with itself."""

    def operations(layer, size):
        @tf.function
        def gradient(images):
            with tf.GradientTape() as tape:
                total = tf.reduce_sum(training_function(layer)(images) ** 2)
            return tape.gradient(total, layer.trainable_variables)

        graph = gradient.get_concrete_function(tf.TensorSpec([2, size, size, 3])).graph
        return {operation.type for operation in graph.get_operations()}

    layer = keras.layers.Conv2D(6, 3, padding="same")
    layer.build((None, 8, 8, 3))
    assert "MatMul" in operations(layer, 4)
    assert "Conv2DBackpropFilter" in operations(layer, 8)


@pytest.mark.fast_cases("mixed_bfloat16")
@pytest.mark.parametrize("policy", TOLERANCES)
def test_an_attacked_network_is_the_network(policy):
    """The product in the inference mode of attacks: logits and gradients of the plain network."""
    keras.config.set_dtype_policy(policy)
    network = he.networks.PreActResNet((8, 8, 3), (4, 8), (2, 2))
    images = tf.constant(np.random.default_rng(1).uniform(size=(3, 8, 8, 3)), tf.float32)

    @tf.function
    def attacked(is_fixed):
        fast = FoldedNetwork(network)
        assert len(fast._products) == 4
        weights = fast.weights() if is_fixed else None
        with tf.GradientTape() as tape:
            tape.watch(images)
            outputs = tf.cast(fast(images, weights), tf.float32)
            total = tf.reduce_sum(outputs * tf.range(8.0))
        return outputs, tape.gradient(total, images)

    for found, expected in zip(attacked(True), attacked(False), strict=True):
        scale = float(np.abs(expected).max())
        np.testing.assert_allclose(found, expected, atol=TOLERANCES[policy] * scale)
    types = [each.type for each in attacked.get_concrete_function(True).graph.get_operations()]
    convolutions = [each for each in network.layers if isinstance(each, keras.layers.Conv2D)]
    assert types.count("Conv2D") == len(convolutions) - 4
    # The gradient of the images through the strided one is TensorFlow's.
    assert types.count("Conv2DBackpropInput") == len(convolutions) - 3
