"""The multi-targeted attack against NumPy, closed forms and APGD's results; its contract."""

import functools

import feature_models as small
import golden_models
import numpy as np
import pytest
import tensorflow as tf
from attack_victims import Counting
from feature_models import PARITY, THREAT

import he_keras as he
from he_keras import attacks
from he_keras.attacks import PGD, Victim
from he_keras.attacks.multi_targeted import MultiTargeted

# The fast tests hold this attack to the promises of every attack and run its example.
pytestmark = pytest.mark.slow

CLASSES = small.CLASSES


def logit_difference_gradient(x, target, label):
    kernel = small.arrays()[1].astype(np.float64)
    return small.pull_back(x, (kernel[:, target] - kernel[:, label])[np.newaxis])


def adam_run(x, target, label, num_steps, rate, threat):
    """The iterates of Adam towards one target, for one image `(1, pixels)`."""
    point, mean, square = x.astype(np.float64), 0.0, 0.0
    iterates = [point]
    for count in range(1, num_steps + 1):
        gradient = logit_difference_gradient(point, target, label)
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.999 * square + 0.001 * gradient**2
        step = (mean / (1 - 0.9**count)) / (np.sqrt(square / (1 - 0.999**count)) + 1e-8)
        point = small.project(point + rate * step, x, threat.norm, threat.epsilon)
        iterates.append(point)
    return iterates


def sign_run(x, target, label, num_steps, rate, threat):
    point = x.astype(np.float64)
    iterates = [point]
    for _ in range(num_steps):
        step = small.unit(logit_difference_gradient(point, target, label), threat.norm)
        point = small.project(point + rate * step, x, threat.norm, threat.epsilon)
        iterates.append(point)
    return iterates


RUNS = {"adam": (adam_run, "learning_rate"), "sign": (sign_run, "step_size")}


@pytest.mark.parametrize("optimizer", RUNS)
@pytest.mark.parametrize(("norm", "epsilon"), [("linf", 0.1), ("l2", 0.3)])
@pytest.mark.parametrize("keep", ["last", "best"])
def test_every_target_is_run_as_in_numpy(optimizer, norm, epsilon, keep):
    threat = he.ThreatModel(norm, epsilon)
    images, labels = small.images(8), small.labels(8)
    run, rate_name = RUNS[optimizer]
    options = {**PARITY, "keep": keep, "optimizer": optimizer, rate_name: 0.04}
    result = MultiTargeted(threat, 5, **options)(small.functional(), images, labels)
    for row, label in enumerate(labels):
        candidates = []
        for target in set(range(CLASSES)) - {label}:
            iterates = run(images[row : row + 1], target, label, 5, 0.04, threat)
            candidates += iterates if keep == "best" else iterates[-1:]
        scores = [small.margins(small.logits(each), [label])[0] for each in candidates]
        assert np.min(scores) < scores[0] - 0.05 or keep == "last"
        np.testing.assert_allclose(result.margin[row], np.min(scores), atol=1e-4)
        nearest = candidates[int(np.argmin(scores))][0]
        np.testing.assert_allclose(result.x_adv[row], nearest, atol=1e-4)
    # The clean check, the ranking, per target 5 steps and a score, and the score of the result.
    np.testing.assert_array_equal(result.forward_passes, 2 + (CLASSES - 1) * 6 + 1)
    np.testing.assert_array_equal(result.backward_passes, (CLASSES - 1) * 5)


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_the_optimum_on_a_linear_model(norm):
    """The smallest margin within the ball is that towards the best class, by the dual norm."""
    random = np.random.default_rng(0)
    weights = random.normal(size=(6, 5)).astype(np.float32)
    images = random.uniform(0.4, 0.6, size=(20, 6)).astype(np.float32)
    logits = images @ weights
    labels = logits.argmax(axis=1)
    dual = {"linf": 1, "l2": 2, "l1": np.inf}[norm]
    optimum = np.full(len(labels), np.inf)
    for target in range(5):
        change = np.linalg.norm(weights[:, [target]] - weights[:, labels], dual, axis=0)
        value = logits[np.arange(20), labels] - logits[:, target] - 0.05 * change
        optimum = np.where(labels == target, optimum, np.minimum(optimum, value))
    # Signs reach the corner from everywhere; elsewhere only the image itself lies on the way.
    for optimizer in ("sign", "adam") if norm == "linf" else ("sign",):
        options = {"optimizer": optimizer, "stop_when_broken": False}
        options["random_start"] = norm == "linf"
        attack = MultiTargeted(he.ThreatModel(norm, 0.05), 20, **options)
        result = attack(lambda batch: batch @ weights, images, labels)
        np.testing.assert_allclose(result.margin, optimum, atol=1e-4)
        np.testing.assert_array_equal(result.success, optimum < 0)


