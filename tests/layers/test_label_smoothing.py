"""Label smoothing: its loss, and every objective with it against closed forms in NumPy."""

import keras
import numpy as np
import numpy_training as closed_form
import pytest
import tensorflow as tf
from closed_form_objectives import HEADS, OBJECTIVES, THREAT, build, examples
from numpy_training import BATCH_SIZE, CLASSES, LEARNING_RATE

import he_keras as he
from he_keras import objectives

SMOOTHING = 0.3
GRID = [(name, "linear") for name in OBJECTIVES] + [("pgd-at", "he"), ("trades", "m-he")]


def smoothed(logits, labels):
    """Losses, and their gradient by the logits, from the target distribution itself."""
    log_p = closed_form.log_softmax(logits)
    target = np.full((len(labels), CLASSES), SMOOTHING / (CLASSES - 1))
    target[np.arange(len(labels)), labels] = 1.0 - SMOOTHING
    return -np.sum(target * log_p, axis=1), np.exp(log_p) - target


def test_loss_and_gradient_match_the_target_distribution():
    logits = np.random.default_rng(0).normal(0.0, 3.0, (5, CLASSES))
    labels = np.array([0, 1, 2, 3, 1])
    tensor = tf.constant(logits)
    with tf.GradientTape() as tape:
        tape.watch(tensor)
        losses = he.losses.smoothed_cross_entropy(tensor, tf.constant(labels), SMOOTHING)
    expected, residual = smoothed(logits, labels)
    np.testing.assert_allclose(losses, expected, rtol=1e-12)
    np.testing.assert_allclose(tape.gradient(losses, tensor), residual, atol=1e-12)
    # Keras spreads the same mass over all classes, the true one included.
    one_hot = tf.one_hot(labels, CLASSES, dtype=tf.float64)
    rate = SMOOTHING * CLASSES / (CLASSES - 1)
    theirs = keras.losses.CategoricalCrossentropy(True, label_smoothing=rate, reduction=None)
    np.testing.assert_allclose(losses, theirs(one_hot, tensor), rtol=1e-5)


@pytest.mark.parametrize(("objective_name", "head_name"), GRID)
def test_weights_after_fit_match_the_closed_form(objective_name, head_name):
    plain, expected = build(objective_name, head_name)
    objective = type(plain.objective).from_config(
        {**plain.objective.get_config(), "label_smoothing": SMOOTHING}
    )
    assert objective.get_config()["label_smoothing"] == SMOOTHING
    model = he.HEAdversarialModel(plain.network, plain.head, objective, None, closed_form.SEED)
    before = model.get_weights()

    def margin_cross_entropy(x, labels):
        return smoothed(expected.head.with_margin(expected.head.logits(x), labels), labels)

    expected.margin_cross_entropy = margin_cross_entropy
    x, y = (part[:BATCH_SIZE] for part in examples())
    model.compile(optimizer=keras.optimizers.SGD(LEARNING_RATE), run_eagerly=True)
    model.fit(x, y, batch_size=BATCH_SIZE, shuffle=False, verbose=0)
    expected.step(x.reshape(BATCH_SIZE, -1).astype(np.float64), y, 0)
    for weight, desired, start in zip(
        model.head.get_weights(), expected.head.weights, before, strict=True
    ):
        np.testing.assert_allclose(weight - start, desired - start, rtol=1e-3, atol=1e-5)


def test_mart_smooths_the_first_logarithm_only():
    model, _ = build("pgd-at", "he")
    x, y = (part[:BATCH_SIZE] for part in examples())
    with_smoothing, without = (
        objectives.MART(THREAT, label_smoothing=rate).loss(model, x, y, x, training=False).numpy()
        for rate in (SMOOTHING, 0.0)
    )
    logits = model.head.with_margin(model(x), y).numpy().astype(np.float64)
    change = smoothed(logits, y)[0] - closed_form.cross_entropy(logits, y)[0]
    np.testing.assert_allclose(with_smoothing - without, change, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", objectives.names())
def test_every_objective_takes_it(name):
    assert objectives.get(name, THREAT).label_smoothing == 0.0
    assert objectives.get(name, THREAT, label_smoothing=0.1).label_smoothing == 0.1


@pytest.mark.parametrize("head", HEADS)
def test_the_adversary_does_not_see_it(head):
    model, _ = build("pgd-at", head)
    x, y = (tf.constant(part[:BATCH_SIZE]) for part in examples())
    crafted = [
        objectives.PGDAT(THREAT, 3, label_smoothing=rate).craft(model, x, y).numpy()
        for rate in (0.0, SMOOTHING)
    ]
    np.testing.assert_array_equal(*crafted)


@pytest.mark.parametrize("rate", [-0.1, 1.0, "0.1", float("nan")])
def test_wrong_rates_are_refused(rate):
    with pytest.raises(ValueError, match="expected .* received label_smoothing="):
        objectives.PGDAT(THREAT, label_smoothing=rate)
