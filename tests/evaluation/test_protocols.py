"""The papers' evaluation settings: every one pinned, and every protocol run on a tiny model."""

import functools
import json
import re

import keras
import numpy as np
import pytest
from attack_victims import cosine_model, functional, images, labels, linear

import he_keras as he
from he_keras.evaluation import protocols

GREY_LEVEL = 1 / 255
COMMON = {"num_restarts": 1, "logit_scale": "model", "stop_when_broken": True, "keep": "best"}
RAW = {"logit_scale": "unit"}
LAST = {"keep": "last", "stop_when_broken": False}
# Every setting of every kind of attack, with the name of the one that a number in its name sets.
ASCENT = {"loss": "ce", "decay": None, "margin": 0.0, "eot_samples": 1, "random_start": True}
APGD = {"rho": 0.75, "eot_samples": 1, "random_start": True, "larger_epsilons": False}
ESTIMATE = {
    "num_samples": 128,
    "sigma": 0.001,
    "step_size": 0.003,
    "optimizer": "sign",
    "loss": "cw",
    "random_start": False,
}
KINDS = {
    "pgd": ("num_steps", ASCENT),
    "mim": ("num_steps", ASCENT | {"decay": 1.0, "random_start": False}),
    "fgsm": ("num_steps", ASCENT | {"num_steps": 1, "random_start": False}),
    "cw-linf": ("num_steps", ASCENT | {"loss": "cw"}),
    "adaptive-pgd": ("num_steps", ASCENT | {"margin": "model"}),
    "deepfool": (
        "num_steps",
        {"overshoot": 0.02, "num_candidates": 10, "stop_when_broken": False},
    ),
    "feature": (
        "num_steps",
        {
            "targets_at_once": 1,
            "random_start": True,
            "target_images": None,
            "target_labels": None,
        },
    ),
    "fab": (
        "num_steps",
        {
            "alpha_max": 0.1,
            "eta": 1.05,
            "beta": 0.9,
            "num_targets": None,
            "stop_when_broken": False,
        },
    ),
    "autoattack": (
        "",
        {"version": "standard", "num_steps": 100, "num_queries": 5000, "order": "standard"},
    ),
    "rays": ("num_queries", {"stop_when_broken": False}),
    "zoo": (
        "",
        {
            "num_queries": 20_000,
            "coordinates_per_step": 1,
            "sigma": 1e-4,
            "learning_rate": 0.01,
            "initial_const": 10.0,
            "binary_search_steps": 1,
            "confidence": 0.0,
            "space": "tanh",
            "stop_when_broken": False,
        },
    ),
    "spsa": ("num_steps", ESTIMATE | {"directions": "rademacher"}),
    "nes": ("num_steps", ESTIMATE | {"directions": "gaussian"}),
    "apgd-ce": ("num_steps", APGD | {"loss": "ce"}),
    "apgd-dlr": ("num_steps", APGD | {"loss": "dlr"}),
    "square": (
        "num_queries",
        {"initial_fraction": 0.8, "loss": "cw", "rescale_schedule": False},
    ),
}
SMALL = {"step_size": 0.003, **LAST}
PAS = {
    "apgd-ce-100": {"num_restarts": 5, "name": "apgd-ce-100, 5 restarts"},
    "apgd-dlr-100": {"num_restarts": 5, "name": "apgd-dlr-100, 5 restarts"},
    "square-5000": {},
}


def pas(step):
    many = {"num_restarts": 10, "name": "pgd-100, 10 restarts"}
    return {"pgd-100": {"step_size": step, "random_start": step, **many, **LAST}, **PAS}


PINNED = {
    "he-table-2": (
        0.031,
        {
            "pgd-20": SMALL | RAW,
            "pgd-500": SMALL | RAW,
            "mim-20": SMALL | RAW,
            "fgsm": {"step_size": 0.031} | LAST | RAW,
            "deepfool-100": RAW,
            "feature-50": {"num_targets": 200, "step_size": GREY_LEVEL, "keep": "last"} | RAW,
        },
    ),
    "he-table-2-fab": (8 / 255, {"fab-20": RAW}),
    "he-table-3": (
        8 / 255,
        {
            "pgd-50": {
                "num_restarts": 10,
                "step_size": 2 / 255,
                "keep": "last",
                "name": "pgd-50, 10 restarts",
                **RAW,
            }
        },
    ),
    "he-table-4": (
        4 / 255,
        {
            "pgd-10": {"step_size": GREY_LEVEL, **LAST, **RAW},
            "pgd-50": {"step_size": GREY_LEVEL, **LAST, **RAW},
        },
    ),
    "he-table-6": (8 / 255, {"autoattack": RAW}),
    "he-table-6-rays": (8 / 255, {"rays-10000": RAW}),
    "he-table-8": (
        0.031,
        {
            "zoo": RAW,
            **{f"spsa-{steps}": RAW for steps in (20, 50, 80)},
            **{f"nes-{steps}": RAW for steps in (20, 50, 80)},
        },
    ),
    "he-adaptive": (0.031, {"adaptive-pgd-20": SMALL, "adaptive-pgd-500": SMALL}),
    "rat-table-8": (0.031, {"pgd-20": SMALL, "cw-linf-20": SMALL}),
    "rat-table-8-autoattack": (8 / 255, {"autoattack": {}}),
    "pas-mnist": (0.4, pas(0.01)),
    "pas-cifar": (8 / 255, pas(GREY_LEVEL)),
}


