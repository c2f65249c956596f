"""Every network, objective and a set of attacks with the CPU tuning and without: the same values.

All convolutions count as small and all networks as large enough, so that every trick is taken.
"""

import keras
import numpy as np
import pytest
import registered_attacks
import small_limits
import tensorflow as tf

import he_keras as he
from he_keras import cpu

#: oneDNN was seen to corrupt memory in strided 1x1 convolutions of fewer than 16 channels.
WIDTHS = (16, 32)
SHAPE = (8, 8, 3)
THREAT = he.ThreatModel("linf", 0.05)
#: The smallest images of networks that take none of 8 x 8.
SIDES = {"lenet": 8, "small-cnn": 16, "mobilenet-v2": 8, "preact-resnet-small": 8}
#: The same builder with fewer or narrower layers. The networks need gigabytes, or are so deep that
#: a batch norm of four values makes large differences of rounding errors.
STAND_INS = {
    "resnet-152": "resnet-50",
    "wide-resnet-50-2": "resnet-50",
    "wide-resnet-101-2": "resnet-50",
    "wide-resnet-28-8": "wide-resnet-10-2",
    "wide-resnet-34-10": "wide-resnet-10-3",
    "wide-resnet-34-20": "wide-resnet-16-1",
}
#: Every registered network, or its stand-in, once.
NETWORKS = list(dict.fromkeys(STAND_INS.get(name, name) for name in he.networks.names()))
#: Objectives with more than one pass of training, or state.
OBJECTIVES = {
    "awp": {"base": "pgd_at", "num_steps": 2, "warm_up_steps": 0},
    "rat": {"base": "trades", "num_steps": 2},
    "llr": {"num_steps": 2, "warm_up_steps": 0},
    "free_at": {"num_replays": 2},
    **{name: {"num_steps": 2} for name in ("pgd_at", "alp", "trades", "mart")},
}
FAST_OBJECTIVES = ("pgd_at",)
#: One on the logits and one on the features.
FAST_ATTACKS = ("pgd-K",)


@pytest.fixture(autouse=True)
def every_trick_is_taken(monkeypatch):
    small_limits.take_every_trick(monkeypatch)


def both_ways(run):
    """Returns what a function returns with the tuning and without it, from the same seeds."""
    found = []
    for enabled in (True, False):
        keras.utils.set_random_seed(7)
        cpu.set_enabled(enabled)
        try:
            found.append(run())
        finally:
            cpu.set_enabled(True)
    return found


def assert_close(found, expected, largest, median):
    """Bounds the relative differences of all tensors, and their median.

    Rounding turns a few ReLUs, and with them a part of the gradients before them.
    """
    shares = []
    for one, other in zip(found, expected, strict=True):
        one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
        shares.append(np.linalg.norm(one - other) / (np.linalg.norm(other) + 1e-6))
    assert max(shares) <= largest and np.median(shares) <= median


def some(names, fast):
    return [pytest.param(each, marks=[pytest.mark.slow] * (each not in fast)) for each in names]


def drawn(shape):
    return np.random.default_rng(0).uniform(size=shape).astype("float32")


def network_of(name, dtype):
    keras.config.set_dtype_policy(dtype)
    try:
        side, channels = SIDES.get(name, 32), 1 if name in ("lenet", "small-cnn") else 3
        return he.networks.get(name, (side, side, channels))
    finally:
        keras.config.set_dtype_policy("float32")


#: In float32 they run all that these do: the same layers, fewer of them.
LONG = ("resnet-50", "mobilenet-v2")
CASES = [
    (name, dtype)
    for name in NETWORKS
    for dtype in ("float32", "mixed_bfloat16")
    if dtype == "float32" or name not in LONG
]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (case not in [("lenet", "float32")]))
        for case in CASES
    ],
)
def test_networks(name, dtype):
    """Features of both modes, gradients of images and weights, and batch statistics."""

    def run():
        network = network_of(name, dtype)
        images = tf.constant(drawn((4, *network.input_shape[1:])))

        @tf.function(autograph=False)
        def derivatives():
            with tf.GradientTape(persistent=True) as tape:
                tape.watch(images)
                trained = tf.cast(cpu.training_function(network)(images), tf.float32)
                attacked = tf.cast(
                    cpu.inference_function(network, variables_stand_still=True)(images), tf.float32
                )
                called = tf.cast(cpu.inference_function(network)(images), tf.float32)
                weighed = [
                    tf.reduce_sum(each * tf.range(1.0, each.shape[1] + 1.0) / each.shape[1])
                    for each in (trained, attacked, called)
                ]
            weights = network.trainable_variables
            gradients = [tape.gradient(each, images) for each in weighed]
            gradients += tape.gradient(weighed[0], weights) + tape.gradient(weighed[2], weights)
            return [trained, attacked, called], gradients

        return *derivatives(), network.get_weights()

    (values, gradients, weights), plain = both_ways(run)
    is_single = dtype == "float32"
    assert_close(values, plain[0], *((1e-3, 1e-4) if is_single else (0.06, 0.06)))
    assert_close(gradients, plain[1], *((0.05, 1e-3) if is_single else (0.6, 0.2)))
    assert_close(weights, plain[2], *((1e-3, 1e-4) if is_single else (0.02, 0.01)))


def classifier(objective=None):
    network = he.networks.PreActResNet(SHAPE, WIDTHS, (1, 1))
    return he.HEAdversarialModel(network, he.CosineHead(5), objective)


@pytest.mark.parametrize("name", some(he.objectives.names(), FAST_OBJECTIVES))
def test_objectives(name):
    """The weights and statistics after two steps."""
    images, labels = drawn((8, *SHAPE)), np.arange(8) % 5

    def run():
        objective = he.objectives.get(name, THREAT, **OBJECTIVES.get(name, {}))
        model = classifier(objective)
        before = model.get_weights()
        model.compile(optimizer=keras.optimizers.SGD(0.01))
        model.fit(images, labels, batch_size=4, shuffle=False, verbose=0)
        moved = [after - each for after, each in zip(model.get_weights(), before, strict=True)]
        return np.concatenate([each.ravel() for each in moved])

    found, expected = both_ways(run)
    # The sign of a gradient that is nearly zero may turn, and a pixel of the images with it.
    assert np.linalg.norm(found - expected) <= 0.02 * np.linalg.norm(expected)


@pytest.mark.parametrize("name", some(he.attacks.names(), FAST_ATTACKS))
def test_attacks(name):
    images = drawn((10, *SHAPE))
    threat = he.ThreatModel("l2", 0.5) if name.startswith("cw-l2") else THREAT

    def run():
        model = classifier()
        # Untrained, it would see the same class in all images.
        generator = np.random.default_rng(1)
        for weight in model.network.weights:
            change = generator.normal(0.0, 0.3, weight.shape)
            weight.assign(weight + (change**2 if "variance" in weight.path else change))
        labels = model.plain_logits(images).numpy().argmax(axis=1)
        return registered_attacks.build(name, threat)(model, images, labels)

    found, expected = both_ways(run)
    np.testing.assert_array_equal(found.success, expected.success)
    assert np.mean(np.abs(found.x_adv - expected.x_adv) > 1e-3) <= 0.02
