"""Networks: published sizes, symmetric padding, both dtype policies, the lookup by name."""

import collections
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from own_names import forget

from he_keras import networks
from he_keras.layers.batch_norm import BatchNormalization
from he_keras.layers.input_standardization import InputStandardization
from he_keras.networks import network as registry
from he_keras.networks.resnet import NegativeInfinityPadding2D

Facts = collections.namedtuple("Facts", "shape features classes parameters minimum strided")

# Parameters are those with a linear head with bias, as counted in PyTorch. MobileNetV2, VGG-16
# (14,728,266 less its 4,224 convolution biases) and PreActResNet-18 are from the CIFAR-10 code. The
# ImageNet networks are from torchvision. WideResNet-34-10 is from TRADES, without sub_block1.
# `strided` counts the layers with a stride: convolutions with a larger kernel, 1x1, and max-pools.
FACTS = {
    "lenet": Facts((28, 28, 1), 1024, 10, 3_274_634, 4, (0, 0, 2)),
    "small-cnn": Facts((28, 28, 1), 200, 10, 312_202, 16, (0, 0, 2)),
    "preact-resnet": Facts((32, 32, 3), 512, 10, 11_172_170, 8, (3, 3, 0)),
    "preact-resnet-18": Facts((32, 32, 3), 512, 10, 11_172_170, 8, (3, 3, 0)),
    "preact-resnet-small": Facts((32, 32, 3), 128, 10, 308_266, 4, (2, 2, 0)),
    "wide-resnet-28-8": Facts((32, 32, 3), 512, 10, 23_354_842, 4, (2, 2, 0)),
    "wide-resnet-34-10": Facts((32, 32, 3), 640, 10, 46_160_474, 4, (2, 2, 0)),
    "wide-resnet-34-20": Facts((32, 32, 3), 1280, 10, 184_531_674, 4, (2, 2, 0)),
    "vgg-16-bn": Facts((32, 32, 3), 512, 10, 14_724_042, 32, (0, 0, 5)),
    "mobilenet-v2": Facts((32, 32, 3), 1280, 10, 2_296_922, 8, (3, 0, 0)),
    "resnet-18": Facts((224, 224, 3), 512, 1000, 11_689_512, 32, (4, 3, 1)),
    "resnet-50": Facts((224, 224, 3), 2048, 1000, 25_557_032, 32, (4, 3, 1)),
    "resnet-152": Facts((224, 224, 3), 2048, 1000, 60_192_808, 32, (4, 3, 1)),
    "wide-resnet-50-2": Facts((224, 224, 3), 2048, 1000, 68_883_240, 32, (4, 3, 1)),
    "wide-resnet-101-2": Facts((224, 224, 3), 2048, 1000, 126_886_696, 32, (4, 3, 1)),
}
SLOW = (
    "preact-resnet",  # is PreActResNet-18
    "wide-resnet-34-10",
    "wide-resnet-34-20",
    "resnet-152",
    "wide-resnet-50-2",
    "wide-resnet-101-2",
)


@functools.cache
def symbolic(name, **options):
    """Builds a network without drawing its weights, so that 185 million cost nothing."""
    with keras.StatelessScope(initialize_variables=False):
        return networks.get(name, **options)


@pytest.fixture(autouse=True, scope="module")
def forget_undrawn_weights():
    yield
    symbolic.cache_clear()
    keras.utils.clear_session()


@pytest.fixture
def policy(request):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(request.param)
    yield request.param
    keras.config.set_dtype_policy(before)


def random_images(shape, count=2, seed=0):
    return np.random.default_rng(seed).uniform(size=(count, *shape)).astype("float32")


# The table of sizes


def test_every_registered_network_has_facts():
    assert sorted(FACTS) == networks.names()


@pytest.mark.parametrize("name", FACTS)
def test_feature_shape_and_parameter_count(name):
    facts = FACTS[name]
    model = symbolic(name)
    weights = sum(int(np.prod(variable.shape)) for variable in model.trainable_variables)
    assert model.input_shape == (None, *facts.shape)
    assert model.output_shape == (None, facts.features)
    assert weights + (facts.features + 1) * facts.classes == facts.parameters
    assert model.name == name.replace("-", "_")
    assert model.inputs[0].dtype == "float32"