def settings(attack, pins):
    """The whole configuration of an attack, written out."""
    kind, _, number = attack.rpartition("-") if attack[-1].isdigit() else (attack, "", "")
    budget, fixed = KINDS[kind]
    return {
        "name": attack,
        "seed": 0,
        "batch_size": 250,
        **COMMON,
        **fixed,
        **({budget: int(number)} if number else {}),
        **pins,
    }


def built(name):
    return {attack.name: attack for attack in protocols.get(name).attacks}


@pytest.mark.parametrize("name", PINNED)
def test_every_setting_is_pinned(name):
    protocol = protocols.get(name)
    epsilon, pinned = PINNED[name]
    ball = {"norm": "linf", "epsilon": pytest.approx(epsilon, rel=1e-12), "bounds": [0.0, 1.0]}
    assert protocol.threat.get_config() == ball
    expected = [settings(attack, pins) for attack, pins in pinned.items()]
    for attack, config in zip(protocol.attacks, expected, strict=True):
        found = attack.get_config()
        assert attack.threat is protocol.threat and found.pop("threat")
        assert found == {name: close(value) for name, value in config.items()}


def close(value):
    return pytest.approx(value, rel=1e-12) if type(value) is float else value


@pytest.mark.parametrize("name", ["he-table-6", "rat-table-8-autoattack"])
def test_autoattack_hands_its_settings_to_its_parts(name):
    (attack,) = protocols.get(name).attacks
    parts = [part.name for part in attack.components]
    assert parts == ["apgd-ce", "apgd-t", "fab-t", "square"]
    assert {part.logit_scale for part in attack.components} == {attack.logit_scale}
    assert not attack.note


def test_table_7_runs_every_step_and_start_that_the_paper_leaves_open():
    attacks = protocols.get("he-table-7").attacks
    assert {attack.threat.epsilon for attack in attacks} == {0.031}
    found = set()
    for attack in attacks:
        is_fn = type(attack).__name__ == "FeatureNormPGD"
        assert attack.name.startswith("fn-pgd" if is_fn else "pgd")
        shown = {0.003: "0.003", 2 / 255: "0.0078"}[attack.step_size]
        assert f"pgd-{attack.num_steps}, step {shown}, " in attack.name
        assert attack.name.endswith("uniform" if attack.random_start else "image")
        assert (attack.loss, attack.logit_scale, attack.keep) == ("ce", "model", "last")
        assert not attack.stop_when_broken and attack.num_restarts == 1
        found.add((is_fn, attack.num_steps, attack.step_size, attack.random_start))
    expected = {
        (is_fn, steps, size, start)
        for is_fn in (False, True)
        for steps in (1, 2)
        for size in (0.003, 2 / 255)
        for start in (False, True)
    }
    assert found == expected and len(attacks) == 16


def test_all_protocols_are_pinned():
    assert protocols.names() == list(dict.fromkeys(protocols.names()))
    assert set(protocols.names()) == {*PINNED, "he-table-7"}


@pytest.mark.parametrize("name", sorted({*PINNED, "he-table-7"}))
def test_texts_say_what_is_run(name):
    protocol = protocols.get(name)
    assert protocol.name == name and protocol.mode == "individual"
    assert protocol.text.endswith(".") and protocol.note.endswith(".")
    assert "\n" not in protocol.text + protocol.note
    assert "  " not in protocol.text + protocol.note
    shown = re.search(r"epsilon (\d[\d/.]*\d)", protocol.text)[1]
    assert he.ThreatModel("linf", shown) == protocol.threat
    names = [attack.name for attack in protocol.attacks]
    assert len(set(names)) == len(names)
    # They name files and arrays.
    assert not any(set(name) & set("/\\:") for name in names)


@pytest.mark.parametrize("name", ["he-table-2", "he-table-3", "he-table-4"])
def test_cross_entropy_on_raw_cosines_comes_with_a_warning(name):
    assert "overstate the robustness of cosine heads" in protocols.get(name).text
    assert "raw cosines" in protocols.get(name).text


