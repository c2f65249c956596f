"""MART against closed forms in NumPy on a linear model, its loss, configuration and saving."""

import json

import keras
import numpy as np
import numpy_training as closed_form
import pytest
import tensorflow as tf
from closed_form_objectives import HEADS, THREAT, examples
from numpy_training import BATCH_SIZE, CLASSES, NUM_STEPS, SEED, STEP_SIZE
from numpy_twins import as_rows, build_twins, check_fit
from small_objectives import CallCounter, build_model, moving_statistics, train_one_step
from small_objectives import examples as small_examples

import he_keras as he
from he_keras.objectives import PGDAT, registry
from he_keras.objectives.mart import MART, margin_term


def numpy_boosted(logits, labels):
    """Losses, and their gradient by the logits."""
    losses, residual = closed_form.cross_entropy(logits, labels)
    rows = np.arange(len(labels))
    p = np.exp(closed_form.log_softmax(logits))
    wrong = p.copy()
    wrong[rows, labels] = -1.0
    strongest = wrong.argmax(axis=1)
    p_k = p[rows, strongest]
    slope = (p_k / (1.0001 - p_k))[:, None]
    return losses - np.log(1.0001 - p_k), residual + slope * (np.eye(p.shape[1])[strongest] - p)


class NumpyMART(closed_form.PGDATGaussian):
    beta = 6.0

    def terms(self, x, labels, x_adv):
        clean, adversarial = self.head.logits(x), self.head.logits(x_adv)
        boosted, by_boosted = numpy_boosted(self.head.with_margin(adversarial, labels), labels)
        kl, by_clean, by_adversarial = closed_form.kl_divergence(clean, adversarial)
        q = np.exp(closed_form.log_softmax(clean))
        q_y = q[np.arange(len(labels)), labels]
        weight = (1.0 - q_y)[:, None]
        by_weight = -q_y[:, None] * (np.eye(CLASSES)[labels] - q)
        return boosted + self.beta * weight[:, 0] * kl, [
            (x, self.beta * (weight * by_clean + kl[:, None] * by_weight)),
            (x_adv, by_boosted + self.beta * weight * by_adversarial),
        ]


class NumpySmallBeta(NumpyMART):
    beta = 0.5


def mart(**options):
    return MART(THREAT, num_steps=NUM_STEPS, step_size=STEP_SIZE, **options)


VARIANTS = {"default": (NumpyMART, mart), "small beta": (NumpySmallBeta, lambda: mart(beta=0.5))}
GRID = [("default", head) for head in HEADS] + [("small beta", "he")]


def build(variant, head_name):
    """A Keras model and its NumPy twin with the same weights."""
    trainer, make_objective = VARIANTS[variant]
    return build_twins(trainer, make_objective(), head_name)


@pytest.mark.parametrize(("variant", "head"), GRID)
def test_weights_after_fit_match_the_closed_form(variant, head):
    model, expected = build(variant, head)
    history = check_fit(model, expected, head == "he")
    assert "clean_accuracy" in history


@pytest.mark.parametrize("head", HEADS)
def test_the_adversary_is_that_of_pgd_at(head):
    model, expected = build("default", head)
    x, y = (part[:BATCH_SIZE] for part in examples())
    x_adv = model.objective.craft(model, tf.constant(x), tf.constant(y), (SEED, 0)).numpy()
    np.testing.assert_allclose(as_rows(x_adv), expected.craft(as_rows(x), y, 0), atol=1e-6)
    theirs = PGDAT(THREAT, NUM_STEPS, STEP_SIZE)
    pgd = theirs.craft(model, tf.constant(x), tf.constant(y), (SEED, 0)).numpy()
    np.testing.assert_array_equal(x_adv, pgd)


def test_boosted_cross_entropy_matches_float64_where_predictions_saturate():
    logits = np.array(
        [
            [2.0, 1.0, -1.0, 0.5],  # right
            [1.0, 2.0, -1.0, 0.5],  # wrong
            [0.0, 9.5, 0.0, 0.0],  # wrong, with a complement of the order of the constant
            [0.0, 0.0, 0.0, 12.0],  # wrong, beyond the constant
            [30.0, 0.0, 1.0, 0.0],  # right beyond doubt
            [-500.0, 500.0, 0.0, 0.0],
        ]
    )
    labels = np.zeros(6, int)
    tensor = tf.constant(logits, tf.float32)
    with tf.GradientTape() as tape:
        tape.watch(tensor)
        losses = he.losses.cross_entropy(tensor, labels) + margin_term(tensor, labels)
    expected, slope = numpy_boosted(logits, labels)
    np.testing.assert_allclose(losses, expected, rtol=1e-6, atol=2e-7)
    np.testing.assert_allclose(tape.gradient(losses, tensor), slope, rtol=1e-5, atol=1e-7)


