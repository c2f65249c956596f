"""Ensembles: who is attacked by which component, what is counted, and what they warn of."""

import functools
import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from attack_victims import CLASSES, THREAT, images, labels, linear

import he_keras as he
from he_keras import attacks
from he_keras.attacks import BIM, FGSM, CWLinf, Ensemble
from he_keras.attacks.autoattack import AutoAttack
from he_keras.attacks.fast import Fast, Screen

pytestmark = pytest.mark.usefixtures("op_by_op")


class Recording(attacks.Attack):
    """Passes everything on to another attack, and remembers which examples it was given."""

    def __init__(self, inner):
        super().__init__(inner.threat, name=inner.name)
        self.inner = inner
        self.given, self.images = [], []

    def __call__(self, model, images, labels, example_ids=None):
        self.given.append(np.asarray(example_ids))
        self.images.append(images)
        return self.inner(model, images, labels, example_ids)


def weak_to_strong():
    return [
        FGSM(THREAT, step_size=0.01, name="weak"),
        BIM(THREAT, 3, step_size=0.01, name="medium"),
        CWLinf(THREAT, 10, name="strong"),
    ]


@functools.cache
def ensemble_and_singles():
    """The results of the ensemble on ninety images, and of each attack alone."""
    given = linear, images(90), labels(90)
    return Ensemble(THREAT, weak_to_strong())(*given), [each(*given) for each in weak_to_strong()]


def test_the_first_attack_gets_the_images_themselves():
    """Not a copy: data sets are large."""
    recording, given = Recording(FGSM(THREAT)), images(6)
    Ensemble(THREAT, [recording])(linear, given, labels(6))
    assert np.shares_memory(recording.images[0], given)


def test_each_attack_sees_only_what_the_earlier_ones_left():
    recording = [Recording(attack) for attack in weak_to_strong()]
    ids = np.arange(100, 190)
    result = Ensemble(THREAT, recording)(linear, images(90), labels(90), example_ids=ids)
    left = np.ones(90, bool)
    for number, (attack, single) in enumerate(zip(recording, weak_to_strong(), strict=True)):
        (given,) = attack.given
        np.testing.assert_array_equal(given, ids[left])
        alone = single(linear, images(90), labels(90), example_ids=ids)
        newly = left & alone.success
        assert newly.any()
        np.testing.assert_array_equal(result.broken_by == number, newly)
        left &= ~newly
        stage = result.stages[number]
        assert (stage.attacked, stage.broken) == (len(given), newly.sum())
        assert stage.robust_accuracy == left.mean()
        assert stage.forward_passes == alone.forward_passes[np.isin(ids, given)].sum()
    np.testing.assert_array_equal(result.success, ~left)
    np.testing.assert_array_equal(result.broken_by == -1, left)
    wrong = linear(images(90)).numpy().argmax(axis=1) != labels(90)
    assert wrong.any() and np.all(result.broken_by[wrong] == 0)


def test_the_smallest_margin_is_kept():
    result, singles = ensemble_and_singles()
    held = ~result.success
    best = np.min([single.margin for single in singles], axis=0)
    np.testing.assert_allclose(result.margin[held], best[held], rtol=1e-6)
    margins = he.losses.margin(linear(tf.constant(result.x_adv)), labels(90)).numpy()
    np.testing.assert_allclose(result.margin, margins, atol=1e-6)
    lengths = np.abs(result.x_adv - images(90)).max(axis=(1, 2, 3))
    np.testing.assert_allclose(result.distance, lengths, atol=1e-6)


def test_passes_add_up_over_the_attacks():
    result, _ = ensemble_and_singles()
    for name in ("forward_passes", "backward_passes"):
        total = sum(getattr(stage, name) for stage in result.stages)
        assert getattr(result, name).sum() == total > 0


def test_it_stops_when_nothing_is_left():
    recording = [Recording(attack) for attack in weak_to_strong()]
    wrong = (linear(images()).numpy().argmax(axis=1) + 1) % CLASSES
    result = Ensemble(THREAT, recording)(linear, images(), wrong)
    assert result.robust_accuracy == 0 and len(result.stages) == 1
    assert not recording[1].given and not recording[2].given
    np.testing.assert_array_equal(result.x_adv, images())


def test_minimum_norm_attacks_take_part():
    nearest = attacks.get("deepfool-20", THREAT)
    alone = nearest(linear, images(90), labels(90))
    result = Ensemble(THREAT, [nearest, CWLinf(THREAT, 5)])(linear, images(90), labels(90))
    assert alone.success.any() and not alone.success.all()
    assert np.all(result.success[alone.success])
    # Beyond the ball lies what a minimum-norm attack found for the others: not an ensemble's x_adv.
    assert alone.distance[~alone.success].min() > THREAT.epsilon
    assert result.distance.max() <= THREAT.epsilon + 1e-6


