"""What is set after the first call takes effect everywhere, or is refused."""

import keras
import model_zoo
import numpy as np
import pytest

import he_keras as he
from he_keras import objectives

THREAT = he.ThreatModel("linf", 0.05)
CHANGES = {
    "activation": lambda model: setattr(
        model.network.get_layer("conv"), "activation", keras.activations.relu
    ),
    "epsilon": lambda model: setattr(model.network.get_layer("folded"), "epsilon", 3.0),
    "scale": lambda model: setattr(model.head, "scale", 2.0),
    "angle": lambda model: setattr(model.head, "angle", "arc"),
}


def examples(count=8):
    return model_zoo.images(count).numpy(), np.arange(count) % 4


def small_model(objective):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Flatten(), keras.layers.Dense(5, "relu", name="dense")]
    network = keras.Sequential([keras.Input(model_zoo.SHAPE), *layers])
    model = he.HEAdversarialModel(network, he.CosineHead(4), objective, evaluation_attack=None)
    model.compile(optimizer=keras.optimizers.SGD(0.1))
    return model


@pytest.mark.fast_cases("scale", "activation")
@pytest.mark.parametrize("change", CHANGES)
def test_predict_and_evaluate_follow_the_layers(change):
    """They used to go on with what they had been compiled for; calls and attacks did not."""
    images, labels = examples()
    model = model_zoo.model_of("functional")
    model.evaluation_attack = None
    model.compile()
    before = model.predict(images, verbose=0)
    model.evaluate(images, labels, verbose=0)
    CHANGES[change](model)
    expected = model.plain_logits(images).numpy()
    assert np.abs(before - expected).max() > 0.01
    np.testing.assert_allclose(model.predict(images, verbose=0), expected, rtol=1e-5, atol=1e-5)
    loss = model.evaluate(images, labels, verbose=0, return_dict=True)["loss"]
    assert loss == pytest.approx(he.losses.cross_entropy(expected, labels).numpy().mean(), rel=1e-5)


def test_layers_that_are_frozen_after_the_first_fit_stay_as_they_are():
    model = small_model(objectives.Standard(THREAT))
    model.fit(*examples(), verbose=0)
    before = model.network.get_weights()
    model.network.trainable = False
    model.fit(*examples(), verbose=0)
    for weight, expected in zip(model.network.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, expected)
    model.network.trainable = True
    model.train_on_batch(*examples())
    assert np.abs(model.network.get_weights()[0] - before[0]).max() > 0


def test_training_is_compiled_once_where_nothing_changes():
    model = small_model(objectives.PGDAT(THREAT, num_steps=1))
    compiled = []
    for _ in range(2):
        model.fit(*examples(), verbose=0, validation_data=examples())
        model.predict(examples()[0], verbose=0)
        compiled.append((model.train_function, model.test_function, model.predict_function))
    assert all(one is other for one, other in zip(*compiled, strict=True))


class ScaleSetter(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.model.head.scale = 5.0 + epoch


def test_a_setting_that_changes_during_fit_is_not_passed_over():
    model = small_model(objectives.Standard(THREAT))
    with pytest.warns(RuntimeWarning, match="changed while fit.. ran; expected .*; received"):
        model.fit(*examples(), epochs=2, callbacks=[ScaleSetter()], verbose=0)


@pytest.mark.parametrize(
    ("objective", "name"),
    [
        (objectives.TRADES(THREAT, num_steps=1), "beta"),
        (objectives.PGDAT(THREAT), "num_steps"),
        (objectives.AWP(base=objectives.PGDAT(THREAT), gamma=0.1), "gamma"),
        (objectives.FreeAT(THREAT), "threat"),
    ],
)
def test_an_objective_does_not_change(objective, name):
    """The second training used to go on with the old value, and the file showed the new one."""
    before = objective.get_config()
    with pytest.raises(AttributeError, match=f"does not change.*; expected .* to {name}$"):
        setattr(objective, name, 7.0)
    assert objective.get_config() == before


def test_a_model_keeps_its_objective():
    model = small_model(objectives.Standard(THREAT))
    with pytest.raises(AttributeError, match="keeps its objective; expected a new one.*; received"):
        model.objective = objectives.PGDAT(THREAT)
