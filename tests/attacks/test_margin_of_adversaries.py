"""Which adversaries of training see the margin of a head, as docs/reference/objectives.md says."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import he_keras as he

pytestmark = pytest.mark.usefixtures("op_by_op")

SEES_THE_MARGIN = ("llr", "free_at")
NAMES = [name for name in he.objectives.names() if name != "standard"]


def crafted(name, margin):
    """What a model with this margin trains on in its second step, from fixed weights."""
    random = np.random.default_rng(0)
    images = tf.constant(random.uniform(size=(6, 4, 4, 1)), tf.float32)
    labels = tf.constant([0, 1, 2, 0, 1, 2])
    layers = [keras.Input((4, 4, 1)), keras.layers.Flatten()]
    network = keras.Sequential([*layers, keras.layers.Dense(8, activation="softplus")])
    threat = he.ThreatModel("linf", 0.1)
    # A margin alone multiplies the gradient of the cross-entropy: its direction stays.
    objective = he.objectives.get(name, threat, label_smoothing=0.5)
    head = he.CosineHead(3, scale=10.0, margin=margin)
    model = he.HEAdversarialModel(network, head, objective, evaluation_attack=None)
    for variable in model.trainable_variables:
        variable.assign(random.normal(size=variable.shape))
    model.compile(optimizer=keras.optimizers.SGD(0.0), run_eagerly=True)
    if name == "free_at":  # the perturbation of the first replay
        model.train_on_batch(images, labels)
    model.optimizer.build(model.trainable_variables)
    return np.asarray(objective.craft(model, images, labels, (3, 4)))


@pytest.mark.parametrize("name", NAMES)
def test_who_sees_the_margin(name):
    same = np.allclose(crafted(name, 0.0), crafted(name, 1.0), atol=1e-6)
    assert same == (name not in SEES_THE_MARGIN)
