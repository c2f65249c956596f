"""ELLE and ELLE-A against NumPy on a linear model; its gradient: `test_grad_align.py`."""

import json

import keras
import numpy as np
import numpy_training as closed_form
import pytest
import tensorflow as tf
from closed_form_objectives import THREAT, examples
from finite_differences import SteppedByDifferences
from numpy_training import BATCH_SIZE, LEARNING_RATE, SEED, SHAPE
from numpy_twins import as_rows, build_twins, check_fit
from small_objectives import CallCounter, build_model, moving_statistics, train_one_step
from small_objectives import examples as small_examples

import he_keras as he
from he_keras import objectives
from he_keras.objectives import elle
from he_keras.objectives.elle import ELLE, NonlinearityWatch

WEIGHT = 4e4


def drawn_points(images, seed):
    """The two random points and the share of the second, from the streams of a step's seed."""
    images = tf.constant(images)
    points = [
        THREAT.random_start(images, tf.random.fold_in(seed, stream)).numpy()
        for stream in (elle._FIRST, elle._SECOND)
    ]
    share = tf.random.stateless_uniform(
        [len(images)], tf.random.fold_in(seed, elle._SHARE), dtype=images.dtype
    )
    return [as_rows(each) for each in points] + [share.numpy().astype(np.float64)]


class NumpyELLE(SteppedByDifferences):
    """The loss written out; its gradient by central differences over every weight."""

    def errors(self, weights, x, labels, step):
        head = type(self.head)(weights)
        images = x.astype(np.float32).reshape(len(x), *SHAPE)
        first, second, share = drawn_points(images, [SEED, step])
        between = (1 - share[:, None]) * first + share[:, None] * second
        first, second, between = (
            closed_form.cross_entropy(head.logits(each), labels)[0]
            for each in (first, second, between)
        )
        return (between - (1 - share) * first - share * second) ** 2

    def losses(self, weights, x, labels, x_adv, step):
        head = type(self.head)(weights)
        logits = head.with_margin(head.logits(x_adv), labels)
        errors = self.errors(weights, x, labels, step)
        return closed_form.cross_entropy(logits, labels)[0] + WEIGHT * errors


def build(head_name, objective=None):
    """A Keras model and its NumPy twin with the same weights."""
    model, twin = build_twins(NumpyELLE, objective or ELLE(THREAT, WEIGHT), head_name)
    model.compile(keras.optimizers.SGD(LEARNING_RATE), run_eagerly=True)
    return model, twin


@pytest.mark.parametrize("head", ["linear", "he", pytest.param("m-he", marks=pytest.mark.slow)])
def test_weights_after_fit_match_numpy(head):
    model, expected = build(head)
    check_fit(model, expected, in_graph_mode=False, rtol=5e-3, atol=2e-4, loss_rtol=1e-3)


def test_the_penalty_counts():
    """Guards the comparison above: without the penalty the loss would be another one."""
    _, expected = build("he")
    x, y = (part[:BATCH_SIZE] for part in examples())
    errors = expected.errors(expected.head.weights, as_rows(x), y, 0)
    assert (WEIGHT * errors).max() > 0.1


def test_errors_of_a_quadratic_loss():
    """With `l(z) = sum(z**2)` the error is `a (1 - a) |z1 - z2|**2`; of a linear one nothing."""

    class Quadratic:
        power = 2.0

        def __call__(self, images, training):
            # Cross-entropy of label 0 against a logit that is larger by far: the difference.
            value = 1000.0 + tf.reduce_sum(images**self.power, axis=[1, 2, 3])
            return tf.stack([tf.zeros_like(value), value], axis=1)

    images = tf.constant(examples()[0][:4], tf.float64)
    labels = tf.zeros([4], tf.int32)
    seed = (4, 1)
    received = ELLE(THREAT, 1.0).linearity_errors(Quadratic(), images, labels, seed)
    first, second, share = drawn_points(images, seed)
    expected = (share * (1 - share) * np.sum((first - second) ** 2, axis=1)) ** 2
    np.testing.assert_allclose(received, expected, rtol=1e-6)
    Quadratic.power = 1.0
    received = ELLE(THREAT, 1.0).linearity_errors(Quadratic(), images, labels, seed)
    np.testing.assert_allclose(received, np.zeros(4), atol=1e-20)


