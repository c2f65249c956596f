"""Linear models, objectives and examples whose training has a closed form."""

import keras
import numpy as np
import numpy_training as closed_form
from numpy_training import CLASSES, EPSILON, NUM_STEPS, STEP_SIZE

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
