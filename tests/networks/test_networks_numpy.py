"""Networks against independent NumPy versions; training mode, saving, names of the weights."""

import keras
import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view

from he_keras import networks
from he_keras.networks.blocks import BlockBuilder
from he_keras.networks.resnet import NegativeInfinityPadding2D

TINY = {
    "lenet": dict(input_shape=(8, 8, 1), width=2),
    "small-cnn": dict(input_shape=(16, 16, 1)),
    "preact-resnet": dict(
        input_shape=(8, 8, 3), stage_widths=(4, 6, 8), blocks_per_stage=(1, 2, 1)
    ),
    "wide-resnet-10-1": dict(input_shape=(8, 8, 3)),
    "vgg-16-bn": dict(input_shape=(32, 32, 3), width=1),
    "mobilenet-v2": dict(input_shape=(8, 8, 3)),
    "resnet-50": dict(input_shape=(32, 32, 3), stage_widths=(4, 6, 8, 10)),
}
CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616)
ACTIVATIONS = {
    "relu": lambda x: np.maximum(x, 0),
    "softplus": lambda x: np.logaddexp(x, 0),
    "swish": lambda x: x * (1 + np.tanh(x / 2)) / 2,
}


def random_images(shape, count=2, seed=0):
    return np.random.default_rng(seed).uniform(size=(count, *shape)).astype("float32")


def randomize(model, seed=0):
    """Moves biases and batch norms away from 0 and 1, so that a forgotten one shows."""
    rng = np.random.default_rng(seed)
    for variable in model.variables:
        if variable.name in ("gamma", "moving_variance"):
            variable.assign(rng.uniform(0.5, 1.5, variable.shape))
        elif variable.name in ("beta", "moving_mean", "bias"):
            variable.assign(rng.normal(0, 0.2, variable.shape))


# Padding


def numpy_windows(x, size, strides, padding, value=0.0):
    widths = ((0, 0), (padding, padding), (padding, padding), (0, 0))
    x = np.pad(x, widths, constant_values=value)
    windows = sliding_window_view(x, (size, size), axis=(1, 2))
    return windows[:, ::strides, ::strides]