def three_classes(batch):
    """Class 1 is near for the first pixel, class 2 for the second."""
    return tf.stack([0.0 * batch[:, 0], batch[:, 0] - 0.6, 2.0 * batch[:, 1] - 1.5], axis=1)


def test_targets_are_tried_in_the_order_of_their_clean_logits():
    # Class 1 comes first (-0.1 against -0.3) but is out of reach; class 2 is within reach.
    images = np.array([[0.5, 0.6], [0.55, 0.3], [0.3, 0.72]], np.float32)
    labels = np.zeros(3, int)
    attack = functools.partial(MultiTargeted, he.ThreatModel("linf", 0.09), 4, random_start=False)
    whole = attack()(three_classes, images, labels)
    # Image 1: towards class 1, broken at the second iterate. Image 2: class 2 comes first.
    assert whole.success.tolist() == [False, True, True]
    np.testing.assert_array_equal(whole.backward_passes, [8, 2, 2])
    # Clean check, ranking, steps and a score for each run, score of the result.
    np.testing.assert_array_equal(whole.forward_passes, [2 + 2 * 5 + 1, 2 + 3 + 1, 2 + 3 + 1])
    reach = functools.partial(MultiTargeted, he.ThreatModel("linf", 0.16), 4, random_start=False)
    images = np.array([[0.4, 0.62], [0.4, 0.62]], np.float32)
    one = reach(num_targets=1, step_size=0.05, optimizer="sign")(three_classes, images, labels[:2])
    two = reach(num_targets=2, step_size=0.05, optimizer="sign")(three_classes, images, labels[:2])
    assert not one.success.any() and two.success.all()
    np.testing.assert_array_equal(one.backward_passes, 4)
    assert np.all(two.backward_passes > 4)


def test_the_scale_of_the_logits_changes_nothing():
    model = small.functional()
    images, labels = small.images(), small.labels()
    for factor, optimizer in ((1e-3, "sign"), (1e3, "adam")):
        attack = MultiTargeted(he.ThreatModel("linf", 0.03), 6, optimizer=optimizer)
        plain = attack(model, images, labels)
        scaled = attack(lambda batch, by=factor: by * model(batch), images, labels)
        np.testing.assert_array_equal(scaled.success, plain.success)
        moved = np.abs(scaled.x_adv - plain.x_adv).max(axis=1) > 1e-3
        assert moved.mean() < 0.1
    assert 0 < plain.success.sum() < 24


def test_two_classes_and_a_thousand():
    random = np.random.default_rng(1)
    images = random.uniform(0.3, 0.7, size=(6, 5)).astype(np.float32)
    for num_classes, others in ((2, 1), (1000, 999)):
        weights = random.normal(size=(5, num_classes)).astype(np.float32)
        labels = (images @ weights).argmax(axis=1)
        model = Counting(lambda batch, by=weights: batch @ by)
        # No point can break the example within so small a ball: all targets are run.
        result = MultiTargeted(he.ThreatModel("linf", 1e-7), 1)(model, images, labels)
        np.testing.assert_array_equal(result.backward_passes, others)
        calls = model.calls
        few = MultiTargeted(he.ThreatModel("linf", 1e-7), 1, num_targets=3)
        np.testing.assert_array_equal(
            few(model, images, labels).backward_passes, min(3, num_classes - 1)
        )
        # One trace, whatever the number of targets.
        assert calls <= 8


def test_batches_seeds_and_restarts():
    model, images, labels = small.functional(), small.images(), small.labels()
    attack = MultiTargeted(he.ThreatModel("linf", 0.03), 2, learning_rate=0.01)
    whole = small.check_batches_restarts_and_seeds(attack, model, images, labels)
    assert 4 < (~whole.success).sum() < 24
    # One seed for a whole batch, as a training step passes it.
    single = tf.function(attack.perturb)(
        Victim(model), tf.constant(images), tf.constant(labels), tf.constant([3, 4])
    )
    assert np.abs(single - images).max() <= 0.03 + 1e-6
    assert np.abs(single - whole.x_adv).max() > 1e-3


