"""Attacks with targets: on linear models, where what they must find is known in closed form."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import he_keras as he
from he_keras import attacks
from he_keras.attacks.framework.result import Goal

#: Three classes of two pixels. From the image, class 1 is near and class 2 is farther away.
WEIGHTS = np.array([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
BIAS = np.array([0.0, -0.6, -0.65])
IMAGES = np.full((2, 2), 0.5)
LABELS = np.array([0, 0])
TARGETS = np.array([1, 2])
#: Distances to the regions of classes 1 and 2: both pixels start equal, only one must rise.
DISTANCES = np.array([0.1, 0.15])


def linear(images):
    return images @ tf.constant(WEIGHTS, images.dtype) + tf.constant(BIAS, images.dtype)


def predictions(images):
    return linear(images).numpy().argmax(axis=1)


BOUNDED = {
    "pgd-20": {"random_start": False},
    "bim-10": {},
    "mim-10": {"step_size": 0.05},
    "cw-linf-20": {},
    "adaptive-pgd-20": {},
    "apgd-ce-20": {},
    "spsa-40": {"num_samples": 16},
    "nes-20": {"num_samples": 16},
}


@pytest.mark.parametrize("name", BOUNDED)
def test_each_image_is_led_to_its_own_target(name, monkeypatch):
    """Class 2 leads only where the second pixel is raised and the first is not."""
    # Few steps each, which are not worth a trace.
    monkeypatch.setattr(attacks.Attack, "runs_in_graph", False)
    attack = attacks.get(name, he.ThreatModel("linf", 0.2), **BOUNDED[name])
    result = attack(linear, IMAGES, LABELS, targets=TARGETS)
    assert result.success.all()
    np.testing.assert_array_equal(predictions(result.x_adv), TARGETS)
    logits = linear(result.x_adv).numpy()
    reached = logits[[0, 1], TARGETS]
    others = np.where(np.eye(3, dtype=bool)[TARGETS], -np.inf, logits).max(axis=1)
    np.testing.assert_allclose(result.margin, others - reached, atol=1e-6)


def test_one_step_of_pgd_goes_down_the_cross_entropy_of_the_target():
    """The gradient is `(e_t - p) W`: up in the target's pixel, down in the other one."""
    attack = attacks.FGSM(he.ThreatModel("linf", 0.05), keep="last", stop_when_broken=False)
    result = attack(linear, IMAGES, LABELS, targets=TARGETS)
    np.testing.assert_allclose(result.x_adv, [[0.55, 0.45], [0.45, 0.55]], atol=1e-12)


def test_another_class_than_the_target_is_no_success():
    """Within 0.12 every image can be misclassified, but only the first one as its target."""
    threat = he.ThreatModel("linf", 0.12)
    assert attacks.CWLinf(threat)(linear, IMAGES, LABELS).success.all()
    result = attacks.CWLinf(threat)(linear, IMAGES, LABELS, targets=TARGETS)
    assert result.success.tolist() == [True, False]


def test_an_image_that_is_misclassified_from_the_start_is_still_led_to_its_target():
    result = attacks.CWLinf(he.ThreatModel("linf", 0.3))(
        linear, np.array([[0.8, 0.5]]), np.array([0]), targets=np.array([2])
    )
    assert result.success.all() and predictions(result.x_adv).tolist() == [2]
    assert result.backward_passes[0] > 0