@pytest.mark.parametrize("name", FACTS)
def test_minimum_size(name):
    facts = FACTS[name]
    channels = facts.shape[2]
    model = symbolic(name, input_shape=(facts.minimum, facts.minimum, channels))
    assert model.output_shape == (None, facts.features) or name in ("lenet", "small-cnn")
    with pytest.raises(ValueError, match=f"at least {facts.minimum} .*received input_shape="):
        networks.get(name, input_shape=(facts.minimum, facts.minimum - 1, channels))


# Padding


def producers(model):
    """Returns a function from a layer to the one before it."""
    by_output = {id(layer.output): layer for layer in model.layers}
    return lambda layer: by_output[id(layer.input)]


def layers_with_windows(model):
    """Returns (layer, kernel size, strides) of each convolution and pool over a window."""
    return [
        (
            layer,
            getattr(layer, "kernel_size", getattr(layer, "pool_size", None))[0],
            layer.strides[0],
        )
        for layer in model.layers
        if hasattr(layer, "strides")
    ]


def padding_in_front(layer, size, before):
    """Returns what stands for the padding of a layer: (pixels, type of the padding layer)."""
    if layer.padding == "same":
        assert layer.strides == (1, 1) and size % 2 == 1, "the only symmetric case of 'same'"
        return size // 2, keras.layers.ZeroPadding2D
    if not isinstance(before, keras.layers.ZeroPadding2D):
        return 0, None
    (top, bottom), (left, right) = before.padding
    assert top == bottom == left == right
    return top, type(before)