def test_each_target_has_its_own_start():
    """With a step of zero gradient every run stays at its start; the best of them is returned."""
    images = np.full((30, 2), 0.5, np.float32)
    labels = np.zeros(30, int)

    def model(batch):
        # The value is visible, the slope is not.
        value = tf.stop_gradient(tf.reduce_sum(batch, axis=1, keepdims=True))
        slope = 0.0 * tf.reduce_sum(batch, axis=1, keepdims=True)
        return tf.concat([3.0 - value + slope] + 9 * [0.0 * value], axis=1)

    one = MultiTargeted(THREAT, 1, num_targets=1)(model, images, labels)
    nine = MultiTargeted(THREAT, 1)(model, images, labels)
    assert np.isfinite(nine.x_adv).all()
    assert nine.margin.mean() < one.margin.mean() - 0.05
    held = np.abs(one.x_adv - nine.x_adv).max(axis=1) == 0.0
    assert held.mean() < 0.4


def test_nan_zero_gradients_and_double_precision():
    images, labels = small.images(), small.labels()
    model = small.functional()

    def breaks(batch):
        return tf.where(tf.reduce_any(batch > 0.98, axis=1, keepdims=True), np.nan, model(batch))

    result = MultiTargeted(THREAT, 3)(breaks, images, labels)
    assert np.isfinite(result.x_adv).all() and result.non_finite.any()
    double = MultiTargeted(THREAT, 3, random_start=False)(model, images.astype(np.float64), labels)
    single = MultiTargeted(THREAT, 3, random_start=False)(model, images, labels)
    assert double.x_adv.dtype == np.float64
    np.testing.assert_allclose(double.x_adv, single.x_adv, atol=1e-4)


@pytest.mark.parametrize("head", ["he", pytest.param("linear", marks=pytest.mark.slow)])
def test_as_strong_as_apgd_towards_all_targets(head):
    """Stored: 9 targets of 100 steps each (32 and 36 broken); PGD-20 alone breaks 26."""
    stored = golden_models.outputs("apgd", head, "apgd_t")["success"]
    images, labels = golden_models.images(), golden_models.labels()
    attack = attacks.get("multi-targeted-20", he.ThreatModel("linf", "8/255"))
    model = golden_models.classifier(head)
    result = attack(model, images, labels)
    assert np.sum(result.success & ~stored) <= 1
    assert np.sum(stored & ~result.success) <= 2
    plain = PGD(attack.threat, 20, step_size="2/255")(model, images, labels)
    assert result.success.sum() >= plain.success.sum() + 3


BAD = {
    "optimizer": ({"optimizer": "sgd"}, "Unknown optimizer; expected one of"),
    "no steps": ({"num_steps": 0}, "Invalid num_steps"),
    "no targets": ({"num_targets": 0}, "Invalid num_targets"),
    "rate": ({"learning_rate": 0.0}, "Invalid learning_rate; expected > 0"),
    "rate NaN": ({"learning_rate": float("nan")}, "Invalid learning_rate"),
    "step of Adam": ({"step_size": 0.1}, "Adam has no step size; expected learning_rate"),
    "step": ({"step_size": -0.1, "optimizer": "sign"}, "Invalid step_size; expected > 0"),
    "start": ({"random_start": "corner"}, "Invalid random_start"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name):
    options, message = BAD[name]
    with pytest.raises(ValueError, match=message) as error:
        MultiTargeted(THREAT, **options)
    assert "received" in str(error.value)


def test_configuration():
    for options in ({}, {"optimizer": "sign", "step_size": "1/255", "num_targets": 3}):
        attack = MultiTargeted(THREAT, 7, random_start=0.01, **options)
        config = attack.get_config()
        assert MultiTargeted.from_config(config).get_config() == config
        assert config["num_steps"] == 7
    assert MultiTargeted(THREAT).learning_rate == 0.1
    # An evaluation's step size goes to attacks that have one.
    assert not hasattr(MultiTargeted(THREAT), "step_size")
    assert MultiTargeted(THREAT, 10, optimizer="sign").step_size == pytest.approx(0.025)