def test_boosted_cross_entropy_of_two_classes():
    """The complement of the only wrong class is the true one: both logarithms nearly agree."""
    logits = tf.constant([[1.0, -1.0], [-1.0, 1.0]])
    p = 1.0 / (1.0 + np.exp([-2.0, 2.0]))
    labels = tf.constant([0, 0])
    losses = (he.losses.cross_entropy(logits, labels) + margin_term(logits, labels)).numpy()
    np.testing.assert_allclose(losses, -np.log(p) - np.log(p + 1e-4), rtol=1e-5)


def test_divergence_counts_by_how_wrong_the_clean_prediction_is():
    """The weight is `1 - q_y`: zero where the clean prediction is right beyond doubt."""
    model, _ = build("default", "linear")
    x, y = (part[:BATCH_SIZE] for part in examples())
    x_adv = np.clip(x + 0.1, 0.0, 1.0)
    with_divergence, without = (
        mart(beta=beta).loss(model, x, y, x_adv, training=False).numpy() for beta in (2.0, 0.0)
    )
    q, p = (np.exp(closed_form.log_softmax(model(each).numpy())) for each in (x, x_adv))
    kl = np.sum(q * np.log(q / p), axis=1)
    weight = 1.0 - q[np.arange(BATCH_SIZE), y]
    np.testing.assert_allclose(with_divergence - without, 2.0 * weight * kl, rtol=1e-3, atol=1e-6)
    assert weight.max() - weight.min() > 0.3
    model.head.set_weights([np.zeros((6, CLASSES)), np.array([60.0, 0.0, 0.0, 0.0])])
    zeros = np.zeros(BATCH_SIZE, int)
    certain, plain = (
        mart(beta=beta).loss(model, x, zeros, x_adv, training=False) for beta in (2.0, 0.0)
    )
    np.testing.assert_array_equal(certain, plain)


def test_the_margin_enters_both_logarithms_and_not_the_divergence():
    model = build_model(mart(), he.CosineHead(4, scale=5.0, margin=0.3), batch_norm=False)
    images, labels = small_examples()
    losses = model.objective.loss(model, images, labels, images, training=False).numpy()
    shifted = model(images).numpy().astype(np.float64) - 1.5 * np.eye(4)[labels]
    # Clean and adversarial images are the same: the divergence is zero, with margin it is not.
    np.testing.assert_allclose(losses, numpy_boosted(shifted, labels)[0], rtol=1e-5)


def test_passes_and_batch_norm_statistics():
    images, labels = small_examples()
    counter = CallCounter()
    model, twin = build_model(mart(), counter=counter), build_model(mart())
    twin.set_weights(model.get_weights())
    x_adv = twin.objective.craft(twin, tf.constant(images), tf.constant(labels)).numpy()
    expected = np.stack([np.zeros(9), np.ones(9)])
    for batch in (images, x_adv):
        rows = as_rows(batch)
        expected = 0.9 * expected + 0.1 * np.stack([rows.mean(axis=0), rows.var(axis=0)])
    counter.flags.clear()
    train_one_step(model, images, labels, run_eagerly=True)
    assert counter.flags == [False] * NUM_STEPS + [True, True]
    np.testing.assert_allclose(moving_statistics(model), expected, atol=2e-6)
    assert model.objective.batch_norm_passes == ("clean", "adversarial")


def test_configuration_is_plain_data_and_comes_back():
    objective = MART(he.ThreatModel("l2", 0.5), beta=3, num_steps=4, random_start=False)
    stored = json.loads(json.dumps(keras.saving.serialize_keras_object(objective)))
    restored = keras.saving.deserialize_keras_object(stored)
    assert restored.threat == objective.threat
    attack = restored.attack
    assert (restored.beta, attack.num_steps, attack.random_start) == (3.0, 4, False)


def test_registered_with_the_released_settings():
    objective = registry.get("mart", he.ThreatModel("linf", 0.031))
    assert type(objective) is MART
    assert (objective.beta, objective.attack.num_steps) == (6.0, 10)
    assert objective.attack.step_size == pytest.approx(0.007)
    assert (objective.attack.loss, objective.attack.random_start) == ("ce", "gaussian")


@pytest.mark.parametrize(
    ("build_objective", "error", "message"),
    [
        (lambda: MART(None), ValueError, "expected a ThreatModel; received None"),
        (lambda: MART(0.03), TypeError, "expected a ThreatModel; received threat=0.03"),
        (lambda: MART(THREAT, beta=-0.5), ValueError, "expected .* >= 0.0; received beta=-0.5"),
        (lambda: MART(THREAT, beta=float("nan")), ValueError, "expected .* received beta=nan"),
        (lambda: MART(THREAT, num_steps=0), ValueError, "expected .* received num_steps=0"),
    ],
)
def test_wrong_arguments_are_refused(build_objective, error, message):
    with pytest.raises(error, match=message):
        build_objective()