@pytest.mark.parametrize("name", FACTS)
def test_every_padding_is_symmetric(name):
    model = symbolic(name)
    before = producers(model)
    strided = [0, 0, 0]
    for layer, size, strides in layers_with_windows(model):
        is_pool = isinstance(layer, keras.layers.MaxPooling2D)
        padding = padding_in_front(layer, size, before(layer))
        if name == "small-cnn" or size == 1 or (is_pool and size == 2):
            assert padding == (0, None)
        elif is_pool:
            assert padding == (1, NegativeInfinityPadding2D)
        else:
            assert padding == (size // 2, keras.layers.ZeroPadding2D)
        strided[2 if is_pool else int(size == 1)] += strides > 1
    assert tuple(strided) == FACTS[name].strided


# Layers of every network


@pytest.mark.parametrize("name", FACTS)
def test_batch_norms_and_biases(name):
    model = symbolic(name, synchronized=True, activation="softplus")
    norms = [layer for layer in model.layers if isinstance(layer, keras.layers.BatchNormalization)]
    assert bool(norms) == (name not in ("lenet", "small-cnn"))
    for norm in norms:
        assert type(norm) is BatchNormalization
        assert (norm.momentum, norm.epsilon, norm.synchronized) == (0.9, 1e-5, True)
    biases = [variable for variable in model.trainable_variables if variable.name == "bias"]
    assert len(biases) == {"lenet": 3, "small-cnn": 6}.get(name, 0)


def test_mnist_networks_do_not_standardize_by_default():
    for name, facts in FACTS.items():
        layers = symbolic(name).layers
        has_entry = any(isinstance(layer, InputStandardization) for layer in layers)
        assert has_entry == (facts.shape[2] == 3)


# Behaviour of every network


#: One of each kind of block; the values of the others are compared in tests/cpu.
HALF_PRECISION = ("lenet", "preact-resnet-small", "mobilenet-v2", "resnet-18")


def every_network():
    for name in FACTS:
        yield pytest.param(name, "float32", marks=[pytest.mark.slow] * (name in SLOW))
    for name in HALF_PRECISION:
        yield name, "mixed_bfloat16"


@pytest.mark.fast_cases(
    "lenet-float32",
    "lenet-mixed_bfloat16",
    "small-cnn-float32",
    "preact-resnet-small-float32",
    "preact-resnet-small-mixed_bfloat16",
    "mobilenet-v2-float32",
)
@pytest.mark.parametrize(("name", "policy"), [*every_network()], indirect=["policy"])
def test_inference_and_image_gradient(name, policy):
    facts = FACTS[name]
    shape = (facts.minimum, facts.minimum, facts.shape[2])
    model = networks.get(name, input_shape=shape)
    before = [variable.numpy() for variable in model.variables]
    images = tf.constant(random_images(shape))
    with tf.GradientTape() as tape:
        tape.watch(images)
        features = model(images, training=False)
        total = tf.reduce_sum(tf.cast(features, tf.float32))
    gradient = tape.gradient(total, images)
    assert features.dtype == ("float32" if policy == "float32" else "bfloat16")
    assert features.shape == (2, model.output_shape[1])
    assert gradient.dtype == "float32"
    assert np.isfinite(total) and np.isfinite(gradient).all()
    assert (np.abs(gradient).max(axis=(1, 2, 3)) > 0).all()
    for variable, value in zip(model.variables, before, strict=True):
        assert variable.dtype == "float32" or "seed_generator" in variable.path
        np.testing.assert_array_equal(variable.numpy(), value)


# The lookup


@pytest.mark.parametrize("name", ["resnet-51", "wide-resnet-34", "wide-resnet-34-10-1", "", None])
def test_unknown_name_lists_the_known_ones(name):
    with pytest.raises(ValueError) as error:
        networks.get(name)
    assert all(known in str(error.value) for known in networks.names())
    assert f"; received {name!r}" in str(error.value)


def test_unknown_option_lists_the_known_ones():
    message = "'lenet' has no such option; expected some of .*'width'.*received depth=3"
    with pytest.raises(TypeError, match=message):
        networks.get("lenet", depth=3)
    with pytest.raises(TypeError, match="has no such option"):
        networks.get("wide-resnet-28-8", depth=34)


@pytest.mark.parametrize("depth", [4, 33, 50])
def test_wide_resnet_refuses_other_depths(depth):
    with pytest.raises(ValueError, match=f"expected 6n \\+ 4 .*received depth={depth}"):
        networks.get(f"wide-resnet-{depth}-10")


def test_wide_resnet_names_are_those_of_both_families():
    small = symbolic("wide-resnet-16-4")
    assert small.input_shape == (None, 32, 32, 3)
    assert small.output_shape == (None, 256)
    large = symbolic("wide-resnet-50-2", input_shape=(32, 32, 3))
    assert large.output_shape == (None, 2048)
    assert large.get_layer("stage1_block1_2_conv").filters == 128
    assert large.get_layer("stage1_block1_3_conv").filters == 256


def test_options_reach_the_builder():
    assert symbolic("vgg-16-bn", width=8).output_shape == (None, 256)
    assert symbolic("lenet", width=8).output_shape == (None, 512)
    assert networks.WideResNet(10, 2).name == "wide_resnet_10_2"


@pytest.mark.parametrize("name", FACTS)
def test_activation_is_one_of_three(name):
    model = symbolic(name, synchronized=True, activation="softplus")
    used = [x.activation for x in model.layers if isinstance(x, keras.layers.Activation)]
    assert used and all(activation is keras.activations.softplus for activation in used)
    with pytest.raises(ValueError, match=r"expected one of \('relu', .*received activation='elu'"):
        networks.get(name, activation="elu")


@pytest.mark.parametrize("builder", [networks.PreActResNet, networks.ResNet])
@pytest.mark.parametrize("widths,blocks", [((4, 8), (1,)), ((), ()), ((4, 0), (1, 1))])
def test_stages_that_do_not_fit(builder, widths, blocks):
    with pytest.raises(ValueError, match="expected one positive number for each stage"):
        builder((32, 32, 3), widths, blocks)


def test_width_of_a_wide_resnet_is_positive():
    with pytest.raises(ValueError, match="expected at least 1; received width=0"):
        networks.WideResNet(10, 0)


def test_a_name_is_registered_once():
    with pytest.raises(ValueError, match="registered twice; .*received 'lenet'"):
        registry.register("lenet")(networks.LeNet)


@pytest.mark.slow
def test_a_network_of_other_images_than_asked_for_is_told(request):
    request.addfinalizer(lambda: forget("fixed"))
    layers = [keras.Input((5, 5, 1)), keras.layers.Flatten()]
    registry.register("fixed")(lambda input_shape=(5, 5, 1), name="": keras.Sequential(layers))
    with pytest.raises(ValueError, match=r"expected input_shape=\(8, 8, 1\), .*received \(5, 5, 1"):
        networks.get("fixed", (8, 8, 1))
