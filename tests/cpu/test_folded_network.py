"""The inference mode with batch norms folded into convolutions: the same network."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import he_keras as he
from he_keras.cpu.folded_network import FoldedNetwork
from he_keras.cpu.operations import relu
from he_keras.layers.batch_norm import BatchNormalization

SHAPE = (8, 8, 3)
NETWORKS = {
    "preact-resnet": lambda: he.networks.PreActResNet(SHAPE, (4, 8), (1, 1)),
    "uneven": lambda: he.networks.PreActResNet((7, 7, 3), (4, 8), (1, 1)),
    "wide-resnet": lambda: he.networks.WideResNet(10, 1, SHAPE),
    "mobilenet-v2": lambda: he.networks.get("mobilenet-v2", (32, 32, 3)),
    "vgg-16-bn": lambda: he.networks.get("vgg-16-bn", (32, 32, 3)),
    "lenet": lambda: he.networks.get("lenet", SHAPE[:2] + (1,), width=2),
}


def with_own_statistics(network):
    """Moves every weight away from where folding could not be seen."""
    generator = np.random.default_rng(0)
    for weight in network.weights:
        values = generator.uniform(0.5, 2.0, weight.shape)
        if not weight.path.endswith("moving_variance"):
            values = generator.normal(0.0, 0.3, weight.shape)
        if weight.dtype.startswith("float"):
            weight.assign(values)
    return network


def images_for(network, count=3):
    shape = (count, *network.input_shape[1:])
    return tf.constant(np.random.default_rng(1).uniform(0, 1, shape).astype("float32"))


def output_and_gradient(function, images):
    with tf.GradientTape() as tape:
        tape.watch(images)
        outputs = tf.cast(function(images), tf.float32)
        total = tf.reduce_sum(outputs * tf.range(1.0, outputs.shape[-1] + 1.0))
    return outputs.numpy(), tape.gradient(total, images).numpy()


def hand_made(*, activation=None, dilation=1, reads_twice=False, norm_class=BatchNormalization):
    """A convolution with bias and a batch norm after it, with one thing changed."""
    images = keras.Input(SHAPE)
    x = keras.layers.Conv2D(
        4, 3, padding="same", activation=activation, dilation_rate=dilation, name="conv"
    )(images)
    y = norm_class(name="norm")(x)
    if reads_twice:
        y = keras.layers.Add()([x, y])
    return keras.Model(images, keras.layers.GlobalAveragePooling2D()(y))


LARGE = ("mobilenet-v2", "vgg-16-bn")


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=[pytest.mark.slow] * (each in LARGE)) for each in NETWORKS],
)
@pytest.mark.parametrize("is_fixed", [False, True])
def test_outputs_and_gradients_are_the_networks(name, is_fixed):
    network = with_own_statistics(NETWORKS[name]())
    images = images_for(network)
    fast = FoldedNetwork(network)
    weights = fast.weights() if is_fixed else None
    expected, gradient = output_and_gradient(lambda x: network(x, training=False), images)
    outputs, own_gradient = output_and_gradient(lambda x: fast(x, weights), images)
    np.testing.assert_allclose(outputs, expected, atol=2e-5 * np.abs(expected).max())
    np.testing.assert_allclose(own_gradient, gradient, atol=2e-4 * np.abs(gradient).max())


def norm_relu_convolutions(activation="relu", reads_norm=False, reads_activation=False, strides=1):
    """A batch norm, an activation, and two convolutions after it; perhaps other readers."""
    images = keras.Input(SHAPE)
    norm = BatchNormalization(name="norm")(images)
    active = keras.layers.Activation(activation)(norm)
    if strides == 1:
        x = keras.layers.Conv2D(4, 3, padding="same", name="wide")(active)
        y = keras.layers.Conv2D(4, 1, name="narrow")(active)
    else:
        padded = keras.layers.ZeroPadding2D(1)(keras.layers.ZeroPadding2D(0)(active))
        x = keras.layers.Conv2D(4, 3, strides, name="wide")(padded)
        y = keras.layers.Conv2D(4, 1, name="narrow")(
            keras.layers.AveragePooling2D(1, strides)(active)
        )
    outputs = [keras.layers.Add()([x, y])]
    outputs += [keras.layers.Conv2D(4, 1, name="of_norm")(norm)] * reads_norm
    outputs += [keras.layers.MaxPooling2D(1)(active)] * reads_activation
    pooled = [keras.layers.GlobalAveragePooling2D()(each) for each in outputs]
    return keras.Model(
        images, pooled[0] if len(pooled) == 1 else keras.layers.Concatenate()(pooled)
    )


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({}, 2),
        ({"strides": 2}, 2),
        ({"activation": "softplus"}, 0),
        ({"reads_norm": True}, 0),
        ({"reads_activation": True}, 0),
    ],
)
def test_whose_kernels_take_over_the_scale_of_the_norm_before(settings, count):
    """Where anything else reads the norm or the activation, nothing may; both orders hold."""
    network = with_own_statistics(norm_relu_convolutions(**settings))
    images = images_for(network)
    fast = FoldedNetwork(network)
    assert len(fast._passed) == count

    def derivatives(function):
        with tf.GradientTape() as outer:
            outer.watch(images)
            with tf.GradientTape() as inner:
                inner.watch(images)
                outputs = function(images)
                total = tf.reduce_sum(outputs**3)
            gradient = inner.gradient(total, images)
            squares = tf.reduce_sum(gradient**2)
        return outputs, gradient, outer.gradient(squares, images)

    weights = fast.weights()
    for found, expected in zip(
        derivatives(lambda x: fast(x, weights)),
        derivatives(lambda x: network(x, training=False)),
        strict=True,
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5 * np.abs(expected).max())


def test_padding_of_another_axis_passes_no_scale():
    images = keras.Input(SHAPE)
    active = keras.layers.Activation("relu")(BatchNormalization()(images))
    # Pads the width and the channels of our images.
    padded = keras.layers.ZeroPadding2D(1, data_format="channels_first")(active)
    pooled = keras.layers.GlobalAveragePooling2D()(keras.layers.Conv2D(4, 3)(padded))
    weights = FoldedNetwork(keras.Model(images, pooled)).weights().values()
    assert not any(getattr(each, "is_passed", False) for each in weights)


BFLOAT16 = np.arange(2**16, dtype=np.uint16)


@pytest.mark.parametrize("upstream", [BFLOAT16, np.random.default_rng(0).permutation(BFLOAT16)])
@pytest.mark.parametrize("is_graph", [False, True])
def test_the_gradient_of_relu_in_bfloat16_for_every_number(upstream, is_graph):
    images, upstream = (tf.bitcast(each, tf.bfloat16) for each in (BFLOAT16, upstream))
    sizes = [np.abs(each.numpy().astype(np.float32)) for each in (images, upstream)]
    smallest = float(np.finfo(np.float32).tiny)
    is_usual = np.all([(each == 0) | ((each >= smallest) & (each < 2.0**121)) for each in sizes], 0)
    assert is_usual.sum() > 55_000

    def gradient(function):
        with tf.GradientTape() as tape:
            tape.watch(images)
            outputs = function(images)
        return tape.gradient(outputs, images, output_gradients=upstream)

    run = tf.function(gradient) if is_graph else gradient
    found, expected = run(relu), gradient(tf.nn.relu)
    np.testing.assert_array_equal(relu(images)[is_usual], tf.nn.relu(images)[is_usual])
    np.testing.assert_array_equal(found[is_usual], expected[is_usual])


def test_relu_in_bfloat16_can_be_differentiated_twice():
    images = tf.constant([-1.0, 0.0, 1.0, 2.0], tf.bfloat16)
    with tf.GradientTape() as outer:
        outer.watch(images)
        with tf.GradientTape() as inner:
            inner.watch(images)
            cubes = relu(images) ** 3
        gradient = inner.gradient(cubes, images)
    np.testing.assert_array_equal(tf.cast(gradient, tf.float32), [0, 0, 3, 12])
    np.testing.assert_array_equal(
        tf.cast(outer.gradient(gradient, images), tf.float32), [0, 0, 6, 12]
    )


def test_prepared_weights_have_no_gradient():
    """A pass back is spread over other operations than the network's: variables would get less."""
    network = with_own_statistics(NETWORKS["preact-resnet"]())
    fast = FoldedNetwork(network)
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(fast(images_for(network), fast.weights()))
    assert set(tape.gradient(total, network.trainable_variables)) == {None}