def test_passes_and_batch_norm_statistics():
    images, labels = small_examples()
    counter = CallCounter()
    model = build_model(ELLE(THREAT), counter=counter)
    twin = build_model(ELLE(THREAT))
    twin.set_weights(model.get_weights())
    # The seed of a model's first step is (0, 0).
    x_adv = twin.objective.craft(twin, tf.constant(images), tf.constant(labels)).numpy()
    first, second, share = drawn_points(images, (0, 0))
    between = (1 - share[:, None]) * first + share[:, None] * second
    expected = np.stack([np.zeros(9), np.ones(9)])
    for rows in (as_rows(x_adv), np.concatenate([first, second, between])):
        expected = 0.9 * expected + 0.1 * np.stack([rows.mean(axis=0), rows.var(axis=0)])
    counter.flags.clear()
    train_one_step(model, images, labels, run_eagerly=True)
    assert counter.flags == [False, True, True]
    np.testing.assert_allclose(moving_statistics(model), expected, atol=2e-6)
    assert model.objective.batch_norm_passes == ("adversarial", "triplets")


# ELLE-A


def numpy_weights(errors, largest):
    """The weights in use at each batch, from the whole list of errors before it."""
    weights, weight = [], 0.0
    for count in range(len(errors)):
        weights.append(weight)
        known, error = errors[:count], errors[count]
        if count > 2 and error > np.mean(known) + 2 * np.std(known):
            weight = largest
        else:
            weight *= 0.99
    return weights


def test_the_weight_follows_outliers():
    generator = np.random.default_rng(3)
    errors = generator.uniform(0.5, 1.0, 60) * 1e-5
    errors[[7, 20, 21, 45]] *= 10
    # Just above and just below the threshold, by the standard deviation of the population.
    for count, deviations in ((5, 2.05), (6, 1.95), (40, 2.1), (41, 1.9)):
        errors[count] = np.mean(errors[:count]) + deviations * np.std(errors[:count])
    watch = NonlinearityWatch(500.0)
    received = []
    for error in errors:
        received.append(float(watch.weight()))
        watch.observe(tf.constant([0.5 * error, 1.5 * error], tf.float32))
    expected = numpy_weights(errors, 500.0)
    np.testing.assert_allclose(received, expected, rtol=1e-5)
    raised = [count - 1 for count, weight in enumerate(expected) if weight == 500.0]
    assert raised == [5, 7, 20, 21, 40, 45] and expected[:6] == [0.0] * 6


def test_adaptive_training_uses_and_reports_the_weight(monkeypatch):
    objective = ELLE(THREAT, 7.0, adaptive=True)
    model, _ = build("he", objective)
    errors = [1.0, 1.5, 1.0, 5.0, 1.0, 1.0]
    scripted = iter(errors)
    monkeypatch.setattr(
        objective, "linearity_errors", lambda *_: tf.fill([2], tf.constant(next(scripted)))
    )
    x, y = (np.repeat(part[:2], 6, axis=0) for part in examples())
    seen = []
    log = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(float(logs["penalty_weight"]))
    )
    model.fit(x, y, batch_size=2, shuffle=False, verbose=0, callbacks=[log])
    # The weight reported after a batch is the next batch's.
    np.testing.assert_allclose(seen[:-1], numpy_weights(errors, 7.0)[1:], rtol=1e-6)
    assert seen[3] == 7.0


