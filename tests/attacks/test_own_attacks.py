"""What an attack of one's own forgets is said in one sentence."""

import numpy as np
import pytest
import tensorflow as tf
from own_names import forget

import he_keras as he
from he_keras import attacks

THREAT = he.ThreatModel("linf", 0.1)
IMAGES = np.random.RandomState(0).rand(6, 3).astype("float32")
LABELS = IMAGES.argmax(axis=1)


def own(run, **attributes):
    return type("Mine", (attacks.Attack,), {"run": run, **attributes})(THREAT, name="mine")


def passes(labels):
    return tf.zeros_like(labels)


@pytest.mark.parametrize(
    ("run", "part"),
    [
        (lambda images, labels: attacks.Crafted(images), "expected forward_passes as a tensor"),
        (
            lambda images, labels: attacks.Crafted(images, passes(labels)),
            "expected backward_passes as a tensor of shape (n,), one number for each image",
        ),
        (lambda images, labels: attacks.Crafted(images, 1, 0), "received forward_passes=1"),
        (lambda images, labels: images, "returned no result; expected attacks.Crafted(x_adv, "),
        (lambda images, labels: None, "received NoneType"),
        (
            lambda images, labels: attacks.Crafted(images[:, :2], passes(labels), passes(labels)),
            "expected (None, 3); received x_adv of shape (None, 2)",
        ),
        (
            lambda images, labels: attacks.Crafted(None, passes(labels), passes(labels)),
            "expected x_adv as a tensor of dtype float32, as it got them; received NoneType",
        ),
    ],
)
def test_a_forgotten_field_of_the_result_is_one_sentence(run, part):
    attack = own(lambda self, victim, images, labels, seeds: run(images, labels))
    with pytest.raises(ValueError, match="^The attack 'mine' [^\n]*$") as error:
        attack(lambda images: images, IMAGES, LABELS)
    assert part in str(error.value)


@pytest.mark.parametrize(
    ("run", "part"),
    [
        (
            lambda images, none: attacks.Crafted(images[:2], none[:2], none[:2]),
            "too few or too many x_adv; expected one for each image; received numbers in [2, 6]",
        ),
        (
            lambda images, none: attacks.Crafted(tf.repeat(images, 2, 0), none, none),
            "too few or too many x_adv; expected one for each image; received numbers in [6, 12]",
        ),
        (lambda images, none: attacks.Crafted(images, none, none[:1]), "many backward_passes"),
        (
            lambda images, none: attacks.Crafted(
                tf.where(images > 0.5, np.nan, images), none, none
            ),
            "NaN or infinity in x_adv; expected finite numbers; received values in [",
        ),
    ],
)
def test_wrong_numbers_in_the_result_are_one_sentence(run, part):
    attack = own(lambda self, victim, images, labels, seeds: run(images, passes(labels)))
    with pytest.raises(ValueError, match="^The attack 'mine' returned [^\n]*$") as error:
        attack(lambda images: images, IMAGES, LABELS)
    assert part in str(error.value)


@pytest.mark.parametrize(
    ("part", "wanted"),
    [
        (lambda threat, name: None, "expected a subclass of Attack, or .*; received NoneType"),
        (lambda: None, r"expected <lambda>\(threat, name=\.\.\.\); received <lambda>\(\)"),
        (
            type("Mine", (attacks.Attack,), {"__init__": lambda self, threat, name="mine": None}),
            r"The class Mine is not set up; expected super\(\).__init__\(threat, ...\)",
        ),
    ],
)
def test_what_is_no_attack_is_told_when_it_is_built(request, part, wanted):
    request.addfinalizer(lambda: forget("mine"))
    attacks.register("mine")(part)
    with pytest.raises(TypeError, match=wanted):
        attacks.get("mine", THREAT)


def test_a_minimum_norm_attack_returns_distances():
    def run(self, victim, images, labels, seeds):
        return attacks.Crafted(images, passes(labels), passes(labels))

    attack = own(run, minimum_norm=True)
    with pytest.raises(ValueError, match="expected distance as a tensor"):
        attack(lambda images: images, IMAGES, LABELS)


def test_an_error_of_its_code_names_the_line():
    def run(self, victim, images, labels, seeds):
        return attacks.Crafted(images + "noise", passes(labels), passes(labels))

    wanted = r"^The attack 'mine' does not run; [^\n]*received \w+Error: [^\n]*"
    wanted += r"\(.*test_own_attacks\.py, line \d+\)$"
    with pytest.raises(ValueError, match=wanted):
        own(run)(lambda images: images, IMAGES, LABELS)


def test_other_arguments_of_run_are_told():
    attack = own(lambda self, victim, images, labels: None)
    wanted = r"expected Mine.run\(victim, images, labels, seeds\); received Mine.run\(victim, ima"
    with pytest.raises(TypeError, match=wanted):
        attack(lambda images: images, IMAGES, LABELS)


def test_options_of_an_attack_are_checked_by_name():
    with pytest.raises(ValueError, match="Unknown option of attack 'pgd-5'; .*mean 'step_size'?"):
        attacks.get("pgd-5", THREAT, stepsize=0.1)


@pytest.mark.parametrize(
    "module", ["attacks", "objectives", "networks", "schedules", "data", "analysis"]
)
def test_a_decorator_without_a_name_is_refused(module):
    def part():
        """Something to register."""

    wanted = r'without a name; expected @register\("name"\); received the function part'
    with pytest.raises(TypeError, match=wanted):
        getattr(he, module).register(part)