@pytest.mark.parametrize(
    ("components", "message"),
    [
        ([], "at least one Attack"),
        (["pgd-20"], "at least one Attack"),
        ([FGSM(he.ThreatModel("linf", 0.01))], "differ in their threat model"),
    ],
)
def test_components_are_checked(components, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Ensemble(THREAT, components)


def test_it_cannot_run_inside_a_training_step():
    with pytest.raises(TypeError, match="single attack"):
        Ensemble(THREAT, [FGSM(THREAT)]).perturb(attacks.Victim(linear), None, None, None)


def test_configuration_survives_serialization():
    ensemble = Ensemble(THREAT, weak_to_strong(), name="mine", seed=3)
    data = json.loads(json.dumps(keras.saving.serialize_keras_object(ensemble)))
    again = keras.saving.deserialize_keras_object(data)
    assert again.get_config() == ensemble.get_config()
    assert [attack.name for attack in again.components] == ["weak", "medium", "strong"]


# AutoAttack's composition.

STANDARD = ["apgd-ce", "apgd-t", "fab-t", "square"]


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_the_standard_version(norm):
    ensemble = attacks.get("autoattack", he.ThreatModel(norm, 0.5), batch_size=7, seed=4)
    assert [attack.name for attack in ensemble.components] == STANDARD
    ascent, targeted, boundary, square = ensemble.components
    assert {attack.batch_size for attack in ensemble.components} == {7}
    assert {attack.seed for attack in ensemble.components} == {4}
    assert ascent.num_restarts == (5 if norm == "l1" else 1)
    assert targeted.num_targets == (5 if norm == "l1" else 9)
    assert ascent.larger_epsilons == targeted.larger_epsilons == (norm == "l1")
    assert boundary.num_targets == 9 and boundary.stop_when_broken
    assert (ascent.num_steps, targeted.num_steps, boundary.num_steps) == (100, 100, 100)
    assert (square.num_queries, square.initial_fraction) == (5000, 0.8)
    assert not square.rescale_schedule and not ensemble.note


def test_the_plus_version_is_the_same_each_time():
    for _ in range(2):
        ensemble = attacks.get("autoattack-plus", THREAT)
        parts = [(attack.name, attack.num_restarts) for attack in ensemble.components]
        assert parts == [
            ("apgd-ce", 5),
            ("apgd-dlr", 5),
            ("fab", 5),
            ("square", 1),
            ("apgd-t", 1),
            ("fab-t", 1),
        ]


def test_the_version_for_random_models():
    ensemble = attacks.get("autoattack-rand", THREAT)
    assert [attack.name for attack in ensemble.components] == ["apgd-ce", "apgd-dlr"]
    assert [attack.eot_samples for attack in ensemble.components] == [20, 20]


def test_other_budgets_are_noted():
    assert "not the standard budget" in AutoAttack(THREAT, num_queries=100).note
    assert "an upper bound" in Fast(THREAT).note
    assert Screen(THREAT).note.startswith("screen is now called fast")


@pytest.mark.slow
def test_autoattack_needs_four_classes_and_fast_two():
    with pytest.raises(ValueError, match="Too few classes for autoattack; expected at least 4"):
        attacks.get("autoattack", THREAT)(
            lambda batch: linear(batch)[:, :3], images(), labels() % 3
        )
    binary = labels() % 2
    result = Fast(THREAT)(lambda batch: linear(batch)[:, :2], images(), binary)
    assert 0 < result.robust_accuracy < 1


# Warnings.


def warnings_of(model, name="fast", labels_=None):
    options = {} if name == "fast" else {"num_steps": 5, "num_queries": 5}
    given = labels() if labels_ is None else labels_
    return " ".join(attacks.get(name, THREAT, **options)(model, images(), given).warnings)


def noisy(batch):
    return linear(batch) + tf.random.normal(tf.shape(linear(batch)), stddev=0.01)


def quantised(batch):
    """Its gradient exists, and is zero."""
    return linear(tf.round(batch * 50.0) / 50.0 + 0.0 * batch)


@pytest.mark.slow
def test_an_honest_model_gives_no_warning():
    assert warnings_of(linear) == ""
    assert warnings_of(linear, "autoattack") == ""


@pytest.mark.slow
def test_random_answers_are_noticed():
    assert "differently each time" in warnings_of(noisy)
    assert "differently each time" in warnings_of(noisy, "autoattack")
    assert warnings_of(noisy, "autoattack-rand") == ""


@pytest.mark.slow
def test_zero_gradients_and_late_success_are_noticed():
    said = warnings_of(quantised)
    assert "exactly zero for 100%" in said
    assert "square, which uses no gradient, broke" in said


@pytest.mark.slow
def test_the_report_shows_stages_warnings_and_notes():
    report = he.evaluate_robustness(
        quantised, (images(), labels()), THREAT, ["fast", "bim-3"], checks=False
    )
    row = report.rows[0]
    assert [stage.name for stage in row.stages] == ["apgd-cw", "apgd-nearest", "square"]
    alone = Fast(THREAT, batch_size=250)(quantised, images(), labels())
    np.testing.assert_array_equal(report.correct["fast"], ~alone.success)
    assert [stage.robust_accuracy for stage in row.stages] == [
        stage.robust_accuracy for stage in alone.stages
    ]
    clean = report.correct["clean"]
    assert row.forward_passes == pytest.approx(alone.forward_passes[clean].sum() / len(clean))
    table = report.table()
    assert "WARNING (fast)" in table and "note (fast): an upper bound" in table
    assert table.index("square") < table.index("fast  ")
    stored = report.to_json()["attacks"][0]
    assert stored["stages"][2]["name"] == "square" and stored["warnings"]


def test_batches_are_filled_with_survivors_from_the_whole_data_set():
    attack = Ensemble(THREAT, weak_to_strong())
    whole = attack(linear, images(90), labels(90))
    data = tf.data.Dataset.from_tensor_slices((images(90), labels(90))).batch(11)
    report = he.evaluate_robustness(linear, data, THREAT, [attack], batch_size=20, checks=False)
    np.testing.assert_array_equal(report.correct["ensemble"], ~whole.success)
    assert report.rows[0].stages[1].robust_accuracy == whole.stages[1].robust_accuracy
