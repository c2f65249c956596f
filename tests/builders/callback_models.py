"""A model of a few weights and data for it, for the tests of callbacks."""

import keras
import numpy as np

import he_keras as he

IMAGES = np.linspace(0.0, 1.0, 48, dtype="float32").reshape(12, 4)
LABELS = np.arange(12) % 3


def make_model(objective=None, units=5, dropout=0.0, head=None):
    """Builds the same weights each time; steps eagerly, which is faster for a few batches."""
    keras.utils.set_random_seed(3)
    layers = [keras.Input((4,)), keras.layers.Dense(units, "relu"), keras.layers.Dropout(dropout)]
    model = he.HEAdversarialModel(
        keras.Sequential(layers), head or he.CosineHead(3), objective, evaluation_attack=None
    )
    model.compile(optimizer=he.optimizers.SGD(0.1), run_eagerly=True)
    return model