def test_the_weight_in_use_is_the_one_before_the_batch():
    objective = ELLE(THREAT, 700.0, adaptive=True)
    model, _ = build("he", objective)
    x, y = map(tf.constant, examples())
    seed = model.step_seed()
    errors = objective.linearity_errors(model, x, y, seed)
    plain = objectives.FastAT(THREAT).loss(model, x, y, x)
    # Three batches without any error are known, so that this one is an outlier.
    objective.load_state_arrays({"nonlinearity": np.array([50.0, 3.0, 0.0, 0.0])})
    for weight in (50.0, 700.0):
        for _ in range(2):
            # The losses are a function of the arguments: asking for them changes nothing.
            received = objective.loss(model, x, y, x, seed=seed)
            np.testing.assert_allclose(received, plain + weight * errors, rtol=1e-4)
        objective.observe(errors)
    assert float(tf.reduce_max(errors)) * 650 > 1e-3


def test_only_training_moves_the_weight():
    objective = ELLE(THREAT, adaptive=True)
    model, _ = build("linear", objective)
    x, y = map(tf.constant, examples())
    for training in (False, True):
        objective.loss(model, x, y, x, training=training)
    model.evaluation_attack = None
    model.evaluate(x, y, verbose=0)
    assert not objective.state_arrays()["nonlinearity"].any()
    model.fit(x, y, batch_size=len(y), verbose=0)
    assert objective.state_arrays()["nonlinearity"][1] == 1.0


@pytest.mark.fast_cases("True")
@pytest.mark.parametrize("adaptive", [False, True])
def test_a_saved_model_trains_on_as_if_never_saved(adaptive, tmp_path):
    x, y = examples()
    objective = ELLE(THREAT, WEIGHT, adaptive, attack_training_mode=True, step_size="1/20")
    model, _ = build("linear", objective)
    for _ in range(3):
        model.fit(x, y, batch_size=2, shuffle=False, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = he.load_model(tmp_path / "model.keras")
    loaded.compile(keras.optimizers.SGD(LEARNING_RATE), run_eagerly=True)
    loaded.optimizer.build(loaded.trainable_variables)
    loaded.optimizer.iterations.assign(model.optimizer.iterations)
    assert type(loaded.objective) is ELLE
    assert loaded.objective.get_config() == objective.get_config()
    for each in (model, loaded):
        each.fit(x, y, batch_size=2, shuffle=False, verbose=0)
    for weight, desired in zip(loaded.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, desired)
    if adaptive:
        state, desired = (each.objective.state_arrays()["nonlinearity"] for each in (loaded, model))
        np.testing.assert_array_equal(state, desired)
        assert state[1] == 12.0 and state[2] > 0.0


# Configuration


def test_configuration_is_plain_data_and_comes_back():
    objective = ELLE(he.ThreatModel("linf", 0.2, bounds=(-1, 1)), 5, True, "random")
    stored = json.loads(json.dumps(keras.saving.serialize_keras_object(objective)))
    restored = keras.saving.deserialize_keras_object(stored)
    assert type(restored) is ELLE and restored.get_config() == objective.get_config()
    assert (restored.penalty_weight, restored.adaptive) == (5.0, True)
    assert restored.initialization == "random"


@pytest.mark.parametrize(
    ("epsilon", "adaptive", "weight"),
    [
        ("8/255", False, 1000.0),
        ("10/255", False, 5000.0),
        ("20/255", False, 5000.0),
        ("22/255", False, 10000.0),
        ("22/255", True, 4000.0),
    ],
)
def test_recommended_weights(epsilon, adaptive, weight):
    objective = objectives.get("elle", he.ThreatModel("linf", epsilon), adaptive=adaptive)
    assert (objective.penalty_weight, objective.initialization) == (weight, "zero")


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ELLE(None), ValueError, "expected a ThreatModel; received None"),
        (lambda: ELLE(THREAT, -1.0), ValueError, "expected .* received penalty_weight=-1.0"),
        (lambda: ELLE(THREAT, 1.0, 1), TypeError, "received adaptive=1"),
        (
            lambda: ELLE(he.ThreatModel("l1", 0.5), adaptive=True),
            ValueError,
            "expected penalty_weight=.*received norm='l1'",
        ),
    ],
)
def test_wrong_arguments_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()