def test_batch_norms_after_convolutions_are_gone():
    network = he.networks.PreActResNet(SHAPE, (4, 8), (1, 1))
    graph = tf.function(FoldedNetwork(network)).get_concrete_function(images_for(network)).graph
    kinds = [operation.type for operation in graph.get_operations()]
    # Two blocks: the second norm of each follows a convolution, the first one and the last do not.
    assert kinds.count("BiasAdd") == 2
    assert not any("BatchNorm" in kind for kind in kinds)


@pytest.mark.parametrize(
    ("changes", "is_folded"),
    [
        ({}, True),
        ({"norm_class": keras.layers.BatchNormalization}, True),
        ({"activation": "relu"}, False),
        ({"dilation": 2}, False),
        ({"reads_twice": True}, False),
    ],
)
def test_only_what_is_the_same_is_folded(changes, is_folded):
    network = with_own_statistics(hand_made(**changes))
    fast = FoldedNetwork(network)
    assert (id(network.get_layer("norm")) not in fast.weights()) == is_folded
    images = images_for(network)
    expected, gradient = output_and_gradient(lambda x: network(x, training=False), images)
    outputs, own_gradient = output_and_gradient(fast, images)
    np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(own_gradient, gradient, rtol=1e-4, atol=1e-5)


def test_a_convolution_that_is_used_twice_keeps_its_norms():
    images = keras.Input(SHAPE)
    shared = keras.layers.Conv2D(3, 3, padding="same")
    x = BatchNormalization()(shared(images))
    x = BatchNormalization()(shared(x))
    network = with_own_statistics(keras.Model(images, keras.layers.GlobalAveragePooling2D()(x)))
    values = images_for(network)
    np.testing.assert_allclose(
        FoldedNetwork(network)(values), network(values, training=False), rtol=1e-4, atol=1e-5
    )


