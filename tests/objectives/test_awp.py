"""AWP against whole training steps in NumPy, and against weights that are really perturbed."""

import keras
import numpy as np
import numpy_training as closed_form
import pytest
import tensorflow as tf
from closed_form_objectives import HEADS, THREAT, examples
from numpy_training import BATCH_SIZE, LEARNING_RATE, NUM_STEPS, STEP_SIZE
from numpy_twins import as_rows, build_twins, check_fit
from small_objectives import CallCounter, build_model, moving_statistics, train_one_step
from small_objectives import examples as small_examples

import he_keras as he
from he_keras import objectives
from he_keras.objectives import added_losses, registry
from he_keras.objectives.awp import AWP, perturbation, perturbed_variables
from he_keras.objectives.rat import RAT

GAMMA = 0.3  # strong enough to see


class NumpyAWP:
    """Adds the perturbation to the kernel before the loss and takes it back after the step."""

    gamma = GAMMA
    sample_weight = 1.0

    def step(self, x, labels, step):
        x_adv = self.craft(x, labels, step)
        shift = self.gamma * self.ascent(x, labels, x_adv)
        self.head.weights[0] = self.head.weights[0] + shift
        losses, parts = self.weighted_terms(x, labels, x_adv)
        self.descend(len(x), parts)
        self.head.weights[0] = self.head.weights[0] - shift
        return losses

    def ascent(self, x, labels, x_adv):
        _, parts = self.weighted_terms(x, labels, x_adv)
        gradient = sum(self.head.backward(z, upstream)[0][0] for z, upstream in parts)
        length = np.linalg.norm(self.head.weights[0])
        return length * gradient / np.linalg.norm(gradient)

    def weighted_terms(self, x, labels, x_adv):
        losses, parts = self.terms(x, labels, x_adv)
        weight = np.broadcast_to(self.sample_weight, len(x))
        return weight * losses, [(z, weight[:, None] * upstream) for z, upstream in parts]


class NumpyPGDAT(NumpyAWP, closed_form.PGDATGaussian):
    pass


class NumpyTRADES(NumpyAWP, closed_form.TRADES):
    pass


class NumpyFastAT(NumpyAWP, closed_form.FastATRandom):
    pass


def iterated(build):
    return build(THREAT, num_steps=NUM_STEPS, step_size=STEP_SIZE)


BASES = {
    "pgd_at": (NumpyPGDAT, lambda: iterated(objectives.PGDAT)),
    "trades": (NumpyTRADES, lambda: iterated(objectives.TRADES)),
    "fast_at": (NumpyFastAT, lambda: objectives.FastAT(THREAT)),
}
GRID = [("pgd_at", head) for head in HEADS] + [("trades", "m-he"), ("fast_at", "linear")]


def build(base, head_name, gamma=GAMMA, **options):
    """A Keras model and its NumPy twin with the same weights."""
    trainer, make_base = BASES[base]
    return build_twins(trainer, AWP(base=make_base(), gamma=gamma, **options), head_name)


@pytest.mark.parametrize(("base", "head"), GRID)
def test_weights_after_fit_match_the_closed_form(base, head):
    model, expected = build(base, head)
    check_fit(model, expected, head == "he")


def test_the_perturbation_makes_a_difference_of_its_own():
    """Guards the closed forms above: the weights are others than without perturbation."""
    trained = []
    for gamma in (0.0, GAMMA):
        model, _ = build("pgd_at", "linear", gamma)
        x, y = (part[:BATCH_SIZE] for part in examples())
        train_one_step(model, x, y, run_eagerly=True)
        trained.append(model.head.get_weights()[0])
    assert np.abs(trained[0] - trained[1]).max() > 1e-3


def test_sample_weights_enter_the_perturbation():
    model, expected = build("pgd_at", "he")
    x, y = (part[:BATCH_SIZE] for part in examples())
    expected.sample_weight = np.array([0.0, 1.0, 2.0, 0.5])
    model.compile(optimizer=keras.optimizers.SGD(LEARNING_RATE), run_eagerly=True)
    model.fit(x, y, sample_weight=expected.sample_weight, shuffle=False, verbose=0)
    expected.step(as_rows(x), y, 0)
    np.testing.assert_allclose(model.head.get_weights()[0], expected.head.weights[0], rtol=1e-5)


# The perturbation


