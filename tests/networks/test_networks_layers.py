"""The layers of the networks: initialisation, batch norm, input standardisation."""

import keras
import numpy as np
import pytest

from he_keras import networks
from he_keras.layers.batch_norm import BatchNormalization
from he_keras.layers.input_standardization import InputStandardization

CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616)


def random_images(shape, count=2, seed=0):
    return np.random.default_rng(seed).uniform(size=(count, *shape)).astype("float32")


# Initialisation


def test_convolutions_are_drawn_with_fan_out():
    model = networks.get("preact-resnet-small")
    kernels = {
        layer.name: np.asarray(layer.kernel)
        for layer in model.layers
        if isinstance(layer, keras.layers.Conv2D)
    }
    assert len(kernels) == 9
    for kernel in kernels.values():
        expected = np.sqrt(2 / (kernel.shape[0] ** 2 * kernel.shape[3]))
        assert abs(kernel.std() / expected - 1) < 5 / np.sqrt(2 * kernel.size)
    largest = kernels["stage3_block1_2_conv"]
    expected = np.sqrt(2 / (9 * 128))
    assert np.abs(largest).max() > 3.5 * expected  # a truncated normal ends at 2.3


def test_equal_layers_are_drawn_apart():
    model = networks.PreActResNet((8, 8, 3), (4,), (2,))
    first, second = (model.get_layer(f"stage1_block{i}_1_conv").kernel for i in (1, 2))
    assert first.shape == second.shape
    assert not np.array_equal(first, second)


def test_dense_and_depthwise_kernels_are_drawn_with_two_over_their_inputs():
    dense = np.asarray(networks.get("small-cnn").get_layer("features").kernel)
    assert abs(dense.std() / np.sqrt(2 / 200) - 1) < 0.03
    model = networks.get("mobilenet-v2", input_shape=(8, 8, 3))
    depthwise = np.asarray(model.get_layer("stage7_block1_depthwise_conv").kernel)
    assert abs(depthwise.std() / np.sqrt(2 / 9) - 1) < 0.05


# Batch norm


def test_batch_norm_tracks_the_batch_with_momentum_one_tenth():
    layer = BatchNormalization()
    batch = np.array([[1.0, 0.0], [3.0, 4.0]], "float32")
    outputs = layer(batch, training=True)
    assert [variable.name for variable in layer.weights] == [
        "gamma",
        "beta",
        "moving_mean",
        "moving_variance",
    ]
    np.testing.assert_allclose(outputs, [[-1, -1], [1, 1]], atol=1e-5)
    np.testing.assert_allclose(layer.moving_mean, [0.2, 0.2], rtol=1e-6)
    np.testing.assert_allclose(layer.moving_variance, [1.0, 1.3], rtol=1e-6)


def test_batch_norm_survives_its_config():
    layer = BatchNormalization(momentum=0.8, synchronized=True, center=False)
    copy = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(layer))
    assert type(copy) is BatchNormalization
    assert (copy.momentum, copy.epsilon, copy.synchronized, copy.center) == (0.8, 1e-5, True, False)


# Input standardisation


def test_standardization_is_the_formula_and_has_no_weights():
    layer = InputStandardization(CIFAR_MEAN, CIFAR_STD)
    images = random_images((4, 4, 3))
    expected = (images - np.float32(CIFAR_MEAN)) / np.float32(CIFAR_STD)
    np.testing.assert_array_equal(layer(images), expected)
    assert layer.weights == []
    assert layer.compute_output_shape((None, 4, 4, 3)) == (None, 4, 4, 3)


@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "mixed_float16"])
def test_standardization_precedes_the_cast(dtype):
    layer = InputStandardization(0.875, 0.01, dtype=dtype)
    images = np.float32(0.875 + np.arange(4).reshape(1, 2, 2, 1) / 4096)
    outputs = layer(images)
    assert outputs.dtype == dtype.removeprefix("mixed_")
    expected = np.arange(4).reshape(1, 2, 2, 1) / 40.96  # a cast image would give 0 four times
    np.testing.assert_allclose(np.asarray(outputs, "float32"), expected, rtol=2**-8)
    inputs = keras.Input((2, 2, 1), dtype="float32")
    np.testing.assert_array_equal(
        np.asarray(keras.Model(inputs, layer(inputs))(images), "float32"),
        np.asarray(outputs, "float32"),
    )


def test_standardization_keeps_float64():
    layer = InputStandardization(1 / 3, 0.1, dtype="float64")
    image = np.full((1, 1, 1, 1), 0.5, "float64")
    np.testing.assert_allclose(layer(image), (image - 1 / 3) / 0.1, rtol=1e-14)


def test_standardization_survives_its_config():
    layer = InputStandardization(CIFAR_MEAN, CIFAR_STD, dtype="mixed_bfloat16", name="entry")
    config = layer.get_config()
    copy = InputStandardization.from_config(config)
    assert copy.get_config() == config
    assert (config["mean"], config["std"]) == (list(CIFAR_MEAN), list(CIFAR_STD))
    assert copy.autocast is False


@pytest.mark.parametrize(
    "mean,std,message",
    [
        ((0.1, 0.2), (0.3,), "differ in length; expected .*received mean="),
        (0.0, 0.0, "std is not positive; expected .*received std=0.0"),
        (0.0, float("nan"), "std is not finite; expected .*received std=nan"),
        ((), (), r"mean is not finite; expected .*received mean=\(\)"),
    ],
)
def test_standardization_refuses(mean, std, message):
    with pytest.raises(ValueError, match=message):
        InputStandardization(mean, std)


def test_standardization_refuses_other_channels():
    with pytest.raises(ValueError, match="expected 1 or 3 numbers; received mean="):
        InputStandardization((0.1, 0.2), (0.3, 0.4)).build((None, 4, 4, 3))


@pytest.mark.parametrize(
    "shape,standardize,mean",
    [
        ((32, 32, 3), True, CIFAR_MEAN),
        ((64, 64, 3), True, (0.485, 0.456, 0.406)),
        ((224, 32, 3), True, CIFAR_MEAN),
        ((28, 28, 1), True, (0.1307,)),
        ((32, 32, 4), (0.5, 0.25), (0.5,)),
        ((32, 32, 3), ((0.1, 0.2, 0.3), (1, 1, 1)), (0.1, 0.2, 0.3)),
        ((32, 32, 3), False, None),
    ],
)
def test_choice_of_the_standardization(shape, standardize, mean):
    model = networks.PreActResNet(shape, (4,), (1,), standardize=standardize)
    entries = [layer for layer in model.layers if isinstance(layer, InputStandardization)]
    assert [entry.mean for entry in entries] == ([] if mean is None else [mean])


@pytest.mark.parametrize(
    "shape,standardize,message",
    [
        ((32, 32, 4), True, r"no default mean and std for 4 channels; .*standardize=\(mean, std\)"),
        ((32, 32, 3), "imagenet", "expected True, False or .*received standardize='imagenet'"),
        ((32, 32), True, r"three integers; received input_shape=\(32, 32\)"),
        ((None, None, 3), True, "three integers; received"),
        (32, True, "three integers; received input_shape=32"),
        ((32, 32, 0), True, "at least one channel; received"),
    ],
)
def test_refused_inputs(shape, standardize, message):
    with pytest.raises(ValueError, match=message):
        networks.PreActResNet(shape, (4,), (1,), standardize=standardize)