def test_each_call_builds_new_attacks():
    first, second = (protocols.get("he-table-4", batch_size=size) for size in (7, 9))
    assert first.attacks[0] is not second.attacks[0]
    assert [attack.batch_size for attack in (*first.attacks, *second.attacks)] == [7, 7, 9, 9]


def test_data_sets_have_a_table():
    expected = {"cifar10": "he-table-2", "imagenet2012": "he-table-4", "mnist": "pas-mnist"}
    assert {name: protocols.for_dataset(name).name for name in expected} == expected
    assert protocols.for_dataset("mnist", batch_size=3).attacks[0].batch_size == 3


@pytest.mark.parametrize("wrong", ["digits", "runs/data", "he-table-2", None])
def test_other_data_sets_are_told_what_there_is(wrong):
    with pytest.raises(ValueError, match="cifar10, imagenet2012, mnist.*he-table-2-fab") as error:
        protocols.for_dataset(wrong)
    assert repr(wrong) in str(error.value)


@pytest.mark.parametrize("wrong", ["he-table-5", "paper", "HE-TABLE-2", None])
def test_unknown_protocols(wrong):
    with pytest.raises(ValueError, match="Unknown protocol; expected one of he-table-2, ") as error:
        protocols.get(wrong)
    assert repr(wrong) in str(error.value) and "pas-cifar" in str(error.value)


@functools.cache
def cosine():
    return cosine_model()


def evaluate(name, model, count=6):
    protocol = protocols.get(name)
    return he.evaluate_robustness(
        model,
        (images()[:count], labels()[:count]),
        protocol.threat,
        protocol.attacks,
        mode=protocol.mode,
        checks=False,
        protocol=protocol.text,
    )


@pytest.mark.parametrize(
    "name",
    [
        "he-adaptive",
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ("he-table-3", "he-table-4", "rat-table-8")
        ),
    ],
)
def test_protocols_run_on_a_cosine_head(name):
    report = evaluate(name, cosine())
    expected = list(built(name))
    # Cross-entropy at another scale than the model's never stands alone.
    if name.startswith("he-table"):
        expected.append("cw-linf-20")
    assert [row.name for row in report.rows] == expected
    assert report.protocol == protocols.get(name).text
    assert json.dumps(report.to_json())


@pytest.mark.slow
def test_table_7_runs_on_a_linear_head():
    report = evaluate("he-table-7", functional())
    assert len(report.rows) == 16


def test_the_unit_scale_leaves_a_linear_head_alone():
    """The baselines of the HE tables lose nothing by being evaluated as the HE models are."""
    for attack in protocols.get("he-table-4").attacks:
        config = {**attack.get_config(), "logit_scale": "model"}
        plain = type(attack).from_config(config)
        given = functional(), images(), labels()
        np.testing.assert_array_equal(attack(*given).x_adv, plain(*given).x_adv)


def test_the_unit_scale_takes_the_scale_of_a_cosine_head_away():
    attack = protocols.get("he-table-4").attacks[0]
    kernel = cosine().head.kernel.numpy()
    unit_kernel = kernel / np.linalg.norm(kernel, axis=0)

    def cosines(batch):
        flat = keras.ops.reshape(batch, (-1, len(kernel)))
        norm = keras.ops.sqrt(keras.ops.sum(flat**2, axis=1, keepdims=True))
        return flat / norm @ unit_kernel

    own = attack(cosine(), images(), labels()).x_adv
    rescaled = {**attack.get_config(), "logit_scale": "model"}
    by_hand = type(attack).from_config(rescaled)(cosines, images(), labels()).x_adv
    scaled = type(attack).from_config(rescaled)(cosine(), images(), labels()).x_adv
    np.testing.assert_allclose(own, by_hand, atol=1e-6)
    assert np.abs(own - scaled).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "he-table-2",
        "he-table-2-fab",
        "he-table-6",
        "he-table-6-rays",
        "he-table-8",
        "rat-table-8-autoattack",
        "pas-mnist",
        "pas-cifar",
    ],
)
def test_long_protocols_run(name):
    report = evaluate(name, cosine(), count=3)
    expected = list(built(name)) + ["cw-linf-20"] * (name == "he-table-2")
    assert [row.name for row in report.rows] == expected
    # Every attack by itself ran on every example that was right before.
    assert {row.num_attacked for row in report.rows} == {2}
    assert all(0.0 <= row.robust_accuracy <= report.clean_accuracy for row in report.rows)


def test_a_callable_without_a_head_can_be_evaluated():
    report = evaluate("rat-table-8", linear)
    assert [row.name for row in report.rows] == ["pgd-20", "cw-linf-20"]
