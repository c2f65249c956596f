"""RAT crafts at noisy convolution kernels, and no weight is ever anything but itself."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import he_keras as he
from he_keras import objectives
from he_keras.objectives.rat import RAT, convolution_kernels, noisy_values

SHAPE = (6, 6, 1)
THREAT = he.ThreatModel("linf", 0.1)
NOISE = 0.3  # strong enough to see


def examples(count=6):
    generator = np.random.default_rng(0)
    images = generator.uniform(0.2, 0.8, (count, *SHAPE)).astype(np.float32)
    return images, generator.integers(0, 3, count)


def build_model(objective):
    """A residual network with a shortcut convolution, batch norm, and a hidden Dense layer."""
    keras.utils.set_random_seed(1)
    images = keras.Input(SHAPE)
    x = keras.layers.Conv2D(4, 3, padding="same", name="conv")(images)
    x = keras.layers.BatchNormalization()(x)
    x = keras.layers.Activation("tanh")(x)
    x = keras.layers.DepthwiseConv2D(3, padding="same", name="depthwise")(x)
    x = keras.layers.Add()([x, keras.layers.Conv2D(4, 1, name="shortcut")(images)])
    x = keras.layers.Dense(5, name="hidden")(keras.layers.Flatten()(x))
    network = keras.Model(images, x)
    return he.HEAdversarialModel(network, he.CosineHead(3, scale=5.0), objective, None)


def trades(**options):
    options = {"num_steps": 2, "step_size": 0.05, **options}
    return objectives.TRADES(THREAT, **options)


def test_the_noise_is_on_the_kernels_of_convolutions():
    model = build_model(RAT(base=trades()))
    names = {variable.path.split("/")[-2] for variable in convolution_kernels(model)}
    assert names == {"conv", "depthwise", "shortcut"}
    assert {variable.name for variable in convolution_kernels(model)} == {"kernel"}


def test_the_noise_is_normal_independent_and_determined_by_the_seed():
    variables = [keras.Variable(np.full((3, 3, 50, 20), 2.0, "f")) for _ in range(2)]
    first, second = ((each.numpy() - 2.0).ravel() for each in noisy_values(variables, 0.01, (3, 5)))
    for noise in (first, second):
        assert abs(noise.mean()) < 5e-4
        assert noise.std() == pytest.approx(0.01, rel=0.03)
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05
    again = noisy_values(variables, 0.01, (3, 5))[0].numpy().ravel() - 2.0
    other = noisy_values(variables, 0.01, (3, 6))[0].numpy().ravel() - 2.0
    np.testing.assert_array_equal(first, again)
    assert abs(np.corrcoef(first, other)[0, 1]) < 0.05
    # Nor the draws of the adversary: of its start, and of the length that an l2 start has.
    for seed in ((3, 5), *(tf.random.fold_in((3, 5), position) for position in (0, 1))):
        start = tf.random.stateless_normal([9000], seed).numpy()
        assert abs(np.corrcoef(first, start)[0, 1]) < 0.05
        assert abs(np.corrcoef(second, start)[0, 1]) < 0.05


def test_crafting_equals_that_of_a_copy_with_noisy_weights():
    images, labels = map(tf.constant, examples())
    model = build_model(RAT(base=trades(), weight_noise=NOISE))
    crafted = model.objective.craft(model, images, labels, (2, 7)).numpy()
    copy = build_model(trades())
    copy.set_weights(model.get_weights())
    kernels = convolution_kernels(copy)
    for kernel, value in zip(kernels, noisy_values(kernels, NOISE, (2, 7)), strict=True):
        kernel.assign(value)
    expected = copy.objective.craft(copy, images, labels, (2, 7)).numpy()
    np.testing.assert_allclose(crafted, expected, atol=1e-6)
    without = trades().craft(model, images, labels, (2, 7)).numpy()
    assert np.mean(crafted != without) > 0.1
    calm = RAT(base=trades(), weight_noise=0.0).craft(model, images, labels, (2, 7)).numpy()
    np.testing.assert_array_equal(calm, without)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compiled", "policy"),
    [(True, "mixed_float16"), (True, "float32"), (False, "float32")],
)
def test_weights_are_the_same_bits_after_crafting(compiled, policy):
    keras.config.set_dtype_policy(policy)
    objective = RAT(base=trades(), weight_noise=NOISE)
    model = build_model(objective)
    before = model.get_weights()

    def craft(images, labels):
        return objective.craft(model, images, labels, (1, 1))

    craft = tf.function(craft) if compiled else craft
    x_adv = craft(*map(tf.constant, examples()))
    assert np.abs(x_adv.numpy() - examples()[0]).max() > 0.04
    for old, new in zip(before, model.get_weights(), strict=True):
        assert old.tobytes() == new.tobytes()


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"jit_compile": True}, marks=pytest.mark.slow),
        pytest.param({"run_eagerly": True}, marks=pytest.mark.slow),
    ],
)
def test_a_step_without_learning_rate_leaves_the_weights_alone(options):
    model = build_model(RAT(base=trades(), weight_noise=NOISE))
    before = [variable.numpy() for variable in model.trainable_variables]
    model.compile(optimizer=keras.optimizers.SGD(0.0), **options)
    model.fit(*examples(), batch_size=3, verbose=0)
    for old, new in zip(before, model.trainable_variables, strict=True):
        np.testing.assert_array_equal(old, new.numpy())


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_training_in_half_precision_follows_single_precision(policy):
    changes = []
    for each in ("float32", policy):
        keras.config.set_dtype_policy(each)
        # Of adversarial training without steps to speak of: signs would amplify rounding.
        objective = RAT(base=objectives.PGDAT(THREAT, 1, 1e-4, random_start=0.05))
        model = build_model(objective)
        before = model.network.get_layer("hidden").get_weights()[0]
        model.compile(optimizer=keras.optimizers.SGD(0.1), run_eagerly=True)
        model.fit(*examples(), verbose=0)
        changes.append(model.network.get_layer("hidden").get_weights()[0] - before)
    assert np.linalg.norm(changes[0] - changes[1]) < 0.05 * np.linalg.norm(changes[0])