def test_layers_in_between_run_in_inference_mode():
    images = keras.Input(SHAPE)
    x = keras.layers.Dropout(0.9)(keras.layers.Conv2D(3, 3)(images))
    network = keras.Model(images, keras.layers.Flatten()(x))
    values = images_for(network)
    np.testing.assert_allclose(
        FoldedNetwork(network)(values), network(values, training=False), rtol=1e-5, atol=1e-6
    )


def test_the_variables_are_read_at_every_pass_unless_they_are_fixed():
    model = he.HEAdversarialModel(NETWORKS["preact-resnet"](), he.CosineHead(3))
    with_own_statistics(model.network)
    images = images_for(model.network)
    compiled = tf.function(lambda: model(images, training=False))
    fixed, before = model.with_fixed_weights().logits, compiled().numpy()
    np.testing.assert_allclose(fixed(images), before, rtol=1e-5)
    for weight in model.network.weights:
        weight.assign(weight * 1.1)
    assert np.abs(compiled().numpy() - before).max() > 1e-3
    np.testing.assert_allclose(fixed(images), before, rtol=1e-5)


@pytest.mark.slow
def test_an_attack_sees_the_weights_of_its_own_time():
    """A compiled attack must not keep the weights that it was traced with."""
    model = he.HEAdversarialModel(NETWORKS["preact-resnet"](), he.CosineHead(3))
    attack = he.attacks.PGD(he.ThreatModel("linf", 0.1), num_steps=2, stop_when_broken=False)
    images, labels = images_for(model.network, 6).numpy(), np.zeros(6, int)
    attack(model, images, labels)
    with_own_statistics(model.network)
    again = attack(model, images, labels).x_adv
    fresh = he.attacks.PGD(he.ThreatModel("linf", 0.1), num_steps=2, stop_when_broken=False)
    np.testing.assert_array_equal(again, fresh(model, images, labels).x_adv)


