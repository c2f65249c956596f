"""SGD against closed forms of PyTorch's update, and inside everything Keras wraps around it."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from he_keras import optimizers, schedules

START = np.array([1.0, -2.0, 0.5])
GRADIENTS = np.array([[0.3, -1.0, 2.0], [-0.7, 0.2, 1.0], [1.1, 0.4, -0.6]])


def torch_sgd(rates, momenta, weight_decay=0.0, nesterov=False, gradients=GRADIENTS):
    """Returns the weights after each step of `torch.optim.SGD`, as its documentation defines it."""
    weight, velocity, history = START.copy(), None, []
    for gradient, rate, momentum in zip(gradients, rates, momenta, strict=True):
        gradient = gradient + weight_decay * weight
        velocity = gradient if velocity is None else momentum * velocity + gradient
        weight = weight - rate * (gradient + momentum * velocity if nesterov else velocity)
        history.append(weight)
    return np.array(history)


def run(optimizer, gradients=GRADIENTS):
    """Returns the weights after each step of a Keras optimizer."""
    weight = keras.Variable(START, dtype="float32")
    history = []
    for gradient in gradients:
        optimizer.apply([tf.constant(gradient, "float32")], [weight])
        history.append(weight.numpy())
    return np.array(history)


def drop_at_step_2():
    return schedules.piecewise_constant([2], [0.1, 0.01])


def linear_model(seed=0):
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])


def regression_data(count=16):
    random = np.random.default_rng(0)
    return random.normal(size=(count, 3)).astype("float32"), random.normal(size=(count, 2))


@pytest.mark.parametrize("nesterov", [False, True])
def test_three_steps_across_a_learning_rate_drop(nesterov):
    optimizer = optimizers.SGD(drop_at_step_2(), 0.9, weight_decay=0.25, nesterov=nesterov)
    expected = torch_sgd([0.1, 0.1, 0.01], [0.9] * 3, weight_decay=0.25, nesterov=nesterov)
    np.testing.assert_allclose(run(optimizer), expected, rtol=1e-6, atol=1e-7)


def test_first_coordinate_by_hand():
    # v = .3 + .5*1 = .8, w = 1 - .1*.8 = .92; v = .9*.8 - .7 + .5*.92 = .48, w = .92 - .01*.48
    optimizer = optimizers.SGD(schedules.piecewise_constant([1], [0.1, 0.01]), 0.9, 0.5)
    np.testing.assert_allclose(run(optimizer)[:2, 0], [0.92, 0.9152], rtol=1e-6)


def test_keras_sgd_differs_after_a_drop_and_agrees_before():
    ours = run(optimizers.SGD(drop_at_step_2(), 0.9))
    keras_sgd = run(keras.optimizers.SGD(drop_at_step_2(), 0.9))
    np.testing.assert_allclose(ours[:2], keras_sgd[:2], rtol=1e-6)
    # What Keras carries on: 0.9 of the last velocity, still at the learning rate before the drop.
    velocity = 0.9 * GRADIENTS[0] + GRADIENTS[1]
    np.testing.assert_allclose(ours[2] - keras_sgd[2], 0.9 * velocity * (0.1 - 0.01), rtol=1e-5)


def test_coupled_decay_is_ten_times_the_decoupled_one_at_momentum_09():
    steps, rate, decay = 300, 0.01, 0.001
    zeros = np.zeros((steps, 3))
    coupled = run(optimizers.SGD(rate, 0.9, weight_decay=decay), zeros)[-1]
    decoupled = run(keras.optimizers.SGD(rate, 0.9, weight_decay=decay), zeros)[-1]
    expected = torch_sgd([rate] * steps, [0.9] * steps, decay, gradients=zeros)[-1]
    np.testing.assert_allclose(coupled, expected, rtol=1e-5)
    np.testing.assert_allclose(decoupled, START * (1 - rate * decay) ** steps, rtol=1e-5)
    assert np.log(coupled / START)[0] / np.log(decoupled / START)[0] == pytest.approx(10, rel=0.05)


def test_scheduled_momentum_is_read_at_the_step_of_the_learning_rate():
    rates = schedules.triangular(0.2, total_steps=2, start=0.1)
    optimizer = optimizers.SGD(rates, schedules.cyclic_momentum(total_steps=2))
    expected = torch_sgd([0.1, 0.2, 0.0], [0.9, 0.8, 0.9])
    np.testing.assert_allclose(run(optimizer), expected, rtol=1e-6)


def test_without_momentum_no_velocity_is_stored():
    optimizer = optimizers.SGD(0.1, momentum=0.0, weight_decay=0.5)
    np.testing.assert_allclose(run(optimizer), torch_sgd([0.1] * 3, [0.0] * 3, 0.5), rtol=1e-6)
    assert len(optimizer.variables) == 2  # the step and the learning rate


def test_every_variable_is_decayed_unless_excluded():
    def decayed_paths(optimizer):
        model = keras.Sequential(
            [keras.Input((3,)), keras.layers.Dense(2, name="d"), keras.layers.BatchNormalization()]
        )
        for variable in model.trainable_variables:
            variable.assign(tf.ones(variable.shape))
        optimizer.apply(
            [tf.zeros(variable.shape) for variable in model.trainable_variables],
            model.trainable_variables,
        )
        return {
            variable.path.split("/")[-1]
            for variable in model.trainable_variables
            if np.all(variable.numpy() < 1)
        }

    assert decayed_paths(optimizers.SGD(0.1, 0.9, 0.5)) == {"kernel", "bias", "gamma", "beta"}
    excluding = optimizers.SGD(0.1, 0.9, 0.5, decay_exclude=["bias$", "batch_norm"])
    assert decayed_paths(excluding) == {"kernel"}


def test_excluding_afterwards_as_in_keras():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dense(1)])
    optimizer = optimizers.SGD(0.1, 0.9, 0.5)
    optimizer.exclude_from_weight_decay(var_list=[model.layers[1].kernel], var_names=["bias"])
    optimizer.build(model.trainable_variables)
    assert optimizer.is_decayed == [True, False, False, False]
    with pytest.raises(ValueError, match="Too late .* received built=True"):
        optimizer.exclude_from_weight_decay(var_names=["kernel"])
    restored = optimizers.SGD.from_config(optimizer.get_config())
    restored.build(model.trainable_variables)
    assert restored.is_decayed == optimizer.is_decayed


def test_a_variable_without_gradient_is_left_alone():
    used, unused = keras.Variable(START), keras.Variable(START)
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        optimizers.SGD(0.1, 0.9, 0.5).apply([tf.ones(3), None], [used, unused])
    np.testing.assert_array_equal(unused.numpy(), START)
    np.testing.assert_allclose(used.numpy(), START - 0.1 * (1 + 0.5 * START), rtol=1e-6)


def test_a_sparse_gradient_is_applied_to_all_rows():
    table = keras.Variable(np.ones((4, 2)))
    gradient = tf.IndexedSlices(tf.ones((1, 2)), tf.constant([2]), tf.constant([4, 2]))
    optimizers.SGD(0.1, 0.9, 0.5).apply([gradient], [table])
    np.testing.assert_allclose(table.numpy()[:, 0], [0.95, 0.95, 0.85, 0.95], rtol=1e-6)


def test_clipping_comes_before_decay():
    gradient = np.array([[3.0, 0.0, 4.0]])
    clipped = run(optimizers.SGD(0.1, 0.9, 0.5, clipnorm=1.0), gradient)
    np.testing.assert_allclose(clipped, torch_sgd([0.1], [0.9], 0.5, gradients=gradient / 5))


def test_gradient_accumulation_decays_once_per_update():
    rates = schedules.piecewise_constant([3], [0.1, 0.01])
    momenta = schedules.PiecewiseLinear([1, 3], [0.9, 0.5])
    optimizer = optimizers.SGD(rates, momenta, weight_decay=0.5, gradient_accumulation_steps=2)
    pairs = np.repeat(GRADIENTS[:2], 2, axis=0) + np.array([[0.1], [-0.1], [0.2], [-0.2]])
    history = run(optimizer, pairs)
    expected = torch_sgd([0.1, 0.01], [0.9, 0.5], 0.5, gradients=GRADIENTS[:2])
    np.testing.assert_allclose(history[[0, 2]], [START, expected[0]], rtol=1e-6)
    np.testing.assert_allclose(history[[1, 3]], expected, rtol=1e-6)


def fit_linear_model(optimizer, steps_per_execution=1):
    model = linear_model()
    model.compile(optimizer, loss="mse", jit_compile=False, steps_per_execution=steps_per_execution)
    images, targets = regression_data()
    model.fit(images, targets, batch_size=4, epochs=2, shuffle=False, verbose=0)
    return model


def closed_form_fit(rate, momentum, weight_decay):
    """Returns the kernel and bias after the same eight steps, in NumPy."""
    kernel, bias = (weight.astype("float64") for weight in linear_model().get_weights())
    images, targets = regression_data()
    velocity = [np.zeros_like(kernel), np.zeros_like(bias)]
    for _ in range(2):
        for start in range(0, 16, 4):
            batch = images[start : start + 4].astype("float64")
            error = batch @ kernel + bias - targets[start : start + 4]
            gradients = [batch.T @ error / 4, error.sum(0) / 4]
            for index, weight in enumerate((kernel, bias)):
                gradient = gradients[index] + weight_decay * weight
                velocity[index] = momentum * velocity[index] + gradient
                weight -= rate * velocity[index]
    return kernel, bias


@pytest.mark.parametrize("steps_per_execution", [1, 4])
def test_fit_reaches_the_closed_form(steps_per_execution):
    model = fit_linear_model(optimizers.SGD(0.05, 0.9, 0.1), steps_per_execution)
    kernel, bias = closed_form_fit(0.05, 0.9, 0.1)
    np.testing.assert_allclose(model.get_weights()[0], kernel, rtol=1e-4)
    np.testing.assert_allclose(model.get_weights()[1], bias, rtol=1e-4)


def test_two_replicas_reach_the_closed_form():
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = fit_linear_model(optimizers.SGD(0.05, schedules.cyclic_momentum(8), 0.1))
        kernel = model.get_weights()[0]
    single = fit_linear_model(optimizers.SGD(0.05, schedules.cyclic_momentum(8), 0.1))
    np.testing.assert_allclose(kernel, single.get_weights()[0], rtol=1e-5)
    assert not np.allclose(kernel, closed_form_fit(0.05, 0.9, 0.1)[0], rtol=1e-4)


def test_loss_scaling_under_mixed_precision_leaves_the_update_alone():
    keras.config.set_dtype_policy("mixed_float16")
    inner = optimizers.SGD(0.05, 0.9, 0.1)
    # At Keras's default scale the first steps overflow, and are skipped.
    model = fit_linear_model(keras.optimizers.LossScaleOptimizer(inner, initial_scale=256.0))
    kernel, _ = closed_form_fit(0.05, 0.9, 0.1)
    np.testing.assert_allclose(model.get_weights()[0], kernel, atol=2e-3)
    assert int(inner.iterations) == 8
    assert inner.velocities[0].dtype == "float32"


def test_mixed_precision_wraps_the_optimizer_by_itself():
    keras.config.set_dtype_policy("mixed_float16")
    model = fit_linear_model(optimizers.SGD(0.05, 0.9, 0.1))
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert np.all(np.isfinite(model.get_weights()[0]))


def test_a_saved_model_continues_identically(tmp_path):
    optimizer = optimizers.SGD(
        schedules.triangular(0.1, 40),
        schedules.cyclic_momentum(40),
        weight_decay=0.1,
        nesterov=True,
        decay_exclude=("bias",),
    )
    model = fit_linear_model(optimizer)
    model.save(tmp_path / "model.keras")
    restored = keras.saving.load_model(tmp_path / "model.keras")
    images, targets = regression_data()
    for each in (model, restored):
        each.fit(images, targets, batch_size=4, epochs=1, shuffle=False, verbose=0)
    assert int(restored.optimizer.iterations) == 12
    for continued, expected in zip(restored.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(continued, expected)


def test_config_round_trip_keeps_every_argument():
    optimizer = optimizers.SGD(0.5, 0.8, 5e-4, True, ("bias",), name="named", clipnorm=2.0)
    config = optimizer.get_config()
    restored = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert isinstance(restored, optimizers.SGD)
    assert restored.get_config() == config
    assert config["weight_decay"] == 5e-4 and config["decay_exclude"] == ["bias"]
    assert restored.weight_decay is None, "Keras would apply a decoupled decay on top"


def test_the_learning_rate_can_be_set():
    optimizer = optimizers.SGD(1)
    optimizer.learning_rate = 0.25
    np.testing.assert_allclose(run(optimizer)[0], START - 0.25 * GRADIENTS[0], rtol=1e-6)


@pytest.mark.parametrize("momentum", [-0.1, 1.0, float("nan")])
def test_refuses_a_momentum_out_of_range(momentum):
    with pytest.raises(ValueError, match=f"expected a number in .* received momentum={momentum}"):
        optimizers.SGD(0.1, momentum)


@pytest.mark.parametrize("weight_decay", [-1e-4, float("nan"), None])
def test_refuses_an_invalid_weight_decay(weight_decay):
    with pytest.raises(ValueError, match=f">= 0; received weight_decay={weight_decay}"):
        optimizers.SGD(0.1, weight_decay=weight_decay)


def test_refuses_invalid_exclusions():
    with pytest.raises(TypeError, match="expected a sequence .* received decay_exclude='bias'"):
        optimizers.SGD(0.1, decay_exclude="bias")
    with pytest.raises(ValueError, match=r"expected regular expressions .* received .*\['\('\]"):
        optimizers.SGD(0.1, decay_exclude=["("])