def test_length_and_direction_of_a_perturbation():
    generator = np.random.default_rng(0)
    weight, gradient = generator.normal(0.0, 1.0, (2, 3, 3, 4, 5)).astype(np.float32)
    expected = 0.02 * np.linalg.norm(weight) * gradient / np.linalg.norm(gradient)
    for scale in (1.0, 1e-30):  # squares of the latter underflow
        shift = perturbation(tf.constant(scale * gradient), tf.constant(weight), 0.02)
        np.testing.assert_allclose(shift, expected, rtol=1e-4)


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_a_tensor_without_usable_gradient_stays_where_it_is(value):
    gradient = np.zeros((2, 2), np.float32)
    gradient[1, 1] = value
    shift = perturbation(tf.constant(gradient), tf.ones([2, 2]), 0.5)
    np.testing.assert_array_equal(shift, np.zeros((2, 2)))


def test_kernels_are_perturbed_and_nothing_else():
    model = build_model(AWP(THREAT))
    assert [each.name for each in perturbed_variables(model)] == ["kernel", "kernel"]
    model.network.get_layer("dense").trainable = False
    assert len(perturbed_variables(model)) == 1


def compiled(model):
    model.compile(optimizer=keras.optimizers.SGD(0.1))
    model.optimizer.build(model.trainable_variables)
    return model


def perturbed_copy(model, objective, images, labels, x_adv):
    """A twin whose weights are really assigned the perturbed values, each found by itself."""
    twin = compiled(build_model(objective.base))
    twin.set_weights(model.get_weights())
    variables = perturbed_variables(twin)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(objective.base.loss(twin, images, labels, x_adv, training=True))
    gradients = tape.gradient(loss, variables)
    twin.set_weights(model.get_weights())  # back to the statistics before that pass
    for variable, gradient in zip(variables, gradients, strict=True):
        weight, gradient = variable.numpy().astype(np.float64), np.float64(gradient)
        length = np.linalg.norm(gradient)
        factor = np.linalg.norm(weight) / length if length > 0 else 0.0
        variable.assign(weight + objective.gamma * factor * gradient)
    return twin


REFUSED = {"awp", "free_at", "fast_adv_plus"}


@pytest.mark.fast_cases("pgd_at", "trades", "llr", "fast_at")
@pytest.mark.parametrize("base", sorted(set(registry.names()) - REFUSED))
def test_every_objective_is_computed_at_the_perturbed_weights(base):
    """Losses, gradients and batch-norm statistics are those of a model with these weights."""
    objective = AWP(THREAT, base, gamma=0.2)
    model = compiled(build_model(objective))
    images, labels = map(tf.constant, small_examples())
    noise = np.random.default_rng(1).uniform(-0.1, 0.1, images.shape).astype("f")
    x_adv = tf.clip_by_value(images + noise, 0.0, 1.0)
    twin = perturbed_copy(model, objective, images, labels, x_adv)
    results = []
    for each in (model, twin):
        with tf.GradientTape() as tape:
            losses = each.objective.loss(each, images, labels, x_adv, training=True)
            loss = tf.reduce_mean(losses)
        results.append([losses, *tape.gradient(loss, each.trainable_variables)])
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-3, atol=1e-5)
    np.testing.assert_allclose(moving_statistics(model), moving_statistics(twin), atol=1e-6)
    assert np.abs(moving_statistics(model)[0]).max() > 1e-3
    assert objective.batch_norm_passes == objective.base.batch_norm_passes
    plain = objective.base.loss(model, images, labels, x_adv, training=True)
    assert np.abs(results[0][0] - plain).max() > 1e-3


# The step


def test_warm_up_steps_are_those_of_the_base():
    """Two steps without perturbation, then one with: it is on from step `warm_up_steps`."""
    images, labels = small_examples()
    base = objectives.Standard(THREAT)  # no adversary: its signs would amplify rounding
    model = build_model(AWP(base=base, gamma=0.2, warm_up_steps=2))
    others = [build_model(base), build_model(AWP(base=base, gamma=0.2))]
    for each in (model, *others):
        # The one with a condition in graph mode, the others eagerly, which is faster.
        each.compile(optimizer=keras.optimizers.SGD(0.1), run_eagerly=each is not model)

    def fit(trained, epochs=1):
        trained.fit(images, labels, batch_size=6, epochs=epochs, shuffle=False, verbose=0)

    fit(model, epochs=2)
    fit(others[0], epochs=2)
    for weight, desired in zip(model.get_weights(), others[0].get_weights(), strict=True):
        np.testing.assert_allclose(weight, desired, atol=1e-6)
    others[1].set_weights(model.get_weights())
    for each in (model, *others):
        fit(each)
    for weight, desired in zip(model.get_weights(), others[1].get_weights(), strict=True):
        np.testing.assert_allclose(weight, desired, atol=1e-6)
    assert np.abs(model.get_weights()[0] - others[0].get_weights()[0]).max() > 1e-3


