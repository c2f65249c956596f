"""Weights after `fit` on a linear model against closed forms in NumPy, for objective x head.

The network is Flatten, so that every gradient is a few lines by hand (`numpy_training.py`). Two
steps are made, the second with a short batch.
"""

import keras
import numpy as np
import numpy_training as closed_form
import pytest
import tensorflow as tf
from numpy_training import BATCH_SIZE, CLASSES, EPSILON, LEARNING_RATE, NUM_STEPS, STEP_SIZE

import he_keras as he
from he_keras import objectives

THREAT = he.ThreatModel("linf", EPSILON)
HEADS = {
    "linear": (closed_form.LinearHead, lambda: keras.layers.Dense(CLASSES)),
    "he": (closed_form.CosineHead, lambda: he.CosineHead(CLASSES, scale=5.0, margin=0.2)),
    "m-he": (
        closed_form.ArcHead,
        lambda: he.CosineHead(CLASSES, scale=5.0, margin=0.1, angle="arc"),
    ),
}


def iterated(build, **options):
    return build(THREAT, num_steps=NUM_STEPS, step_size=STEP_SIZE, **options)


OBJECTIVES = {
    "standard": (closed_form.Standard, objectives.Standard),
    "pgd-at": (closed_form.PGDAT, lambda: iterated(objectives.PGDAT, random_start=False)),
    "alp": (closed_form.ALP, lambda: iterated(objectives.ALP, random_start=False, beta=0.7)),
    "trades": (closed_form.TRADES, lambda: iterated(objectives.TRADES)),
    "free-at": (closed_form.FreeAT, lambda: objectives.FreeAT(THREAT, num_replays=3)),
    "fast-at": (closed_form.FastATRandom, lambda: objectives.FastAT(THREAT)),
    "fast-at zero": (
        closed_form.FastATZero,
        lambda: objectives.FastAT(THREAT, initialization="zero"),
    ),
    "fast-at previous": (
        closed_form.FastATPrevious,
        lambda: objectives.FastAT(THREAT, initialization="previous"),
    ),
}
VARIANTS = {
    "pgd-at gaussian": (closed_form.PGDATGaussian, lambda: iterated(objectives.PGDAT)),
    "pgd-at l2": (
        closed_form.PGDATEuclidean,
        lambda: objectives.PGDAT(
            he.ThreatModel("l2", EPSILON), NUM_STEPS, STEP_SIZE, random_start=False
        ),
    ),
    "alp squared-l2": (
        closed_form.ALPSquared,
        lambda: iterated(
            objectives.ALP, random_start=False, beta=0.7, clean_weight=0.25, pairing="squared-l2"
        ),
    ),
    "alp l2 scaled": (
        closed_form.ALPEuclidean,
        lambda: iterated(
            objectives.ALP, random_start=False, beta=0.7, pairing="l2", pair_scaled=True
        ),
    ),
    "trades cross-entropy": (
        closed_form.TRADESCrossEntropy,
        lambda: iterated(objectives.TRADES, beta=2.0, divergence="cross-entropy"),
    ),
}
GRID = [(objective, head) for objective in OBJECTIVES for head in HEADS]
GRID += [(objective, "he") for objective in VARIANTS] + [("alp l2 scaled", "m-he")]


def examples():
    """Two batches, of 4 and of 2; some pixels are saturated, so that the box matters."""
    generator = np.random.default_rng(5)
    x = generator.uniform(0.15, 0.85, (6, *closed_form.SHAPE)).astype(np.float32)
    x[0, 0, 0], x[1, 1, 2], x[4, 0, 1] = 0.0, 1.0, 1.0
    return x, np.array([0, 1, 2, 3, 1, 2])


def build(objective_name, head_name):
    """A Keras model and its NumPy twin with the same weights."""
    numpy_head, make_head = HEADS[head_name]
    trainer, make_objective = {**OBJECTIVES, **VARIANTS}[objective_name]
    network = keras.Sequential([keras.Input(closed_form.SHAPE), keras.layers.Flatten()])
    model = he.HEAdversarialModel(
        network, make_head(), make_objective(), None, seed=closed_form.SEED
    )
    generator = np.random.default_rng(11)
    weights = [generator.normal(0.0, 1.0, variable.shape) for variable in model.trainable_variables]
    model.head.set_weights(weights)
    weights = [weight.astype(np.float64) for weight in model.head.get_weights()]
    return model, trainer(numpy_head(weights))


@pytest.mark.parametrize(("objective_name", "head_name"), GRID)
def test_weights_after_fit_match_the_closed_form(objective_name, head_name):
    model, expected = build(objective_name, head_name)
    x, y = examples()
    # One head in graph mode, the others eagerly, which is faster for two steps.
    eager = head_name != "he"
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
