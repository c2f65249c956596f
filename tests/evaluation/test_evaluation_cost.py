"""What `--dry_run` says of an evaluation, against the evaluation itself."""

import numpy as np
import pytest
import tensorflow as tf

import he_keras as he
from he_keras.evaluation import cost_of_evaluation
from he_keras.evaluation.run.cost import CostPart, Probe

IMAGES = np.random.default_rng(0).uniform(size=(40, 2, 2, 1)).astype("float32")
LABELS = IMAGES.reshape(40, 4).argmax(1)
HARMLESS, LARGE = he.ThreatModel("linf", 1e-4), he.ThreatModel("linf", 0.9)


def model(images):
    return 9 * tf.reshape(images, [-1, 4])


def passes(threat, attacks, **options):
    options = {"checks": False, **options}
    cost = cost_of_evaluation(model, (IMAGES, LABELS), threat, attacks, **options)
    return {part.name: part.passes for part in cost.parts}


def test_examples_that_hold_out_cost_all_passes_and_those_that_break_few():
    assert passes(HARMLESS, ["cw-linf-20"])["cw-linf-20"] == 40 * 41
    # The first step breaks all; one pass scores the clean image, and one the next point.
    assert passes(LARGE, ["cw-linf-20"])["cw-linf-20"] < 40 * 6


@pytest.mark.slow
def test_a_mode_and_a_shard_share_the_work():
    names = ["cw-linf-20", "cw-linf-10"]
    assert passes(LARGE, names, mode="survivors")["cw-linf-10"] == 0
    assert passes(LARGE, names, mode="individual")["cw-linf-10"] > 0
    assert passes(HARMLESS, ["cw-linf-20"], shard=(1, 4))["cw-linf-20"] == 10 * 41


@pytest.mark.slow
def test_the_parts_of_an_ensemble_are_added():
    attack = he.attacks.get("fast", HARMLESS)
    assert passes(HARMLESS, [attack])["fast"] == 40 * attack.most_passes(4)


def test_checks_are_counted_unless_left_out():
    assert "checks" not in passes(HARMLESS, ["fgsm"])
    assert passes(HARMLESS, ["fgsm"], checks=True, shard=(0, 1))["checks"] > 40 * 1000
    assert "checks" not in passes(HARMLESS, ["fgsm"], checks=True, shard=(1, 2))


def test_a_model_that_is_never_right_costs_nothing_more():
    wrong = (LABELS + 1) % 4
    probe = Probe(model, IMAGES, wrong, [he.attacks.get("fgsm", HARMLESS)], 40)
    assert (probe.correct, probe.held) == (0.0, 0.0)
    assert probe.cost_of(he.attacks.get("fgsm", HARMLESS), 0.0) == CostPart("fgsm", 0.0, 0.0)


def test_wrong_arguments_are_refused_before_any_work():
    with pytest.raises(ValueError, match="Invalid shard"):
        passes(HARMLESS, ["fgsm"], shard=(3, 2))