@pytest.mark.fast_cases("fab-")
@pytest.mark.parametrize(
    ("attack", "relative"),
    [
        (attacks.FAB(he.ThreatModel("l2", 0.5), 20), 0.01),
        (attacks.FABT(he.ThreatModel("l2", 0.5), num_steps=20), 0.01),
        (attacks.CarliniWagnerL2(he.ThreatModel("l2", 0.5), 100), 0.02),
        (attacks.ZOO(he.ThreatModel("l2", 0.5), 1500, coordinates_per_step=2), 0.3),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_minimum_norm_attacks_find_the_region_of_the_target(attack, relative):
    result = attack(linear, IMAGES, LABELS, targets=TARGETS)
    np.testing.assert_array_equal(predictions(result.x_nearest), TARGETS)
    assert (result.distance >= DISTANCES * (1 - 1e-6)).all()
    np.testing.assert_allclose(result.distance, DISTANCES, rtol=relative)


def test_square_finds_the_target():
    def classify(images):
        return linear(tf.reduce_mean(images, axis=[1, 2]))

    result = attacks.Square(he.ThreatModel("linf", 0.3), 200)(
        classify, np.full((2, 4, 4, 2), 0.5), LABELS, targets=TARGETS
    )
    assert result.success.all()
    np.testing.assert_array_equal(classify(result.x_adv).numpy().argmax(axis=1), TARGETS)


def test_an_ensemble_hands_the_targets_on():
    threat = he.ThreatModel("linf", 0.2)
    both = attacks.Ensemble(threat, [attacks.FGSM(threat, step_size=0.01), attacks.CWLinf(threat)])
    result = both(linear, IMAGES, LABELS, targets=TARGETS)
    assert result.broken_by.tolist() == [1, 1]
    np.testing.assert_array_equal(predictions(result.x_adv), TARGETS)


def test_feature_normalised_pgd_reaches_the_target():
    identity = keras.layers.Dense(3)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Identity(), identity])
    identity.set_weights([WEIGHTS, BIAS])
    attack = attacks.FeatureNormPGD(he.ThreatModel("linf", 0.3), 20)
    result = attack(model, IMAGES.astype("float32"), LABELS, targets=TARGETS)
    np.testing.assert_array_equal(predictions(result.x_adv), TARGETS)


@pytest.mark.parametrize(
    "name",
    ["apgd-t", "deepfool", "feature", "multi-targeted", "rays", "trades-kl", "autoattack"],
)
def test_attacks_without_a_targeted_form_say_so_before_any_work(name):
    def never_called(images):
        pytest.fail("the model was called")

    attack = attacks.get(name, he.ThreatModel("linf", 0.1))
    with pytest.raises(ValueError, match=f"{name} has no targeted form; expected targets=None"):
        attack(never_called, IMAGES, LABELS, targets=TARGETS)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ([1], r"expected integers of shape \(2,\)"),
        ([0.5, 1.0], r"expected integers of shape \(2,\)"),
        ([0, 1], "other than the labels"),
        ([-1, 1], "classes >= 0"),
        ([1, 3], r"expected 0\.\.2; received 3"),
    ],
)
def test_targets_that_do_not_fit_are_refused(targets, message):
    attack = attacks.PGD(he.ThreatModel("linf", 0.1))
    with pytest.raises(ValueError, match=message):
        attack(linear, IMAGES, LABELS, targets=np.array(targets))


def test_the_targeted_dlr_loss_needs_four_classes():
    attack = attacks.APGDDLR(he.ThreatModel("linf", 0.1))
    with pytest.raises(ValueError, match="expected at least 4; received 3"):
        attack(linear, IMAGES, LABELS, targets=TARGETS)


def test_targets_inside_another_graph():
    attack = attacks.PGD(he.ThreatModel("linf", 0.2), 5, keep="last", stop_when_broken=False)
    x_adv = tf.function(attack.perturb)(
        attacks.Victim(linear), tf.constant(IMAGES), LABELS, (0, 0), targets=tf.constant(TARGETS)
    )
    np.testing.assert_array_equal(predictions(x_adv), TARGETS)


def test_a_confident_goal_is_reached_later():
    logits = tf.constant([[0.0, 0.3, 0.1]])
    for goal in (Goal(tf.constant([0])), Goal(tf.constant([0]), tf.constant([1]))):
        reached = [bool(goal.is_reached(logits, each)) for each in (0.0, 0.15, 0.35)]
        assert reached == [True, True, False]
