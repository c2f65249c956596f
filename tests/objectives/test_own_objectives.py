"""What an objective of one's own forgets is said in one sentence."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import he_keras as he
from he_keras import objectives

IMAGES = np.random.RandomState(0).rand(6, 3).astype("float32")
LABELS = np.arange(6) % 3


def fit(**methods):
    objective = type("Mine", (objectives.Objective,), methods)(he.ThreatModel("linf", 0.1))
    network = keras.Sequential([keras.Input((3,)), keras.layers.Rescaling(1.0)])
    model = he.HEAdversarialModel(network, he.CosineHead(3), objective, evaluation_attack=None)
    model.compile("sgd")
    model.fit(IMAGES, LABELS, verbose=0)


def forward_that_returns(answer):
    def forward(self, model, images, labels, x_adv, training=True):
        logits = model(x_adv, training=training)
        return answer(self.cross_entropy(model, logits, labels), logits)

    return {"forward": forward}


def craft_that_returns(answer):
    return {"craft": lambda self, model, images, labels, seed: answer(images)}


@pytest.mark.parametrize(
    ("methods", "part"),
    [
        (
            forward_that_returns(lambda losses, logits: objectives.TrainingPass(losses)),
            "expected logits of shape (n, classes); received None",
        ),
        (
            forward_that_returns(
                lambda losses, logits: objectives.TrainingPass(tf.reduce_mean(losses), logits)
            ),
            "expected losses of shape (n,), a number for each image; received shape ()",
        ),
        (forward_that_returns(lambda losses, logits: (losses, logits)), "received tuple"),
        (forward_that_returns(lambda losses, logits: None), "expected objectives.TrainingPass("),
        (
            craft_that_returns(lambda images: None),
            "expected a tensor of shape (None, 3); received No",
        ),
        (craft_that_returns(lambda images: images[:, :2]), "received shape (None, 2)"),
    ],
)
def test_a_forgotten_field_of_the_result_is_one_sentence(methods, part):
    with pytest.raises(ValueError, match=r"^Mine\.(craft|forward) [^\n]*$") as error:
        fit(**methods)
    assert part in str(error.value)


def test_other_arguments_are_told_before_anything_is_built():
    with pytest.raises(TypeError, match=r"expected Mine.craft\(model, images, labels, seed\)"):
        fit(craft=lambda self, model, images, labels: images)
    with pytest.raises(TypeError, match=r"expected Mine.forward\(model, images, labels, x_adv, "):
        fit(forward=lambda self, model, images, labels: None)


def test_an_argument_that_is_not_kept_is_told_before_training():
    def forgets(self, threat, beta=1.0):
        objectives.Objective.__init__(self, threat)

    with pytest.raises(TypeError, match="Mine forgets an argument; .* self.beta = beta; received"):
        fit(__init__=forgets)


def test_options_are_checked_by_name():
    with pytest.raises(ValueError, match="Unknown option of objective 'trades'.*mean 'beta'?"):
        objectives.get("trades", he.ThreatModel(), betta=6.0)
