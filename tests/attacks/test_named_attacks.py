"""Every name of an attack is a class: for `isinstance`, and after a round trip as plain data."""

import json

import keras
import pytest
import registered_attacks

import he_keras as he
from he_keras import attacks

CLASSES = {
    "adaptive-pgd-3": attacks.AdaptivePGD,
    "apgd-ce-3": attacks.APGDCE,
    "apgd-dlr-3": attacks.APGDDLR,
    "apgd-t-3": attacks.APGDTargeted,
    "autoattack": attacks.AutoAttack,
    "autoattack-fast-first": attacks.AutoAttackFastFirst,
    "autoattack-plus": attacks.AutoAttackPlus,
    "autoattack-rand": attacks.AutoAttackRand,
    "bim-3": attacks.BIM,
    "cw-linf-3": attacks.CWLinf,
    "fab-3": attacks.FAB,
    "fab-t-3": attacks.FABT,
    "fast": attacks.Fast,
    "fgsm": attacks.FGSM,
    "mim-3": attacks.MIM,
    "nes-3": attacks.NES,
    "pgd-3": attacks.PGD,
    "screen": attacks.Screen,
    "spsa-3": attacks.SPSA,
    "trades-kl-3": attacks.TradesKL,
}
FAMILIES = {
    attacks.ProjectedGradient: ("adaptive-pgd-3", "bim-3", "fgsm", "mim-3", "pgd-3", "trades-kl-3"),
    attacks.APGD: ("apgd-ce-3", "apgd-dlr-3", "apgd-t-3"),
    attacks.FAB: ("fab-3", "fab-t-3"),
    attacks.GradientEstimation: ("nes-3", "spsa-3"),
    attacks.AutoAttack: (
        "autoattack",
        "autoattack-fast-first",
        "autoattack-plus",
        "autoattack-rand",
    ),
    attacks.Fast: ("fast", "screen"),
}


@pytest.mark.parametrize("name", CLASSES)
def test_a_name_builds_its_class_which_survives_as_plain_data(name):
    attack = attacks.get(name, he.ThreatModel("linf", "4/255"), seed=5)
    assert type(attack) is CLASSES[name]
    data = json.loads(json.dumps(keras.saving.serialize_keras_object(attack)))
    again = keras.saving.deserialize_keras_object(data)
    assert type(again) is type(attack) and again.get_config() == attack.get_config()
    assert again.name == name and again.seed == 5


def test_families():
    for family, names in FAMILIES.items():
        assert all(issubclass(CLASSES[name], family) for name in names)


@pytest.mark.parametrize("name", attacks.names())
def test_the_configuration_rebuilds_every_attack(name):
    norm = "l2" if name == "cw-l2-K" else "linf"
    attack = registered_attacks.build(name, he.ThreatModel(norm, 0.1))
    again = type(attack).from_config(attack.get_config())
    assert again.get_config() == attack.get_config()


def test_a_stored_attack_of_an_earlier_version_still_loads():
    """There, `PGD` built a `ProjectedGradient`."""
    threat = he.ThreatModel("linf", 0.1)
    stored = keras.saving.serialize_keras_object(attacks.ProjectedGradient(threat, 7, name="pgd-7"))
    assert stored["class_name"] == "ProjectedGradient"
    assert keras.saving.deserialize_keras_object(stored).num_steps == 7
