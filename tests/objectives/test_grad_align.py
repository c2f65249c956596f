"""GradAlign against NumPy on a linear model and against finite differences in float64."""

import json

import keras
import numpy as np
import numpy_training as closed_form
import pytest
import tensorflow as tf
from closed_form_objectives import THREAT, examples
from finite_differences import SteppedByDifferences
from numpy_training import CLASSES, EPSILON, SEED, SHAPE
from numpy_twins import as_rows, build_twins, check_fit
from small_objectives import CallCounter, build_model, moving_statistics, train_one_step
from small_objectives import examples as small_examples

import he_keras as he
from he_keras import objectives
from he_keras.objectives import elle, grad_align
from he_keras.objectives.grad_align import GradAlign

WEIGHT = 3.0


def numpy_cosine(one, other):
    lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    return np.sum(one * other, axis=1) / lengths


def noise_seed(seed):
    """The stream of a step's seed that the noise is drawn from."""
    return tf.random.fold_in(seed, grad_align._STREAM)


class NumpyGradAlign(SteppedByDifferences):
    """The loss written out; its gradient by central differences over every weight."""

    detached = True

    def noisy(self, x, step):
        seed = noise_seed([SEED, step])
        noise = tf.random.stateless_uniform([len(x), *SHAPE], seed, -1.0, 1.0).numpy()
        return np.clip(x + EPSILON * noise.reshape(len(x), -1).astype(np.float64), 0.0, 1.0)

    def input_gradient(self, weights, x, labels):
        head = type(self.head)(weights)
        return head.backward(x, closed_form.cross_entropy(head.logits(x), labels)[1])[1]

    def losses(self, weights, x, labels, x_adv, step):
        head = type(self.head)(weights)
        logits = head.with_margin(head.logits(x_adv), labels)
        clean_weights = self.head.weights if self.detached else weights
        clean = self.input_gradient(clean_weights, x, labels)
        noisy = self.input_gradient(weights, self.noisy(x, step), labels)
        misaligned = 1.0 - numpy_cosine(clean, noisy)
        return closed_form.cross_entropy(logits, labels)[0] + WEIGHT * misaligned


class NumpyPaper(NumpyGradAlign):
    detached = False


VARIANTS = {
    "released": (NumpyGradAlign, lambda: GradAlign(THREAT, WEIGHT)),
    "paper": (NumpyPaper, lambda: GradAlign(THREAT, WEIGHT, detach_clean_gradient=False)),
}
GRID = [("released", "linear"), ("released", "he"), ("paper", "linear")]
GRID += [
    pytest.param(*each, marks=pytest.mark.slow) for each in (("released", "m-he"), ("paper", "he"))
]


def build(variant, head_name):
    """A Keras model and its NumPy twin with the same weights."""
    trainer, make_objective = VARIANTS[variant]
    return build_twins(trainer, make_objective(), head_name)


@pytest.mark.parametrize(("variant", "head"), GRID)
def test_weights_after_fit_match_numpy(variant, head):
    model, expected = build(variant, head)
    check_fit(model, expected, head == "he", atol=2e-5)


def test_the_two_variants_differ():
    """Guards the comparison above: a gradient that is kept constant is not the other one."""
    x, y = examples()
    ends = []
    for variant in VARIANTS:
        expected = build(variant, "linear")[1]
        expected.step(as_rows(x)[:4], y[:4], 0)
        ends.append(expected.head.weights[0])
    assert np.abs(ends[0] - ends[1]).max() > 1e-4


# A network with batch norm, in float64


class PlainNorm(keras.layers.Layer):
    """Batch norm without the constant that TensorFlow's moments contain.

    `tf.nn.moments` stops the gradient of the mean inside the variance: the first derivative is
    right, the second is not. Keras's layer has that, and so float64 has no exact batch norm.
    """

    def build(self, shape):
        self.gamma = self.add_weight(shape=shape[-1:], initializer="ones")
        self.beta = self.add_weight(shape=shape[-1:], initializer="zeros")

    def call(self, inputs):
        mean = tf.reduce_mean(inputs, [0, 1, 2])
        variance = tf.reduce_mean(tf.square(inputs - mean), [0, 1, 2])
        return (inputs - mean) * tf.math.rsqrt(variance + 1e-5) * self.gamma + self.beta


def make_deep_model(objective, dtype, norm=PlainNorm):
    keras.utils.set_random_seed(2)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(dtype)
    try:
        layers = [
            keras.Input((6, 6, 2)),
            keras.layers.Conv2D(4, 3, padding="same"),
            norm(),
            keras.layers.Activation("softplus"),
            keras.layers.Conv2D(3, 3, strides=2),
            norm(),
            keras.layers.Activation("tanh"),
            keras.layers.Flatten(),
        ]
        head = keras.layers.Dense(CLASSES, dtype=dtype)
        model = he.HEAdversarialModel(keras.Sequential(layers), head, objective, None)
    finally:
        keras.config.set_dtype_policy(before)
    model.compile(keras.optimizers.SGD(0.1))
    generator = np.random.default_rng(4)
    model.set_weights([w + 0.1 * generator.uniform(0, 1, w.shape) for w in model.get_weights()])
    return model


