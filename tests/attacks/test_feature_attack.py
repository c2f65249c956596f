"""The feature attack against the released code's results, NumPy, and its contract."""

import json

import feature_models as small
import golden_models
import keras
import numpy as np
import pytest
import tensorflow as tf
from attack_victims import Counting
from feature_models import PARITY, THREAT

import he_keras as he
from he_keras import attacks
from he_keras.attacks import Victim
from he_keras.attacks.feature_attack import FeatureAttack
from he_keras.attacks.multi_targeted import Runs

# The fast tests hold this attack to the promises of every attack and run its example.
pytestmark = pytest.mark.slow

STORED = "feature_attack_50_K10"


def approach(attack, model, images, labels, targets):
    """Runs from the images themselves towards given targets `(n, copies, ...)`."""
    victim = Victim(model)
    images, labels = tf.constant(images), tf.constant(labels, tf.int32)
    start = tf.repeat(images[:, tf.newaxis], targets.shape[1], axis=1)

    @tf.function
    def run():
        found = Runs.nothing(images)
        return attack.approach(victim, images, labels, tf.constant(targets), start, found)

    return run()


def check_golden(head, count):
    """Compares the first `count` samples with the released code's results."""
    stored = golden_models.outputs("other", head, STORED)
    allowed = golden_models.tolerances(head, STORED)
    images, labels = golden_models.images(), golden_models.labels()[:count]
    attack = FeatureAttack(
        he.ThreatModel("linf", "8/255"), 50, "1/255", targets_at_once=10, keep="last"
    )
    targets = images[stored["target_indices"][:count]]
    model = golden_models.classifier(head)
    found = approach(attack, model, images[:count], labels, targets)
    x_adv = found.best.point.numpy()
    logits = golden_models.float64_logits(head, x_adv)
    flags = logits.argmax(axis=1) != labels
    for name in ("success", "success_checking_last_iterate"):
        assert np.sum(flags != stored[name][:count]) <= allowed["flags_max_mismatch"]
    np.testing.assert_array_equal(found.best.broken.numpy(), flags)
    # The released code calls the model once for each step that it tries.
    calls = found.backward_passes.numpy() // 10
    assert np.sum(calls != stored["forward_calls"][:count]) <= allowed["flags_max_mismatch"]
    error = np.abs(golden_models.cross_entropy(logits, labels) - stored["ce"][:count])
    assert np.quantile(error, 0.95) < allowed["ce_abs_p95"]
    number = min(count, len(stored["x_adv"]))
    moved = np.abs(x_adv[:number] - stored["x_adv"][:number]) > 1e-5
    assert moved.mean() <= allowed["pix_frac_mean"]
    difference = (x_adv - images[:count]).reshape(count, -1).astype(np.float64)
    for norm, order in (("linf", np.inf), ("l2", 2)):
        length = np.linalg.norm(difference, order, axis=1)
        np.testing.assert_allclose(length, stored[norm][:count], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("head", golden_models.HEADS)
def test_released_results_on_a_few_images(head):
    check_golden(head, 12)


@pytest.mark.slow
@pytest.mark.parametrize("head", golden_models.HEADS)
def test_released_results(head):
    check_golden(head, 64)


def numpy_run(x, target, num_steps, step_size, norm, epsilon):
    """The iterates of one copy, `(1, pixels)`, towards one target."""
    point, goal = x.astype(np.float64), small.features(target)
    iterates = [point]
    for _ in range(num_steps):
        features = small.features(point)
        length = np.linalg.norm(features) * np.linalg.norm(goal)
        cosine = (features * goal).sum() / length
        gradient = -(goal / length - cosine * features / (features**2).sum())
        step = step_size * small.unit(small.pull_back(point, gradient), norm)
        point = small.project(point - step, x, norm, epsilon)
        iterates.append(point)
    return iterates


@pytest.mark.parametrize(("norm", "epsilon"), [("linf", 0.1), ("l2", 0.4)])
@pytest.mark.parametrize("keep", ["last", "best"])
def test_every_copy_is_run_as_in_numpy(norm, epsilon, keep):
    images, labels = small.images(6), small.labels(6)
    targets = small.images(24)[np.arange(18).reshape(6, 3) + 6]
    threat, step_size = he.ThreatModel(norm, epsilon), epsilon / 4
    options = {**PARITY, "keep": keep, "num_targets": 3, "targets_at_once": 3}
    attack = FeatureAttack(threat, 5, step_size, **options)
    found = approach(attack, small.functional(), images, labels, targets)
    for row, label in enumerate(labels):
        clean = images[row : row + 1]
        runs = [
            numpy_run(clean, target[np.newaxis], 5, step_size, norm, epsilon)
            for target in targets[row]
        ]
        candidates = [run[-1] for run in runs] if keep == "last" else sum(runs, [])
        scores = np.array([small.margins(small.logits(x), [label])[0] for x in candidates])
        if keep == "last":
            wrong = np.flatnonzero(scores < 0)
            chosen = wrong[0] if len(wrong) else 0
            np.testing.assert_allclose(found.best.point[row], candidates[chosen][0], atol=1e-5)
        elif scores.min() > 0:
            np.testing.assert_allclose(-found.best.strength[row], scores.min(), atol=1e-5)
        assert bool(found.best.broken[row]) == (scores.min() < 0)
    assert not found.best.broken.numpy().all()
    np.testing.assert_array_equal(found.backward_passes, 3 * 5)
    np.testing.assert_array_equal(found.forward_passes, 3 * (5 + 2))


def identity_model(kernel):
    """Its features are the pixels."""
    head = keras.layers.Dense(2, use_bias=False)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Identity(), head])
    head.set_weights([np.array(kernel, np.float32)])
    return model


