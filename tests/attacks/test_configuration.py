"""What has an attack compiled again: settings of layers, wherever a function holds them."""

import functools
import types

import keras
import model_zoo
import numpy as np
import pytest
import tensorflow as tf

import he_keras as he
from he_keras.attacks.framework.agreement import configuration

GLOBAL = keras.layers.Dense(2)


class Scaled(keras.layers.Layer):
    """Somebody's layer, whose settings Keras knows nothing of."""

    def __init__(self):
        super().__init__()
        self.factor = 2.0
        self.mean = np.zeros(3, "float32")
        self.options = {"power": [1, 2]}
        self.function = np.tanh

    def call(self, images):
        return self.factor * images


class Holder:
    def __init__(self, layer):
        self.layer = layer

    def logits(self, images):
        return self.layer(images)

    __call__ = logits


def holders(layer):
    """Every way for a callable to hold a layer."""
    return {
        "layer": layer,
        "model": keras.Sequential([keras.Input((3,)), layer]),
        "closure": lambda images: layer(images),
        "object": Holder(layer),
        "method": Holder(layer).logits,
        "partial": functools.partial(lambda inner, images: inner(images), layer),
        "keyword": functools.partial(lambda images, inner: inner(images), inner=layer),
    }


@pytest.mark.parametrize("kind", holders(Scaled()))
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("factor", 3.0),
        ("mean", np.ones(3, "float32")),
        ("options", {"power": [1, 3]}),
        ("function", np.sin),
        ("trainable", False),
        ("own", "new"),
    ],
)
def test_a_layers_settings_count(kind, name, value):
    layer = Scaled()
    function = holders(layer)[kind]
    before = configuration(function)
    assert configuration(function) == before and hash(before) is not None
    setattr(layer, name, value)
    assert configuration(function) != before


def test_a_layer_in_a_global_variable_counts():
    def function(images):
        return GLOBAL(images)

    before = configuration(function)
    GLOBAL.activation = keras.activations.tanh
    assert configuration(function) != before


def test_what_a_model_does_changes_nothing():
    """Else every attack would be compiled again after each call, each epoch, each prediction."""
    model = model_zoo.model_of("noise")
    model.compile(optimizer=keras.optimizers.SGD(0.1))
    images, labels = model_zoo.images().numpy(), np.zeros(6, int)
    model(images)
    before = configuration(model)
    model.fit(images, labels, verbose=0)
    model.evaluate(images, labels, verbose=0)
    model.predict(images, verbose=0)
    he.attacks.FGSM(he.ThreatModel("linf", 0.1))(model, images, labels)
    model.reset_metrics()
    assert configuration(model) == before


class Guarded(keras.layers.Layer):
    """A stop in the gradient, which the logits do not show, behind a switch of four kinds."""

    def __init__(self):
        super().__init__()
        self._blocks = True
        self.options = types.SimpleNamespace(blocks=True)

    def call(self, images):
        return tf.stop_gradient(images) if self._blocks and self.options.blocks else images


class Defence:
    def __init__(self):
        self.blocks, self.log = True, []
        self.options = {"inner": types.SimpleNamespace(blocks=True)}

    def __call__(self, images):
        self.log.append(1.0)
        return self.through(images)

    def through(self, images):
        is_blocked = self.blocks and self.options["inner"].blocks
        return tf.stop_gradient(images) if is_blocked else images


BLOCKS = {"here": True}


def helper(images):
    return tf.stop_gradient(images) if BLOCKS["here"] else images


def guarded():
    """Models, each with a function that lets the gradient through."""
    private, public, flag, nested, method = Guarded(), Guarded(), Defence(), Defence(), Defence()
    BLOCKS["here"] = True
    return {
        "private attribute of a layer": (private, lambda: setattr(private, "_blocks", False)),
        "object in a layer": (public, lambda: setattr(public.options, "blocks", False)),
        "attribute": (flag, lambda: setattr(flag, "blocks", False)),
        "object in a container": (
            nested,
            lambda: setattr(nested.options["inner"], "blocks", False),
        ),
        "method": (method.through, lambda: setattr(method, "blocks", False)),
        "global behind a helper": (
            lambda images: helper(images),
            lambda: BLOCKS.update(here=False),
        ),
    }


@pytest.mark.fast_cases("private attribute of a layer", "attribute", "global behind a helper")
@pytest.mark.parametrize("kind", guarded())
def test_a_switch_that_only_gradients_show_is_followed(kind):
    """The attack used to go on with its old trace: the model stayed robust without a gradient."""
    model, open_up = guarded()[kind]
    images = np.random.default_rng(0).uniform(0.2, 0.8, (12, 4)).astype("float32")
    labels, attack = images.argmax(axis=1), he.attacks.BIM(he.ThreatModel("linf", 0.2), 3)
    traces = []

    def logits(batch):
        traces.extend([] if tf.executing_eagerly() else [batch.shape])
        return model(batch) + 0.0 * batch

    assert attack(logits, images, labels).robust_accuracy == 1.0
    first = len(traces)
    assert attack(logits, images, labels).robust_accuracy == 1.0 and len(traces) == first > 0
    open_up()
    assert attack(logits, images, labels).robust_accuracy < 0.5
