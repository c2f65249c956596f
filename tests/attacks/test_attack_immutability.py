"""An attack is what its config says: nothing about it changes after it is built."""

import copy
import pickle

import numpy as np
import pytest
import registered_attacks
import tensorflow as tf
from attack_victims import THREAT, images, labels, linear

import he_keras as he
from he_keras import attacks
from he_keras.attacks import PGD, Attack, Crafted
from he_keras.threat import with_radius


@pytest.fixture(params=attacks.names())
def attack(request):
    is_l2 = request.param == "cw-l2-K"
    return registered_attacks.build(request.param, he.ThreatModel("l2", 0.1) if is_l2 else THREAT)


def test_no_setting_can_be_changed(attack):
    before = attack.get_config()
    settings = [name for name in vars(attack) if not name.startswith("_")]
    assert {"threat", "batch_size", "seed", "stop_when_broken"} <= set(settings)
    for name in [*settings, "run", "misspelled"]:
        with pytest.raises(AttributeError, match=f"does not change.* assignment to {name}$"):
            setattr(attack, name, 1)
    assert attack.get_config() == before


@pytest.mark.parametrize(
    "how", [copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))]
)
def test_copies_are_the_same_attack(attack, how):
    twin = how(attack)
    assert twin is not attack and twin.get_config() == attack.get_config()
    with pytest.raises(AttributeError, match="does not change"):
        twin.seed = 3


def test_an_edit_after_the_first_call_is_refused():
    attack = PGD(THREAT, num_steps=2, keep="last", stop_when_broken=False)
    result = attack(linear, images(), labels())
    with pytest.raises(
        AttributeError,
        match="PGD does not change after it is built; expected a new one, built with "
        "num_steps=20; received an assignment to num_steps",
    ):
        attack.num_steps = 20
    with pytest.raises(AttributeError, match="ThreatModel does not change"):
        attack.threat.epsilon = 0.2
    assert attack.get_config()["num_steps"] == result.backward_passes[0] == 2
    # Copies of a compiled attack run as well.
    for twin in (copy.deepcopy(attack), pickle.loads(pickle.dumps(attack))):
        again = twin(linear, images(), labels())
        np.testing.assert_array_equal(again.x_adv, result.x_adv)


class Nudge(Attack):
    """A researcher's own attack."""

    def __init__(self, threat, direction=1.0, **kwargs):
        super().__init__(threat, **kwargs)
        self.direction = direction
        self.direction = float(direction)
        self._calls = 0

    def run(self, victim, images, labels, seeds):
        self._calls += 1
        passes = tf.zeros_like(labels)
        return Crafted(images + self.direction * self.threat.epsilon, passes, passes)


def test_an_attack_of_ones_own_is_sealed_after_its_whole_init():
    attack = Nudge(THREAT, -1)
    result = attack(linear, images(), labels())
    assert attack._calls == 1 and (result.x_adv < images()).any()
    with pytest.raises(AttributeError, match="Nudge does not change.*built with direction=2;"):
        attack.direction = 2
    assert pickle.loads(pickle.dumps(attack)).direction == -1.0


def test_a_threat_model_does_not_change():
    threat = he.ThreatModel("linf", "8/255")
    for name, value in (("epsilon", 0.1), ("norm", "l2"), ("bounds", (0, 255)), ("radius", 1)):
        with pytest.raises(AttributeError, match=f"does not change.*assignment to {name}"):
            setattr(threat, name, value)
    for twin in (copy.copy(threat), copy.deepcopy(threat), pickle.loads(pickle.dumps(threat))):
        assert twin == threat and hash(twin) == hash(threat)
    resized = with_radius(threat, tf.constant(0.0))
    assert resized.epsilon.numpy() == 0.0 and threat.epsilon == 8 / 255
    assert (resized.norm, resized.bounds) == (threat.norm, threat.bounds)


def test_the_parts_of_an_attack_do_not_change_either():
    """`get_config` would not have shown it."""
    attack = attacks.get("apgd-ce-5", THREAT)
    with pytest.raises(AttributeError, match="MomentumSteps does not change"):
        attack.rules[0].num_steps = 50