def test_the_last_iterate_is_scored():
    """One step reaches the other class: the released loop would end without noticing."""
    images = np.array([[0.55, 0.5], [0.2, 0.9]], np.float32)
    attack = FeatureAttack(THREAT, 1, 0.1, num_targets=1, random_start=False)
    result = attack(identity_model(np.eye(2)), images, np.array([0, 1]))
    assert result.success.tolist() == [True, False]
    np.testing.assert_allclose(result.x_adv[0], [0.45, 0.6], atol=1e-6)
    # Clean check, one target, one step, one score, the score of the result.
    np.testing.assert_array_equal(result.forward_passes, 5)
    np.testing.assert_array_equal(result.backward_passes, 1)


def test_targets_have_other_labels_and_are_drawn_uniformly():
    attack = FeatureAttack(THREAT, num_targets=400)
    sorted_labels = np.repeat([0, 2, 3, 7], [5, 10, 1, 4]).astype(np.int32)
    labels = np.repeat([0, 2, 3, 7, 5], 50).astype(np.int32)
    seeds = np.stack([np.full(250, 3), np.arange(250)], axis=1).astype(np.int32)
    drawn = attack._draw_targets(tf.constant(labels), tf.constant(sorted_labels), seeds).numpy()
    assert drawn.shape == (250, 400)
    for label in (0, 2, 3, 7, 5):
        counts = np.bincount(drawn[labels == label].ravel(), minlength=20)
        others = sorted_labels != label
        assert counts[~others].sum() == 0
        expected = counts.sum() / others.sum()
        np.testing.assert_allclose(counts[others], expected, rtol=0.12)
    alone = attack._draw_targets(labels[7:8], tf.constant(sorted_labels), seeds[7:8]).numpy()
    np.testing.assert_array_equal(alone[0], drawn[7])
    assert np.mean(drawn[0] == drawn[1]) < 0.2


def test_batches_seeds_and_given_targets():
    model, images, labels = small.functional(), small.images(), small.labels()
    attack = FeatureAttack(he.ThreatModel("linf", 0.05), 4, num_targets=3)
    whole = small.check_batches_restarts_and_seeds(attack, model, images, labels)
    assert 0 < whole.success.sum() < 24
    # A part of the data alone: alike, with the targets of the whole.
    attack.use_targets(images, labels)
    assert attack.get_config()["target_images"] is None
    given = FeatureAttack(
        attack.threat, 4, num_targets=3, target_images=images, target_labels=labels
    )
    for each in (attack, given):
        part = each(model, images[5:6], labels[5:6], example_ids=np.array([5]))
        np.testing.assert_allclose(part.x_adv[0], whole.x_adv[5], atol=1e-5)


def test_side_by_side_or_one_after_the_other():
    model, images, labels = small.functional(), small.images(), small.labels()
    results = {}
    for at_once in (1, 3):
        options = {"num_targets": 6, "targets_at_once": at_once, "stop_when_broken": False}
        attack = FeatureAttack(he.ThreatModel("linf", 0.05), 4, **options)
        results[at_once] = attack(model, images, labels)
    for result in results.values():
        np.testing.assert_array_equal(result.success, results[1].success)
        held = ~result.success
        np.testing.assert_allclose(result.margin[held], results[1].margin[held], atol=1e-4)
        np.testing.assert_array_equal(result.backward_passes, 6 * 4)
        np.testing.assert_array_equal(result.forward_passes, 1 + 6 * (4 + 2) + 1)
    assert 0 < held.sum() < 24


