"""What cannot be a classifier is refused in one sentence, before any work."""

import keras
import model_zoo
import numpy as np
import pytest
import tensorflow as tf

import he_keras as he
from he_keras.attacks.framework.victim import check_not_probabilities
from he_keras.networks.checks import feature_shape

THREAT = he.ThreatModel("linf", 0.1)
IMAGES, LABELS = model_zoo.images(8).numpy(), np.arange(8) % 3


def dense(units=3, activation=None):
    return keras.layers.Dense(units, activation=activation)


def functional(*outputs, inputs=1):
    images = [keras.Input(model_zoo.SHAPE) for _ in range(inputs)]
    x = keras.layers.Flatten()(keras.layers.Add()(images) if inputs > 1 else images[0])
    answers = [output(x) for output in outputs]
    return keras.Model(
        images if inputs > 1 else images[0], answers if len(answers) > 1 else answers[0]
    )


class TwoAnswers(keras.Model):
    """A subclassed model, whose outputs only a call shows."""

    def __init__(self):
        super().__init__()
        self.flatten, self.dense = keras.layers.Flatten(), dense()

    def call(self, images):
        logits = self.dense(self.flatten(images))
        return {"logits": logits, "certainty": tf.reduce_max(logits, axis=1)}


def is_one_sentence(error):
    text = str(error.value)
    return "; expected" in text and "received" in text and "\n" not in text


NETWORKS = {
    "two outputs": (lambda: functional(dense(), dense()), "network has several outputs"),
    "two inputs": (lambda: functional(dense(), inputs=2), "network has several inputs"),
    "softmax": (lambda: functional(dense(3, "softmax")), "network ends in probabilities"),
    "softmax layer": (
        lambda: keras.Sequential([dense(), keras.layers.Softmax()]),
        "network ends in probabilities",
    ),
    "softmax operation": (
        lambda: functional(lambda x: keras.ops.softmax(x)),
        "network ends in probabilities",
    ),
    "nested softmax": (
        lambda: keras.Sequential([functional(dense(3, "softmax"))]),
        "network ends in probabilities",
    ),
    "a feature map": (lambda: keras.layers.Conv2D(3, 3), "must end in a feature vector"),
    "two answers": (TwoAnswers, "must end in a feature vector"),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks(name):
    build, message = NETWORKS[name]
    with pytest.raises(ValueError, match=message) as error:
        he.HEAdversarialModel(build(), he.CosineHead(3)).build((None, *model_zoo.SHAPE))
    assert is_one_sentence(error)


HEADS = {
    "softmax": (lambda: dense(3, "softmax"), "'softmax'"),
    "sigmoid": (lambda: dense(3, "sigmoid"), "'sigmoid'"),
    "tanh": (lambda: dense(3, "tanh"), "'tanh'"),
    "relu": (lambda: dense(3, "relu"), "'relu'"),
    "softmax layer": (lambda: keras.Sequential([dense(), keras.layers.Softmax()]), "'softmax'"),
    "one unit": (lambda: dense(1), "one unit"),
    "one unit inside": (lambda: keras.Sequential([dense(5), dense(1)]), "one unit"),
}


@pytest.mark.parametrize("name", HEADS)
def test_heads(name):
    build, message = HEADS[name]
    with pytest.raises(ValueError, match=message) as error:
        he.HEAdversarialModel(model_zoo.NETWORKS["functional"](), build())
    assert is_one_sentence(error)


@pytest.mark.parametrize("activation", [None, "linear", "log_softmax"])
def test_heads_that_return_logits(activation):
    network = keras.Sequential([keras.Input(model_zoo.SHAPE), keras.layers.Flatten()])
    model = he.HEAdversarialModel(network, dense(3, activation))
    assert model(IMAGES).shape == (8, 3)


MODELS = {
    "two outputs": (lambda: functional(dense(), dense()), "model has several outputs"),
    "two inputs": (lambda: functional(dense(), inputs=2), "model has several inputs"),
    "two answers": (TwoAnswers, r"training=False\)\['certainty'\]|training=False\)\['logits'\]"),
    "one sigmoid": (lambda: functional(dense(1, "sigmoid")), "model has one output"),
    "one logit": (lambda: functional(dense(1)), "model has one output"),
    "softmax": (lambda: functional(dense(3, "softmax")), "returns probabilities"),
    "sigmoids": (lambda: functional(dense(3, "sigmoid")), "returns probabilities"),
}


@pytest.mark.parametrize("name", MODELS)
def test_keras_models_in_attacks_and_evaluations(name):
    build, message = MODELS[name]
    model = build()
    calls = [
        lambda: he.attacks.FGSM(THREAT)(model, IMAGES, LABELS),
        lambda: he.evaluate_robustness(model, (IMAGES, LABELS), THREAT, ["fgsm"], checks=False),
    ]
    for call in calls:
        with pytest.raises((ValueError, TypeError), match=message) as error:
            call()
        assert is_one_sentence(error)


def test_data_of_several_inputs():
    model = he.HEAdversarialModel(model_zoo.NETWORKS["functional"](), he.CosineHead(3))
    model.compile()
    pairs = (IMAGES, IMAGES)
    calls = [
        lambda: model.fit(pairs, LABELS, verbose=0),
        lambda: he.attacks.FGSM(THREAT)(model, pairs, LABELS),
        lambda: he.attacks.FGSM(THREAT)(model, {"a": IMAGES, "b": IMAGES}, LABELS),
        lambda: he.evaluate_robustness(model, (pairs, LABELS), THREAT, ["fgsm"], checks=False),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="several inputs"):
            call()
    # A list of single images is one input.
    he.attacks.FGSM(THREAT)(model, [*IMAGES], LABELS)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("classes", [2, 10, 1000])
def test_a_softmax_is_recognised_in_every_precision(dtype, classes):
    logits = np.random.default_rng(0).normal(0.0, 3.0, (8, classes))
    answer = tf.nn.softmax(tf.cast(logits, dtype))
    # Also where the model casts it afterwards.
    wider = tf.cast(answer, tf.float64 if dtype == "float64" else tf.float32).numpy()
    with pytest.raises(ValueError, match="returns probabilities"):
        check_not_probabilities(wider)
    check_not_probabilities(tf.cast(tf.cast(logits, dtype), tf.float32).numpy())
    assert dtype != "float32" or check_not_probabilities(wider + 2e-5) is None


def test_a_saturated_softmax_is_known_by_its_layer():
    """Rows such as (1, 0, nan) do not sum to 1."""
    logits = np.array([[np.nan, 0.5, 0.2]], np.float32)
    check_not_probabilities(logits, functional(dense(3)))
    with pytest.raises(ValueError, match="activation='softmax'"):
        check_not_probabilities(logits, functional(dense(3, "softmax")))


def test_the_shape_of_features_where_a_network_cannot_run_on_symbols():
    class Counting(keras.Model):
        def call(self, images):
            return tf.constant(np.asarray(images).reshape(len(images), -1))

    assert feature_shape(Counting(), (None, *model_zoo.SHAPE)) == (None, 192)
