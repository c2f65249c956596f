"""The parts that every folder of the package uses: argument checks, registries, configurations."""

import keras
import numpy as np
import pytest

import he_keras as he
from he_keras import arguments
from he_keras.configurable import Configurable
from he_keras.registry import Registry


@pytest.mark.parametrize("value", [1, np.int64(7), np.uint8(255)])
def test_positive_integers(value):
    arguments.check_positive_integer("steps", value)


@pytest.mark.parametrize("value", [0, -1, 1.0, True, np.bool_(True), "1", None])
def test_what_is_no_positive_integer(value):
    with pytest.raises(ValueError, match="Invalid steps; expected an integer >= 1; received"):
        arguments.check_positive_integer("steps", value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), True, "1", None, 1j])
def test_what_is_no_number(value):
    assert not arguments.is_number(value)
    for check in (arguments.check_number, arguments.check_positive, arguments.check_share):
        with pytest.raises(ValueError, match="Invalid rate; expected a .*number.*; received rate="):
            check("rate", value)


def test_the_ends_of_intervals():
    arguments.check_share("rate", 1)
    with pytest.raises(ValueError, match=r"expected a number in \[0, 1\); received rate=1"):
        arguments.check_share("rate", 1, below_one=True)
    with pytest.raises(ValueError, match="expected a finite number > 0; received rate=0"):
        arguments.check_positive("rate", 0)
    with pytest.raises(ValueError, match="expected an integer in 1..5; received rate=6"):
        arguments.check_integer("rate", 6, 1, 5)


@pytest.mark.parametrize(
    ("ask", "suggested"),
    [
        (lambda: he.attacks.get("pdg-20", he.ThreatModel()), "pgd-20"),
        (lambda: he.attacks.get("autoatack", he.ThreatModel()), "autoattack"),
        (lambda: he.objectives.get("Trade"), "trades"),
        (lambda: he.networks.get("preact-resnet18"), "preact-resnet-18"),
        (lambda: he.schedules.get("cosin", 10, 1), "cosine"),
        (lambda: he.analysis.get("class-weight"), "class-weights"),
        (lambda: he.data.corruptions.corrupt(np.zeros((1, 8, 8, 3)), "frogs", 1), "frost"),
        (lambda: he.data.load("cifar-10", "test"), "cifar10"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest_known_one(ask, suggested):
    with pytest.raises(ValueError, match=f"expected .*; received .*; did you mean '{suggested}'"):
        ask()


def test_nothing_is_suggested_for_a_name_unlike_all_others():
    with pytest.raises(ValueError, match="received 'xyz'$"):
        Registry("colour", {"red": 1})["xyz"]


class Scaled(Configurable, keras.layers.Layer):
    def __init__(self, threat, factor=2.0, **options):
        super().__init__(**options)
        self.threat, self.factor = threat, factor


def test_a_layer_s_configuration_is_its_arguments_and_those_of_keras():
    layer = Scaled(he.ThreatModel("l2", 0.5), name="scaled", dtype="float16")
    config = layer.get_config()
    assert config["name"] == "scaled" and config["factor"] == 2.0
    again = Scaled.from_config(config)
    assert again.threat == layer.threat and again.dtype_policy.name == "float16"