def test_later_calls_have_targets_of_their_own_and_no_new_trace():
    images, labels = small.images(), small.labels()

    class Recorded(keras.layers.Layer):
        traced = 0

        def call(self, features):
            Recorded.traced += 1
            return features

    network = keras.Sequential([keras.Input((small.PIXELS,)), small.body(), Recorded()])
    model = he.HEAdversarialModel(network, small.head())
    attack = FeatureAttack(THREAT, 3, num_targets=2, random_start=False, stop_when_broken=False)
    whole = attack(model, images, labels)
    traced = Recorded.traced
    part = attack(model, images[:16], labels[:16])
    # Only the check that the model is a classifier runs in Python again: on both paths.
    assert Recorded.traced == traced + 2
    assert np.abs(part.x_adv - whole.x_adv[:16]).max() > 1e-3
    attack(model, images.astype(np.float64), labels)
    again = attack(model, images, labels)
    np.testing.assert_array_equal(again.x_adv, whole.x_adv)
    # Draws count on labels in order, each still with its own image.
    stored_images, stored_labels = attack._stored[(small.PIXELS,), "float32"]
    assert np.any(np.diff(labels) < 0) and np.all(np.diff(stored_labels.numpy()) >= 0)
    order = np.argsort(labels, kind="stable")
    np.testing.assert_array_equal(stored_images.numpy(), images[order])


def test_within_another_function_the_batch_offers_the_targets():
    images, labels = tf.constant(small.images()), tf.constant(small.labels(), tf.int32)
    attack = FeatureAttack(THREAT, 3, num_targets=2)
    victim = Victim(small.functional())
    for seeds in (tf.constant([1, 2]), tf.stack([tf.range(24), tf.range(24)], axis=1)):
        x_adv = tf.function(attack.perturb)(victim, images, labels, seeds).numpy()
        assert np.abs(x_adv - images).max() <= 0.1 + 1e-6
        assert small.margins(small.logits(x_adv), labels).mean() < (
            small.margins(small.logits(images), labels).mean() - 0.1
        )


def test_features_of_zero_length_stay_finite():
    """Black images have no features: no direction to go, and no NaN."""
    images = np.array([[0.0, 0.0], [0.9, 0.1], [0.1, 0.9]], np.float32)
    attack = FeatureAttack(THREAT, 3, num_targets=4, random_start=False)
    result = attack(identity_model(np.eye(2)), images, np.array([0, 0, 1]))
    assert np.isfinite(result.x_adv).all()
    assert not result.non_finite.any()


BAD = {
    "divisor": ({"num_targets": 10, "targets_at_once": 3}, "expected a divisor of num_targets"),
    "no steps": ({"num_steps": 0}, "Invalid num_steps"),
    "no targets": ({"num_targets": 0}, "Invalid num_targets"),
    "none at once": ({"targets_at_once": 0}, "Invalid targets_at_once"),
    "step": ({"step_size": -1.0}, "Invalid step_size; expected > 0"),
    "labels alone": ({"target_labels": [0]}, "Invalid images; expected floating-point"),
    "too few": ({"target_images": np.zeros((2, 8)), "target_labels": [0]}, "Invalid labels"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name):
    options, message = BAD[name]
    with pytest.raises(ValueError, match=message) as error:
        FeatureAttack(THREAT, **options)
    assert "received" in str(error.value)


def test_examples_without_targets_are_refused_before_the_model_runs():
    model = Counting()
    for count in (1, 5):
        with pytest.raises(ValueError, match="No target for some examples.*received only label 2"):
            FeatureAttack(THREAT)(model, small.images()[:count], np.full(count, 2))
    other = FeatureAttack(THREAT, target_images=np.zeros((2, 7), np.float32), target_labels=[0, 1])
    with pytest.raises(ValueError, match=r"expected \(n, 8\); received \(2, 7\)"):
        other(model, small.images(), small.labels())
    assert model.calls == 0
    with pytest.raises(ValueError, match="works on features"):
        FeatureAttack(THREAT)(lambda x: x[:, :4] - 1.0, small.images(), small.labels())


def test_configuration():
    given = {"target_images": small.images(3), "target_labels": [0, 1, 2]}
    for options in ({}, {"num_targets": 4, "targets_at_once": 2, **given}):
        attack = FeatureAttack(THREAT, 7, "1/255", random_start=0.01, **options)
        config = json.loads(json.dumps(attack.get_config()))
        again = FeatureAttack.from_config(config)
        assert again.get_config() == config
    assert again.targets_at_once == 2 and len(again.get_config()["target_images"]) == 3
    named = attacks.get("feature-20", he.ThreatModel("linf", "8/255"))
    assert (named.num_steps, named.num_targets) == (20, 10)
    assert named.step_size == pytest.approx(1 / 255)
