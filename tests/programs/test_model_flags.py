"""The threat model that a program attacks with: flags, then the run, then the model's own."""

import keras
import numpy as np
import pytest

import he_keras as he
from he_keras import experiment
from he_keras.programs.model_flags import chosen_threat
from he_keras.threat import bounds_of


def model_of(threat):
    network = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    objective = he.objectives.PGDAT(threat) if threat else None
    return he.HEAdversarialModel(network, keras.layers.Dense(2), objective, evaluation_attack=None)


TRAINED = he.ThreatModel("linf", 0.15)
L2 = he.ThreatModel("l2", 2.0)
WIDE_4 = he.ThreatModel("linf", 4, (0, 255))
WIDE = he.ThreatModel("linf", 8, (0, 255))


@pytest.mark.parametrize(
    ("trained", "flags", "expected", "remark"),
    [
        (TRAINED, {}, TRAINED, ""),
        (TRAINED, {"epsilon": "0.15"}, TRAINED, ""),
        (
            TRAINED,
            {"epsilon": "8/255"},
            he.ThreatModel(),
            "Trained at linf, epsilon 0.15, pixels 0 to 1; attacked at linf, epsilon 8/255 (0.031",
        ),
        (L2, {"norm": "l2"}, L2, ""),
        (L2, {"norm": "linf", "epsilon": "0.1"}, he.ThreatModel("linf", 0.1), "Trained at l2"),
        (WIDE, {}, WIDE, ""),
        (WIDE, {"bounds": ["0", "255"], "epsilon": "4"}, WIDE_4, "Trained at"),
        (
            None,
            {},
            he.ThreatModel(),
            "The model names no threat model: attacked at linf, epsilon 8/",
        ),
        (None, {"epsilon": "4", "bounds": ["0", "255"]}, WIDE_4, ""),
    ],
)
def test_the_models_own_counts_where_there_is_no_run(trained, flags, expected, remark):
    config = experiment.default_config()
    threat, said = chosen_threat(config, [model_of(trained)], False, **flags)
    assert threat == expected
    assert said.startswith(remark) and bool(said) == bool(remark)
    written = he.ThreatModel(config.threat.norm, config.threat.epsilon, expected.bounds)
    assert written == expected


def test_a_run_counts_more_than_the_model_in_its_place():
    config = experiment.default_config()
    threat, said = chosen_threat(config, [model_of(TRAINED)], True)
    assert threat == he.ThreatModel() and said.startswith("Trained at linf, epsilon 0.15")


@pytest.mark.parametrize(
    ("models", "flags", "message"),
    [
        ([TRAINED], {"norm": "l2"}, "A radius belongs to one norm.*received norm=l2"),
        ([None], {"bounds": ["0", "255"]}, r"A radius belongs to.*bounds=\(0.0, 255.0\) alone"),
        ([TRAINED, L2], {}, "different threat models; expected --norm and --epsilon.*0.15.*l2"),
        ([TRAINED, WIDE], {"epsilon": "0.1"}, "different pixel values; expected one range"),
        ([WIDE], {"bounds": ["0", "1"]}, r"Other pixel values.*bounds=\(0.0, 255.0\)"),
        ([None], {"bounds": ["0", "many"]}, "Invalid --bounds; expected LOW,HIGH.*0,many"),
    ],
)
def test_what_does_not_go_together_is_refused(models, flags, message):
    with pytest.raises(ValueError, match=message):
        chosen_threat(experiment.default_config(), map(model_of, models), False, **flags)


def test_an_evaluation_in_other_units_than_the_training_is_refused_before_any_work():
    images, labels = np.zeros((4, 4), "float32"), np.zeros(4, int)
    for evaluate in (
        lambda model: he.evaluate_robustness(model, (images, labels), TRAINED, ["fgsm"]),
        lambda model: he.attacks.get("fgsm", TRAINED)(model, images, labels),
    ):
        with pytest.raises(ValueError, match=r"Other pixel values.*\(0.0, 255.0\).*\(0.0, 1.0\)"):
            evaluate(model_of(WIDE))


def test_an_ensemble_knows_what_its_members_were_trained_with():
    assert he.SnapshotEnsemble([model_of(TRAINED), model_of(TRAINED)]).threat == TRAINED
    mixed = he.SnapshotEnsemble([model_of(TRAINED), model_of(L2)])
    assert mixed.threat is None and bounds_of(mixed) == (0.0, 1.0)
    wide = [WIDE, he.ThreatModel("linf", 4, (0, 255))]
    assert bounds_of(he.SnapshotEnsemble(map(model_of, wide))) == WIDE.bounds
    with pytest.raises(ValueError, match="members take different pixel values"):
        he.SnapshotEnsemble([model_of(TRAINED), model_of(WIDE)])
