"""What an objective of one's own forgets is said in one sentence."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from own_names import forget

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


def pass_of(answer):
    return forward_that_returns(
        lambda losses, logits: objectives.TrainingPass(*answer(losses, logits))
    )


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
        (
            craft_that_returns(lambda images: images[:1]),
            "too few or too many images; expected one for each image; received numbers in [1, 6]",
        ),
        (craft_that_returns(lambda images: images * np.nan), "expected finite numbers"),
        (pass_of(lambda losses, logits: (losses[:1], logits)), "many losses; expected one for"),
        (pass_of(lambda losses, logits: (losses, logits[:1])), "many logits; expected one for"),
        (pass_of(lambda losses, logits: (tf.argmax(logits, 1), logits)), "received dtype int64"),
    ],
)
def test_a_forgotten_field_of_the_result_is_one_sentence(methods, part):
    with pytest.raises(ValueError, match=r"^Mine\.(craft|forward) [^\n]*$") as error:
        fit(**methods)
    assert part in str(error.value)


def test_losses_that_train_nothing_are_told():
    no_gradient = pass_of(lambda losses, logits: (tf.stop_gradient(losses), logits))
    with pytest.raises(ValueError, match="The losses of Mine.forward train nothing; expected"):
        fit(**no_gradient)


@pytest.mark.parametrize(
    ("part", "wanted"),
    [
        (lambda threat: None, "expected a subclass of Objective, or .*; received NoneType"),
        (lambda: None, r"expected <lambda>\(threat\); received <lambda>\(\)"),
        (
            type("Mine", (objectives.Objective,), {"__init__": lambda self: None}),
            r"expected Mine.__init__\(self, threat\); received",
        ),
        (
            type("Mine", (objectives.Objective,), {"__init__": lambda self, threat: None}),
            r"The class Mine is not set up; expected super\(\).__init__\(threat, ...\)",
        ),
    ],
)
def test_what_is_no_objective_is_told_when_it_is_built(request, part, wanted):
    request.addfinalizer(lambda: forget("mine"))
    objectives.register("mine")(part)
    with pytest.raises(TypeError, match=wanted):
        objectives.get("mine", he.ThreatModel())


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