def test_number_of_passes():
    images, labels = small_examples()
    counter = CallCounter()
    model = build_model(AWP(base=objectives.PGDAT(THREAT, 3)), counter=counter)
    counter.flags.clear()
    train_one_step(model, images, labels, run_eagerly=True)
    assert counter.flags == [False] * 3 + [True] * 2


@pytest.fixture
def half_precision():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy(before)


def test_overflow_in_half_precision_spoils_nothing(half_precision):
    model = build_model(AWP(base=objectives.PGDAT(THREAT, 1)))
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), 2.0**40)
    model.compile(optimizer=optimizer, run_eagerly=True)
    weights = [each.numpy() for each in model.trainable_variables]
    model.fit(*small_examples(), verbose=0)
    assert np.isfinite(moving_statistics(model)).all()
    for old, new in zip(weights, model.trainable_variables, strict=True):
        np.testing.assert_array_equal(old, new.numpy())  # the step is skipped


def largest_shift(model, layer, images, labels):
    """How far the kernel of a layer is from itself when the loss is computed."""
    layer, values = model.network.get_layer(layer), []
    call = layer.call

    def note_kernel(*arguments, **options):
        values.append(tf.cast(layer.kernel, tf.float32).numpy())
        return call(*arguments, **options)

    layer.call = note_kernel
    model.objective.loss(model, images, labels, images)
    layer.call = call
    return np.abs(values[-1] - values[0]).max()


def test_gradients_that_half_precision_loses_need_the_loss_scale(half_precision):
    """The head's small kernel sends 1e-8 back, which is 0 in float16 without loss scaling."""
    head = keras.layers.Dense(4, dtype="float32")
    model = build_model(AWP(base=objectives.Standard(THREAT), gamma=0.1), head)
    head.set_weights([1e-7 * np.sign(np.sin(np.arange(20.0))).reshape(5, 4), np.zeros(4)])
    images, labels = small_examples()
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), 2.0**15)
    seen = []
    for scales in (False, True):
        if scales:
            model.compile(optimizer=optimizer)
        seen.append(largest_shift(model, "dense", images, labels))
    assert seen[0] == 0.0 and seen[1] > 1e-3


def test_activity_losses_of_layers_are_kept():
    """Keras forgets losses added in a scope; they count once, at the perturbed weights."""
    images, labels = small_examples()
    network = keras.Sequential(
        [
            keras.Input((3, 3, 1)),
            keras.layers.Flatten(),
            keras.layers.Dense(5, activity_regularizer=keras.regularizers.L2(0.5)),
        ]
    )
    head = he.CosineHead(4)
    model = he.HEAdversarialModel(network, head)
    plain = 0.5 * np.sum(model.features(images).numpy() ** 2) / len(images)
    for gamma, tolerance in ((0.0, 1e-6), (0.1, 0.2)):
        objective = AWP(base=objectives.Standard(THREAT), gamma=gamma)
        model = he.HEAdversarialModel(network, head, objective, None)
        with added_losses.collected() as found:
            objective.loss(model, images, labels, images)
        (added,) = found
        assert float(added) == pytest.approx(plain, rel=tolerance)
    assert abs(float(added) / plain - 1.0) > 1e-3


@pytest.mark.parametrize(
    ("build_objective", "message"),
    [
        (lambda: AWP(THREAT, "free_at"), "carries state from one update.*received base=FreeAT"),
        (lambda: AWP(base=AWP(THREAT)), "other than AWP; received base=AWP"),
        (lambda: RAT(base=AWP(THREAT)), "received base=AWP"),
        (lambda: AWP(THREAT, gamma=-0.1), "received gamma=-0.1"),
        (lambda: AWP(THREAT, warm_up_steps=-1), "received warm_up_steps=-1"),
    ],
)
def test_what_cannot_work_is_refused(build_objective, message):
    with pytest.raises(ValueError, match=f"expected .*{message}|{message}.*"):
        build_objective()