def test_half_precision_stays_as_close_to_float32_as_the_network():
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        half = with_own_statistics(NETWORKS["preact-resnet"]())
    finally:
        keras.config.set_dtype_policy("float32")
    whole = NETWORKS["preact-resnet"]()
    whole.set_weights(half.get_weights())
    images = images_for(half, 16)
    exact = whole(images, training=False).numpy()

    def error(outputs):
        return np.abs(np.asarray(tf.cast(outputs, tf.float32)) - exact).mean()

    fast = FoldedNetwork(half)(images)
    assert fast.dtype == tf.bfloat16
    assert error(fast) <= 1.5 * error(half(images, training=False))


def test_other_models_run_as_they_are():
    class Doubled(keras.Model):
        def call(self, inputs):
            return 2.0 * super().call(inputs)

    inputs = keras.Input(SHAPE)
    assert not FoldedNetwork.is_supported(Doubled(inputs, keras.layers.Flatten()(inputs)))
    sequential = keras.Sequential([keras.Input(SHAPE), keras.layers.Flatten()])
    assert not FoldedNetwork.is_supported(sequential)
    model = he.HEAdversarialModel(sequential, keras.layers.Dense(3))
    images = images_for(sequential)
    np.testing.assert_array_equal(model(images, training=False), model.head(sequential(images)))


def test_images_of_another_shape_are_refused_as_the_network_does():
    network = NETWORKS["preact-resnet"]()
    with pytest.raises(ValueError, match=r"expected shape=\(None, 8, 8, 3\)"):
        FoldedNetwork(network)(tf.zeros([1, 9, 9, 3]))


#: Their graphs have hundreds of layers; the others of the same builders stand for them.
DEEP = (
    "preact-resnet",
    "wide-resnet-34-10",
    "wide-resnet-34-20",
    "resnet-152",
    "wide-resnet-50-2",
    "wide-resnet-101-2",
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=[pytest.mark.slow] * (each in DEEP)) for each in he.networks.names()],
)
def test_every_registered_network_is_taken_apart(name):
    """Where Keras no longer offers what this builds on, attacks would silently lose their speed."""
    with keras.StatelessScope(initialize_variables=False):
        network = he.networks.get(name)
    assert FoldedNetwork.is_supported(network)
    fast = FoldedNetwork(network)
    norms = [each for each in network.layers if isinstance(each, BatchNormalization)]
    assert len(fast._norms) == len(norms)
    # Every norm goes into the convolution before it, or hands its scale to those after it.
    passed = {id(norm) for norm in fast._passed.values()}
    last = {id(each) for each in norms if each.name == "final_bn"}
    assert len({id(norm) for norm in fast._folded.values()} | passed | last) == len(norms)


class Halved(keras.layers.Layer):
    """Somebody else's layer."""

    def call(self, inputs):
        return inputs / 2


@pytest.mark.parametrize(
    "layer",
    [
        Halved(),
        keras.layers.Lambda(lambda inputs: inputs / 2, output_shape=SHAPE),
        keras.layers.Pipeline([Halved()]),
    ],
)
def test_networks_with_unknown_layers_run_as_they_are(layer):
    images = keras.Input(SHAPE)
    x = BatchNormalization()(keras.layers.Conv2D(3, 3)(layer(images)))
    network = keras.Model(images, keras.layers.Flatten()(x))
    assert not FoldedNetwork.is_supported(network)


def test_a_layer_whose_call_was_replaced_runs_as_it_is():
    network = hand_made()
    layer = network.get_layer("conv")
    layer.call = lambda inputs: 2.0 * type(layer).call(layer, inputs)
    model = he.HEAdversarialModel(with_own_statistics(network), keras.layers.Dense(3))
    images = images_for(network)
    np.testing.assert_array_equal(model(images, training=False), model.plain_logits(images))
