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


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("largest", [1e6, 1e39, np.inf, np.nan])
def test_logits_beyond_half_precision_are_judged_without_a_warning(largest):
    check_not_probabilities(np.array([[largest, 1.0, -largest]], np.float64))


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


class OwnLayer(keras.layers.Layer):
    """Tells nothing of what it ends in."""

    def __init__(self, units, activation=None):
        super().__init__()
        self.flatten, self.dense = keras.layers.Flatten(), dense(units)
        self.function = keras.activations.get(activation)

    def call(self, inputs):
        return self.function(self.dense(self.flatten(inputs)))


HIDDEN = {
    "network": (OwnLayer(5, "softmax"), dense(), "The network ends in probabilities"),
    "head": (OwnLayer(5), OwnLayer(3, "softmax"), "The head does not return logits"),
    "one unit": (OwnLayer(5), OwnLayer(1), "The head has one unit"),
    "a map": (OwnLayer(6), keras.layers.Reshape((2, 3)), "The head does not return logits"),
    "two answers": (OwnLayer(6), TwoAnswers(), "The head does not return logits"),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_what_no_layer_tells_is_found_by_trying(name):
    network, head, message = HIDDEN[name]
    with pytest.raises(ValueError, match=message) as error:
        model = he.HEAdversarialModel(network, head)
        model.build((None, *model_zoo.SHAPE))
        model.compile()
        model.fit(IMAGES, LABELS, verbose=0)
    assert is_one_sentence(error)


@pytest.mark.parametrize("after", [keras.layers.Identity, lambda: keras.layers.Dropout(0.5)])
def test_a_softmax_is_seen_through_layers_that_hand_it_on(after):
    network = functional(lambda x: after()(dense(3, "softmax")(x)))
    with pytest.raises(ValueError, match="network ends in probabilities"):
        he.HEAdversarialModel(network, dense())
    head = keras.Sequential([dense(3), keras.layers.Softmax(), after()])
    with pytest.raises(ValueError, match="head does not return logits"):
        he.HEAdversarialModel(model_zoo.functional(), head)


class TwoInputs(keras.Model):
    """A subclassed model, whose inputs only a call shows."""

    def call(self, inputs):
        images, more = inputs
        return images + more


def test_what_does_not_run_on_images_is_one_sentence():
    smaller = keras.Sequential([keras.Input((2, 2, 3)), keras.layers.Flatten(), dense()])
    calls = [
        lambda: he.HEAdversarialModel(TwoInputs(), dense()).build((None, *model_zoo.SHAPE)),
        lambda: he.attacks.FGSM(THREAT)(TwoInputs(), IMAGES, LABELS),
        lambda: he.attacks.FGSM(THREAT)(smaller, IMAGES, LABELS),
        lambda: he.attacks.FGSM(THREAT)(lambda images, more: images, IMAGES, LABELS),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="does not run on .*images; expected .*shape") as error:
            call()
        assert is_one_sentence(error)


def test_one_output_of_a_function_in_a_dictionary():
    """The remedy for a function must not have Keras's argument `training`."""
    given = lambda images: {"logits": tf.reshape(images, [8, -1])}  # noqa: E731
    with pytest.raises(TypeError, match=r"`lambda images: model\(images\)\['logits'\]`"):
        he.attacks.FGSM(THREAT)(given, IMAGES, LABELS)


def test_objects_that_are_no_models():
    for given, received in ((keras.Model, "a class"), (object(), "object")):
        with pytest.raises(TypeError, match=f"SavedModel.*received {received}") as error:
            he.attacks.FGSM(THREAT)(given, IMAGES, LABELS)
        assert is_one_sentence(error)
