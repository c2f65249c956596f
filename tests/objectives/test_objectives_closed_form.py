"""Weights after `fit` on a linear model against closed forms in NumPy, for objective x head.

The network is Flatten, so that every gradient is a few lines by hand (`numpy_training.py`). Two
steps are made, the second with a short batch.
"""

import keras
import numpy as np
import numpy_training as closed_form
import pytest
import tensorflow as tf
from closed_form_objectives import HEADS, OBJECTIVES, VARIANTS, build, examples
from numpy_training import BATCH_SIZE, EPSILON, LEARNING_RATE

import he_keras as he
from he_keras import objectives

GRID = [(objective, head) for objective in OBJECTIVES for head in HEADS]
GRID += [(objective, "he") for objective in VARIANTS] + [("alp l2 scaled", "m-he")]


@pytest.mark.parametrize(("objective_name", "head_name"), GRID)
def test_weights_after_fit_match_the_closed_form(objective_name, head_name):
    model, expected = build(objective_name, head_name)
    x, y = examples()
    # One head in graph mode, the others eagerly, which is faster for two steps.
    eager = head_name != "he" or objective_name in VARIANTS
    model.compile(optimizer=keras.optimizers.SGD(LEARNING_RATE), run_eagerly=eager)
    history = model.fit(x, y, batch_size=BATCH_SIZE, shuffle=False, verbose=0)
    flat = x.reshape(len(x), -1).astype(np.float64)
    rows = [slice(0, 4), slice(4, 6)]
    losses = [expected.step(flat[each], y[each], step) for step, each in enumerate(rows)]
    before = build(objective_name, head_name)[0].head.get_weights()
    for weight, desired, start in zip(
        model.head.get_weights(), expected.head.weights, before, strict=True
    ):
        np.testing.assert_allclose(weight, desired, rtol=1e-5, atol=1e-6)
        # The change itself, which is what an optimizer step is about.
        np.testing.assert_allclose(weight - start, desired - start, rtol=1e-3, atol=1e-5)
        assert np.abs(weight - start).max() > 0.01
    np.testing.assert_allclose(history.history["loss"][0], np.concatenate(losses).mean(), rtol=1e-5)


@pytest.mark.parametrize(("objective_name", "head_name"), GRID)
def test_crafted_examples_match_the_closed_form(objective_name, head_name):
    model, expected = build(objective_name, head_name)
    x, y = (part[:BATCH_SIZE] for part in examples())
    x_adv = model.objective.craft(
        model, tf.constant(x), tf.constant(y), (closed_form.SEED, 0)
    ).numpy()
    desired = expected.craft(x.reshape(BATCH_SIZE, -1).astype(np.float64), y, 0)
    np.testing.assert_allclose(x_adv.reshape(BATCH_SIZE, -1), desired, atol=1e-6)
    assert objective_name in ("standard", "free-at") or np.abs(x_adv - x).max() > 0.03


def test_the_box_and_the_ball_are_active():
    """Guards the closed forms above: without these, projections could be missing unnoticed."""
    model, _ = build("pgd-at", "he")
    x, y = examples()
    x_adv = model.objective.craft(model, tf.constant(x), tf.constant(y)).numpy()
    assert np.isclose(np.abs(x_adv - x), EPSILON, atol=1e-6).sum() > 10
    assert ((x_adv == 0.0) & (x == 0.0)).any() or ((x_adv == 1.0) & (x == 1.0)).any()


@pytest.mark.parametrize("objective_name", ["pgd-at", "free-at"])
def test_sample_weights_enter_the_step_as_in_keras(objective_name):
    """`sum(w * loss) / n`, as Keras's own losses: a weight of 2 doubles an example's share."""
    model, expected = build(objective_name, "he")
    x, y = (part[:BATCH_SIZE] for part in examples())
    sample_weight = np.array([0.0, 1.0, 2.0, 0.5])
    model.compile(optimizer=keras.optimizers.SGD(LEARNING_RATE), run_eagerly=True)
    history = model.fit(x, y, sample_weight=sample_weight, shuffle=False, verbose=0)
    plain_terms = expected.terms

    def weighted_terms(x, labels, x_adv):
        losses, parts = plain_terms(x, labels, x_adv)
        return sample_weight * losses, [(z, sample_weight[:, None] * each) for z, each in parts]

    expected.terms = weighted_terms
    losses = expected.step(x.reshape(BATCH_SIZE, -1).astype(np.float64), y, 0)
    np.testing.assert_allclose(model.head.get_weights()[0], expected.head.weights[0], rtol=1e-5)
    np.testing.assert_allclose(history.history["loss"][0], losses.mean(), rtol=1e-5)


class Helpful(he.attacks.Attack):
    """Moves every image towards the first class."""

    def run(self, victim, images, labels, seeds):
        passes = tf.zeros_like(labels)
        return he.attacks.Crafted(images + 0.1 * tf.constant([1.0, -1.0]), passes, passes)


def test_an_attack_cannot_make_a_mistake_robust():
    """Robust accuracy counts examples that are right both on the clean and the attacked image."""
    threat = he.ThreatModel("linf", 0.1)
    network = keras.Sequential([keras.Input((2,)), keras.layers.Identity()])
    head = keras.layers.Dense(2, kernel_initializer="identity")
    model = he.HEAdversarialModel(network, head, objectives.Standard(threat), Helpful(threat))
    model.compile("sgd", run_eagerly=True)
    images = np.array([[0.5, 0.45], [0.45, 0.5], [0.3, 0.6], [0.6, 0.3]], "float32")
    result = model.evaluate(images, np.zeros(4, int), verbose=0, return_dict=True)
    assert (result["accuracy"], result["robust_accuracy"]) == (0.5, 0.5)