def deep_examples(dtype):
    generator = np.random.default_rng(5)
    images = generator.uniform(0.2, 0.8, (5, 6, 6, 2)).astype(dtype)
    return tf.constant(images), tf.constant(generator.integers(0, CLASSES, 5))


def mean_loss_and_gradients(model, dtype):
    images, labels = deep_examples(dtype)
    x_adv = tf.clip_by_value(images + 0.03 * tf.sign(tf.sin(50.0 * images)), 0.0, 1.0)

    def mean_loss():
        return tf.reduce_mean(model.objective.loss(model, images, labels, x_adv, training=True))

    with tf.GradientTape() as tape:
        loss = mean_loss()
    return mean_loss, tape.gradient(loss, model.trainable_variables)


@pytest.mark.parametrize(
    "make_objective",
    [
        lambda: GradAlign(THREAT, WEIGHT, detach_clean_gradient=False),
        lambda: elle.ELLE(THREAT, 300.0),
    ],
    ids=["grad_align", "elle"],
)
def test_whole_gradient_by_finite_differences_in_float64(make_objective):
    """Through batch norm in training mode, along random directions over all weights."""
    model = make_deep_model(make_objective(), "float64")
    mean_loss, gradients = mean_loss_and_gradients(model, np.float64)
    start = [tf.identity(each.value) for each in model.trainable_variables]
    generator = np.random.default_rng(6)
    for _ in range(3):
        direction = [generator.normal(size=each.shape) for each in start]
        values = []
        for sign in (1, -1):
            for variable, value, by in zip(
                model.trainable_variables, start, direction, strict=True
            ):
                variable.assign(value + sign * 1e-4 * by)
            values.append(float(mean_loss()))
        slope = (values[0] - values[1]) / 2e-4
        parts = zip(gradients, direction, strict=True)
        expected = sum(float(tf.reduce_sum(gradient * by)) for gradient, by in parts)
        assert abs(slope) > 0.1
        assert slope == pytest.approx(expected, rel=2e-5)


def test_single_precision_gradient_is_that_of_double_precision(monkeypatch):
    """In float32 the double backward goes through the fused batch norm, in float64 it does not."""
    noise = tf.random.stateless_uniform([5, 6, 6, 2], [1, 2], -EPSILON, EPSILON)
    monkeypatch.setattr(
        he.ThreatModel, "random_start", lambda self, x, seed: x + tf.cast(noise, x.dtype)
    )
    exact = make_deep_model(GradAlign(THREAT, WEIGHT), "float64")
    fused = make_deep_model(GradAlign(THREAT, WEIGHT), "float32", he.layers.BatchNormalization)
    for mine, theirs in zip(fused.trainable_variables, exact.trainable_variables, strict=True):
        mine.assign(theirs)
    gradients = [
        mean_loss_and_gradients(model, dtype)[1]
        for model, dtype in ((fused, np.float32), (exact, np.float64))
    ]
    for one, other in zip(*gradients, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)
    # A bias before a batch norm has no gradient; every other weight has.
    assert sum(np.abs(other).max() > 1e-3 for other in gradients[1]) == 8


# What the penalty is made of


def test_cosine_distance_knows_no_lengths_and_no_direction_of_zero():
    rows = np.array([[3.0, 4.0], [3e-25, 4e-25], [0.0, 0.0], [1.0, 0.0], [0.0, 0.0]], "float32")
    others = np.array([[4.0, 3.0], [-3e20, -4e20], [1.0, 2.0], [0.0, 0.0], [0.0, 0.0]], "float32")
    tensor = tf.constant(rows)
    with tf.GradientTape() as tape:
        tape.watch(tensor)
        distance = grad_align.cosine_distance(tensor, tf.constant(others))
    np.testing.assert_allclose(distance, [1 - 0.96, 2.0, 0.0, 0.0, 0.0], atol=1e-6)
    gradient = tape.gradient(distance, tensor).numpy()
    assert np.isfinite(gradient).all() and not gradient[2:].any()
    unit, other = np.array([0.6, 0.8]), np.array([0.8, 0.6])
    np.testing.assert_allclose(gradient[0], (0.96 * unit - other) / 5.0, atol=1e-6)


