"""RAT and AWP around other objectives: the base's spellings, configuration, saving, schedules."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from closed_form_objectives import THREAT
from ml_collections import ConfigDict
from small_objectives import build_model
from small_objectives import examples as small_examples

import he_keras as he
from he_keras import objectives
from he_keras.objectives import registry
from he_keras.objectives.awp import AWP
from he_keras.objectives.rat import RAT
from he_keras.objectives.variable_overrides import VariableOverrides

WRAPPERS = {"rat": RAT, "awp": AWP}


@pytest.mark.parametrize("name", WRAPPERS)
def test_registered_and_buildable_from_a_threat_model_alone(name):
    built = registry.get(name, THREAT)
    assert type(built) is WRAPPERS[name]
    assert built.threat == THREAT
    assert registry.get(name, THREAT, label_smoothing=0.1).label_smoothing == 0.1


SPELLINGS = {
    "objective": lambda: AWP(base=objectives.TRADES(THREAT, beta=2.0, num_steps=7)),
    "name": lambda: AWP(THREAT, "trades", beta=2.0, num_steps=7),
    "dictionary": lambda: AWP(THREAT, {"name": "trades", "beta": 2.0}, num_steps=7),
    "config": lambda: AWP(
        THREAT, ConfigDict({"name": "trades", "beta": 2.0, "num_steps": 7}), step_size="0.007/0.31"
    ),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings_of_the_base(spelling):
    base = SPELLINGS[spelling]().base
    assert type(base) is objectives.TRADES
    assert (base.beta, base.attack.num_steps, base.threat) == (2.0, 7, THREAT)
    assert base.attack.step_size == pytest.approx(0.1 * 0.007 / 0.031)


def test_arguments_reach_the_innermost_base():
    built = AWP(THREAT, {"name": "rat", "base": "trades", "alpha": 0.3}, num_steps=4, gamma=0.01)
    assert (built.gamma, built.base.alpha, built.base.base.attack.num_steps) == (0.01, 0.3, 4)


@pytest.mark.parametrize("wrapper", WRAPPERS.values())
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"base": 3}, TypeError, r'the key "name"; received base=3'),
        ({"base": {"beta": 6.0}}, TypeError, "received base=.'beta': 6.0"),
        ({"base": "trade"}, ValueError, "Unknown objective.*received 'trade'"),
        ({"base": "trades", "bta": 6.0}, ValueError, "received bta"),
        ({"base": objectives.PGDAT(THREAT), "num_steps": 3}, TypeError, "received num_steps"),
        (
            {"base": objectives.PGDAT(THREAT), "threat": he.ThreatModel("l2", 1.0)},
            ValueError,
            "Two threat models",
        ),
        ({"base": "trades", "threat": 0.03}, TypeError, "received threat=0.03"),
    ],
)
def test_bad_bases_are_refused(wrapper, arguments, error, message):
    with pytest.raises(error, match=message):
        wrapper(**{"threat": None if "base" in arguments else THREAT, **arguments})


NESTED = {
    "rat": lambda: RAT(
        base=objectives.TRADES(he.ThreatModel("l2", 0.5), beta=2.0, label_smoothing=0.1),
        mode="symmetric",
        alpha=0.3,
        second_order_ratio=0.4,
        label_share=0.7,
        weight_noise=0.01,
        repeat_passes=True,
    ),
    "awp": lambda: AWP(THREAT, "mart", beta=3.0, gamma=0.01, warm_up_steps=4),
    "awp of rat": lambda: AWP(base=NESTED["rat"](), gamma=0.02),
}


@pytest.mark.parametrize("name", NESTED)
def test_configuration_is_plain_data_and_comes_back(name):
    objective = NESTED[name]()
    stored = json.loads(json.dumps(keras.saving.serialize_keras_object(objective)))
    restored = keras.saving.deserialize_keras_object(stored)
    assert type(restored) is type(objective)
    assert restored.get_config() == objective.get_config()
    for attribute in ("batch_norm_passes", "threat", "label_smoothing", "supports_jit"):
        assert getattr(restored, attribute) == getattr(objective, attribute)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["awp of rat", *WRAPPERS])
def test_a_saved_model_trains_on_as_if_never_saved(name, tmp_path):
    images, labels = small_examples()
    model = build_model(NESTED[name]())
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), run_eagerly=True)
    model.fit(images, labels, batch_size=3, shuffle=False, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = he.load_model(tmp_path / "model.keras")
    assert loaded.objective.get_config() == model.objective.get_config()
    for each in (model, loaded):
        each.fit(images, labels, batch_size=3, shuffle=False, verbose=0)
    for weight, desired in zip(loaded.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, desired)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rat", "awp"])
def test_a_resumed_run_goes_on_exactly(name, tmp_path):
    images, labels = small_examples()

    def trained(epochs, restore):
        model = build_model(NESTED[name]())
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9))
        resume = he.callbacks.ExactResume(tmp_path / "latest.npz")
        start = resume.restore(model)[0] if restore else 0
        model.fit(images, labels, 3, epochs, 0, [resume], initial_epoch=start, shuffle=False)
        return model.get_weights()

    whole = trained(3, restore=False)
    (tmp_path / "latest.npz").unlink()
    trained(1, restore=False)
    for weight, desired in zip(trained(3, restore=True), whole, strict=True):
        np.testing.assert_array_equal(weight, desired)


def test_a_schedule_of_the_base_is_passed_on():
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([10], [0.02, 0.1])
    objective = AWP(
        THREAT, {"name": "rat", "base": "trades"}, epsilon_schedule=schedule, warm_up_steps=5
    )
    assert objective.base.base.epsilon_schedule is schedule
    steps = [tf.constant(3), tf.constant(12)]
    radii = [float(objective.sizes_at(step).threat.epsilon) for step in steps]
    assert radii == pytest.approx([0.02, 0.1])
    assert [float(objective.gamma_at(step)) for step in steps] == pytest.approx([0.0, 0.005])
    assert objective.threat == THREAT and objective.gamma == 0.005
    assert not RAT(THREAT).follows_schedules
    model = build_model(objective)
    images, labels = map(tf.constant, small_examples())
    for step, radius in zip(steps, radii, strict=True):
        x_adv = objective.craft(model, images, labels, step_number=step)
        assert np.abs(x_adv - images).max() == pytest.approx(radius, abs=1e-6)


def test_what_the_base_says_of_its_step_holds_for_the_wrapper():
    class NotForXLA(objectives.TRADES):
        supports_jit = False

    assert AWP(THREAT, "trades").batch_norm_passes == ("clean", "adversarial")
    assert AWP(THREAT, "trades").supports_jit
    assert not AWP(base=NotForXLA(THREAT)).supports_jit
    assert not RAT(base=NotForXLA(THREAT)).supports_jit


class Stateful(objectives.Objective):
    shape, loaded = None, None

    def build(self, image_shape):
        self.shape = image_shape

    def logs(self):
        return {"count": 1}

    def state_arrays(self):
        return {"count": np.ones(1)}

    def load_state_arrays(self, arrays):
        self.loaded = arrays


def test_state_and_logs_of_the_base_are_kept():
    objective = RAT(base=Stateful(THREAT))
    build_model(objective)
    assert objective.base.shape == (3, 3, 1)
    assert objective.logs() == {"count": 1}
    assert list(objective.state_arrays()) == ["count"]
    objective.load_state_arrays({"count": 3})
    assert objective.base.loaded == {"count": 3}


def test_state_that_awp_would_change_twice_is_refused():
    with pytest.raises(ValueError, match="without training state.*received Stateful with count"):
        build_model(AWP(base=Stateful(THREAT)))


def test_variable_overrides_nest_and_keep_updates():
    layer = keras.layers.BatchNormalization(momentum=0.5)
    layer.build((None, 2))
    model = keras.Sequential([keras.Input((2,)), layer])
    batch = np.array([[2.0, 4.0], [4.0, 8.0]], "f")
    with VariableOverrides([(layer.gamma, np.full(2, 3.0, "f"))]) as outer:
        with VariableOverrides([(layer.beta, np.full(2, 10.0, "f"))]):
            both = model(batch, training=False).numpy()
        gamma_only = model(batch, training=True).numpy()
    np.testing.assert_allclose(both, 10.0 + 3.0 * batch / np.sqrt(1.001), rtol=1e-5)
    np.testing.assert_allclose(gamma_only, [[-3, -3], [3, 3]], rtol=1e-2)
    np.testing.assert_array_equal(layer.moving_mean, [0.0, 0.0])
    outer.keep_updates(model)
    np.testing.assert_allclose(layer.moving_mean, [1.5, 3.0])
    np.testing.assert_array_equal(layer.gamma, [1.0, 1.0])