def numpy_conv(x, kernel, strides=1, padding=None):
    size = kernel.shape[0]
    windows = numpy_windows(x, size, strides, size // 2 if padding is None else padding)
    return np.einsum("nhwcij,ijco->nhwo", windows, kernel, optimize=True)


@pytest.mark.parametrize("kernel_size,strides", [(3, 2), (7, 2), (3, 1), (5, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("size", [8, 9])
def test_convolution_pads_like_pytorch(kernel_size, strides, size):
    inputs = keras.Input((size, size, 2))
    outputs = BlockBuilder().conv(inputs, 3, kernel_size, strides, name="conv")
    model = keras.Model(inputs, outputs)
    x = random_images((size, size, 2)) - 0.5
    kernel = np.asarray(model.get_layer("conv").kernel)
    np.testing.assert_allclose(model(x), numpy_conv(x, kernel, strides), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strides", [1, 2])
def test_depthwise_convolution_pads_like_pytorch(strides):
    inputs = keras.Input((8, 8, 2))
    model = keras.Model(inputs, BlockBuilder().depthwise_conv(inputs, 3, strides, name="conv"))
    x = random_images((8, 8, 2)) - 0.5
    kernel = np.asarray(model.get_layer("conv").kernel)
    expected = np.einsum("nhwcij,ijco->nhwc", numpy_windows(x, 3, strides, 1), kernel)
    np.testing.assert_allclose(model(x), expected, rtol=1e-4, atol=1e-5)


def test_pool_padding_is_below_every_value():
    padded = NegativeInfinityPadding2D(1)(-np.ones((1, 4, 4, 1), "float32"))
    pooled = np.asarray(keras.layers.MaxPooling2D(3, 2)(padded))
    np.testing.assert_array_equal(pooled, -np.ones((1, 2, 2, 1)))


# NumPy versions of the families


class Reference:
    """Runs the named layers of a model in NumPy, in float64."""

    def __init__(self, model, activation="relu"):
        self.model = model
        self.activate = ACTIVATIONS[activation]

    def conv(self, x, name, strides=1, padding=None):
        layer = self.model.get_layer(name)
        y = numpy_conv(x, np.asarray(layer.kernel, "float64"), strides, padding)
        return y + np.asarray(layer.bias) if layer.use_bias else y

    def depthwise(self, x, name, strides):
        kernel = np.asarray(self.model.get_layer(name).kernel, "float64")
        return np.einsum("nhwcij,ijco->nhwc", numpy_windows(x, 3, strides, 1), kernel)

    def norm(self, x, name):
        layer = self.model.get_layer(name)
        std = np.sqrt(np.asarray(layer.moving_variance, "float64") + 1e-5)
        return (x - np.asarray(layer.moving_mean)) / std * np.asarray(layer.gamma) + np.asarray(
            layer.beta
        )

    def norm_activate(self, x, name):
        return self.activate(self.norm(x, f"{name}_bn"))

    def conv_norm(self, x, name, strides=1):
        return self.norm(self.conv(x, f"{name}_conv", strides), f"{name}_bn")

    def conv_norm_activate(self, x, name, strides=1):
        return self.activate(self.conv_norm(x, name, strides))

    def dense(self, x, name):
        layer = self.model.get_layer(name)
        x = x.reshape(len(x), -1)
        return self.activate(x @ np.asarray(layer.kernel, "float64") + np.asarray(layer.bias))

    def pool(self, x):
        return numpy_windows(x, 2, 2, 0).max(axis=(-2, -1))

    def has(self, name):
        return any(layer.name == name for layer in self.model.layers)


def lenet(r, x):
    for name in ("1_conv", "2_conv"):
        x = r.pool(r.activate(r.conv(x, name)))
    return r.dense(x, "features")


def small_cnn(r, x):
    for stage in ("stage1", "stage2"):
        x = r.activate(r.conv(x, f"{stage}_1_conv", padding=0))
        x = r.pool(r.activate(r.conv(x, f"{stage}_2_conv", padding=0)))
    return r.dense(r.dense(x, "hidden"), "features")


def pre_activation(r, x, blocks_per_stage):
    x = r.conv((x - CIFAR_MEAN) / CIFAR_STD, "stem_conv")
    for stage, blocks in enumerate(blocks_per_stage, start=1):
        for block in range(1, blocks + 1):
            name = f"stage{stage}_block{block}"
            strides = 2 if stage > 1 and block == 1 else 1
            activated = r.norm_activate(x, f"{name}_1")
            if r.has(f"{name}_shortcut_conv"):
                x = r.conv(activated, f"{name}_shortcut_conv", strides)
            y = r.norm_activate(r.conv(activated, f"{name}_1_conv", strides), f"{name}_2")
            x = x + r.conv(y, f"{name}_2_conv")
    return r.norm_activate(x, "final").mean(axis=(1, 2))


def vgg(r, x):
    x = (x - CIFAR_MEAN) / CIFAR_STD
    for stage, convolutions in enumerate((2, 2, 3, 3, 3), start=1):
        for index in range(1, convolutions + 1):
            x = r.conv_norm_activate(x, f"stage{stage}_{index}")
        x = r.pool(x)
    return x.mean(axis=(1, 2))


def mobilenet(r, x):
    x = r.conv_norm_activate((x - CIFAR_MEAN) / CIFAR_STD, "stem")
    for stage, (blocks, first) in enumerate(
        ((1, 1), (2, 1), (3, 2), (4, 2), (3, 1), (3, 2), (1, 1)), start=1
    ):
        for block in range(1, blocks + 1):
            name = f"stage{stage}_block{block}"
            strides = first if block == 1 else 1
            y = r.conv_norm_activate(x, f"{name}_expand")
            y = r.norm_activate(
                r.depthwise(y, f"{name}_depthwise_conv", strides), f"{name}_depthwise"
            )
            y = r.conv_norm(y, f"{name}_project")
            if strides == 1:
                y = y + (x if x.shape == y.shape else r.conv_norm(x, f"{name}_shortcut"))
            x = y
    return r.conv_norm_activate(x, "final").mean(axis=(1, 2))


def resnet(r, x):
    x = r.conv_norm_activate((x - CIFAR_MEAN) / CIFAR_STD, "stem", 2)
    x = numpy_windows(x, 3, 2, 1, -np.inf).max(axis=(-2, -1))
    for stage, blocks in enumerate((3, 4, 6, 3), start=1):
        for block in range(1, blocks + 1):
            name = f"stage{stage}_block{block}"
            strides = 2 if stage > 1 and block == 1 else 1
            shortcut = r.conv_norm(x, f"{name}_shortcut", strides) if block == 1 else x
            x = r.conv_norm_activate(x, f"{name}_1")
            x = r.conv_norm_activate(x, f"{name}_2", strides)
            x = r.activate(r.conv_norm(x, f"{name}_3") + shortcut)
    return x.mean(axis=(1, 2))


REFERENCES = {
    "lenet": lenet,
    "small-cnn": small_cnn,
    "preact-resnet": lambda r, x: pre_activation(r, x, (1, 2, 1)),
    "wide-resnet-10-1": lambda r, x: pre_activation(r, x, (1, 1, 1)),
    "vgg-16-bn": vgg,
    "mobilenet-v2": mobilenet,
    "resnet-50": resnet,
}


@pytest.mark.fast_cases(
    "lenet-relu",
    "small-cnn-relu",
    "preact-resnet-relu",
    "wide-resnet-10-1-relu",
    "vgg-16-bn-relu",
    "mobilenet-v2-relu",
    "resnet-50-relu",
    "preact-resnet-swish",
    "lenet-softplus",
    "small-cnn-softplus",
)
@pytest.mark.parametrize(
    "name,activation",
    [(name, "relu") for name in TINY]
    + [(name, "swish") for name in ("preact-resnet", "resnet-50", "mobilenet-v2")]
    + [(name, "softplus") for name in ("lenet", "wide-resnet-10-1", "small-cnn", "vgg-16-bn")],
)
def test_network_equals_its_numpy_version(name, activation):
    model = networks.get(name, activation=activation, **TINY[name])
    randomize(model)
    images = random_images(model.input_shape[1:])
    expected = REFERENCES[name](Reference(model, activation), images.astype("float64"))
    assert np.std(expected) > 0
    np.testing.assert_allclose(model(images), expected, atol=1e-4 * np.abs(expected).max())


# The same small networks in use


@pytest.mark.parametrize("name", TINY)
def test_convolution_kernels_have_conv_in_their_path(name):
    model = networks.get(name, **TINY[name])
    four_dimensional = [v.path for v in model.trainable_variables if len(v.shape) == 4]
    assert four_dimensional
    assert all("conv/kernel" in path for path in four_dimensional)


@pytest.mark.parametrize("name", TINY)
def test_training_mode_moves_the_statistics_only(name):
    model = networks.get(name, **TINY[name])
    before = {variable.path: variable.numpy() for variable in model.variables}
    model(random_images(model.input_shape[1:], count=4), training=True)
    for variable in model.variables:
        moves = variable.name.startswith("moving_") or "seed_generator" in variable.path
        assert np.array_equal(variable.numpy(), before[variable.path]) != moves, variable.path


def test_dropout_acts_in_training_only():
    images = random_images((16, 16, 1))
    model = networks.get("small-cnn", input_shape=(16, 16, 1))
    assert not np.array_equal(model(images, training=True), model(images, training=True))
    model = networks.get("small-cnn", input_shape=(16, 16, 1), dropout_rate=0)
    np.testing.assert_array_equal(model(images, training=True), model(images, training=False))


@pytest.mark.fast_cases(
    "lenet-float32",
    "small-cnn-float32",
    "preact-resnet-float32",
    "wide-resnet-10-1-float32",
    "preact-resnet-mixed_bfloat16",
)
@pytest.mark.parametrize(
    "name,policy",
    [(name, "float32") for name in TINY] + [("preact-resnet", "mixed_bfloat16")],
)
def test_saved_network_gives_identical_features(name, policy, tmp_path):
    keras.config.set_dtype_policy(policy)
    model = networks.get(name, **TINY[name])
    randomize(model)
    model.save(tmp_path / "network.keras")
    copy = keras.saving.load_model(tmp_path / "network.keras")
    images = random_images(model.input_shape[1:])
    assert copy.name == model.name
    np.testing.assert_array_equal(
        np.asarray(copy(images), "float32"), np.asarray(model(images), "float32")
    )
    assert [v.path for v in copy.trainable_variables] == [v.path for v in model.trainable_variables]