def test_a_model_that_is_linear_in_the_images_is_aligned_and_a_curved_one_is_not():
    model, _ = build("released", "linear")
    x, y = map(tf.constant, examples())
    two_classes = np.zeros((6, CLASSES), "float32")
    two_classes[:, 0], two_classes[:, 1:] = 1.0, -1.0
    model.head.set_weights([two_classes, np.zeros(CLASSES, "float32")])
    np.testing.assert_allclose(
        model.objective.misalignment(model, x, tf.zeros_like(y)), np.zeros(6), atol=1e-6
    )
    model, numpy_twin = build("released", "linear")
    received = model.objective.misalignment(model, x, y, (SEED, 0)).numpy()
    rows = as_rows(x.numpy())
    clean, noisy = (
        numpy_twin.input_gradient(numpy_twin.head.weights, each, y.numpy())
        for each in (rows, numpy_twin.noisy(rows, 0))
    )
    np.testing.assert_allclose(received, 1.0 - numpy_cosine(clean, noisy), rtol=1e-3, atol=1e-6)
    assert received.max() > 5e-4


def test_the_noise_is_not_the_start_of_the_adversary():
    images, _ = map(tf.constant, small_examples())
    start = THREAT.random_start(images, (4, 1))
    noisy = THREAT.random_start(images, noise_seed((4, 1)))
    assert abs(np.corrcoef(np.ravel(start - images), np.ravel(noisy - images))[0, 1]) < 0.4


@pytest.mark.parametrize("in_training_mode", [False, True])
def test_passes_and_batch_norm_statistics(in_training_mode):
    images, labels = small_examples()
    counter = CallCounter()
    options = {"attack_training_mode": in_training_mode}
    model = build_model(GradAlign(THREAT, **options), counter=counter)
    twin = build_model(GradAlign(THREAT, **options))
    twin.set_weights(model.get_weights())
    # The seed of a model's first step is (0, 0).
    x_adv = twin.objective.craft(twin, tf.constant(images), tf.constant(labels)).numpy()
    noisy = THREAT.random_start(tf.constant(images), noise_seed((0, 0)))
    expected = np.stack([np.zeros(9), np.ones(9)])
    for batch in [images] * in_training_mode + [x_adv, images, noisy.numpy()]:
        rows = as_rows(batch)
        expected = 0.9 * expected + 0.1 * np.stack([rows.mean(axis=0), rows.var(axis=0)])
    counter.flags.clear()
    train_one_step(model, images, labels, run_eagerly=True)
    assert sorted(counter.flags) == [in_training_mode, True, True, True]
    np.testing.assert_allclose(moving_statistics(model), expected, atol=2e-6)
    passes = ("attack",) * in_training_mode + ("adversarial", "clean", "noisy")
    assert model.objective.batch_norm_passes == passes


# Configuration


def test_configuration_is_plain_data_and_comes_back():
    threat = he.ThreatModel("linf", 0.2, bounds=(-1, 1))
    objective = GradAlign(
        threat,
        0.5,
        False,
        "random",
        step_size="1/4",
        attack_training_mode=True,
        label_smoothing=0.1,
    )
    stored = json.loads(json.dumps(keras.saving.serialize_keras_object(objective)))
    restored = keras.saving.deserialize_keras_object(stored)
    assert type(restored) is GradAlign and restored.get_config() == objective.get_config()
    assert (restored.penalty_weight, restored.detach_clean_gradient) == (0.5, False)
    assert (restored.initialization, restored.label_smoothing) == ("random", 0.1)
    assert restored.attack.step_size == 0.25 and restored.attack_training_mode is True


@pytest.mark.parametrize(
    ("epsilon", "bounds", "weight"),
    [
        ("8/255", (0, 1), 0.2),
        ("16/255", (0, 1), 2.0),
        ("12/255", (0, 1), 0.02 * 10**1.5),
        ("24/255", (-1, 2), 0.2),
        (0.3, (0, 1), 2.0),
    ],
)
def test_recommended_weights(epsilon, bounds, weight):
    objective = objectives.get("grad_align", he.ThreatModel("linf", epsilon, bounds))
    assert objective.penalty_weight == pytest.approx(weight)
    assert (objective.initialization, objective.detach_clean_gradient) == ("zero", True)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: GradAlign(None), ValueError, "expected a ThreatModel; received None"),
        (lambda: GradAlign(THREAT, -1.0), ValueError, "expected .* received penalty_weight=-1.0"),
        (lambda: GradAlign(THREAT, "1"), ValueError, "expected .* received penalty_weight='1'"),
        (lambda: GradAlign(THREAT, 1.0, 1), TypeError, "received detach_clean_gradient=1"),
        (
            lambda: GradAlign(he.ThreatModel("l2", 0.5)),
            ValueError,
            "expected penalty_weight=.*received norm='l2'",
        ),
    ],
)
def test_wrong_arguments_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_other_norms_work_with_a_given_weight():
    threat = he.ThreatModel("l2", 0.4)
    model = build_model(GradAlign(threat, 1.0))
    images, labels = map(tf.constant, small_examples())
    distance = model.objective.misalignment(model, images, labels, training=False).numpy()
    assert ((distance >= -1e-6) & (distance <= 2.0 + 1e-6)).all() and distance.max() > 0.1
