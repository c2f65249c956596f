"""Short closed forms of the attacks whose longer comparisons are slow tests."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import he_keras as he
from he_keras.attacks import PGD, Victim, carlini_wagner
from he_keras.attacks.apgd_targeted import APGDTargeted
from he_keras.attacks.carlini_wagner import CarliniWagnerL2
from he_keras.attacks.deepfool import DeepFool
from he_keras.attacks.feature_attack import FeatureAttack
from he_keras.attacks.framework import boundary
from he_keras.attacks.framework.gradients import loss_and_gradient
from he_keras.attacks.framework.result import Goal, other_classes
from he_keras.attacks.framework.rows import iterate
from he_keras.attacks.gradient_estimation import NES, SPSA
from he_keras.attacks.multi_targeted import MultiTargeted

pytestmark = pytest.mark.usefixtures("op_by_op")

SLOPE = np.array([4.0, 1.0, 0.5, 0.0])
IMAGES = np.array([[0.5, 0.4, 0.6, 0.3], [0.45, 0.55, 0.5, 0.5]])
DUAL_ORDERS = {"linf": 1, "l2": 2, "l1": np.inf}
THRESHOLD = 3.0


def two_classes(images):
    """Logits (0, f) of f = SLOPE * x - THRESHOLD, which is below 0 at both images."""
    score = tf.linalg.matvec(images, tf.constant(SLOPE, images.dtype)) - THRESHOLD
    return tf.stack([tf.zeros_like(score), score], axis=1)


def run(attack, model, images, labels):
    """What the attack itself finds, operation by operation: tracing would take longer."""
    seeds = tf.stack([tf.zeros_like(labels), tf.range(len(labels))], axis=1)
    return attack.run(Victim(model), tf.constant(images), tf.constant(labels), seeds)


def distances(norm):
    return (THRESHOLD - IMAGES @ SLOPE) / np.linalg.norm(SLOPE, DUAL_ORDERS[norm])


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_deepfool_goes_beyond_the_boundary_by_its_overshoot(norm):
    threat, labels = he.ThreatModel(norm, 0.07 if norm == "linf" else 0.093), np.zeros(2, int)
    result = DeepFool(threat, overshoot=0.25)(two_classes, IMAGES, labels)
    # The extra length of a step is 1e-4 of the width of the bounds.
    expected = 1.25 * (distances(norm) + 1e-4)
    np.testing.assert_allclose(result.distance, expected, rtol=1e-6)
    assert (expected < threat.epsilon).tolist() == result.success.tolist() == [True, False]
    # What was found too far away is not what an attack within epsilon returns.
    inside = np.asarray(threat.distance(result.x_adv, IMAGES)) <= threat.epsilon * (1 + 1e-9)
    assert inside.all()


@pytest.mark.parametrize("norm", DUAL_ORDERS)
def test_distance_of_the_nearest_linear_boundary(norm):
    random = np.random.default_rng(1)
    weights, points, labels = random.normal(size=(6, 5)), random.normal(size=(4, 6)), [0, 1, 2, 3]
    nearest, _ = boundary.nearest_boundary(
        Victim(lambda images: images @ weights),
        tf.constant(points),
        Goal(tf.constant(labels)),
        norm,
    )
    for row, label in enumerate(labels):
        gaps = (weights - weights[:, [label]]).T
        ways = [
            abs(points[row] @ gap) / np.linalg.norm(gap, DUAL_ORDERS[norm])
            for other, gap in enumerate(gaps)
            if other != label
        ]
        np.testing.assert_allclose(nearest.distance[row], min(ways), rtol=1e-9)


def test_other_classes_are_those_of_largest_logit():
    logits = tf.constant([[1.0, 4.0, 3.0, 2.0], [5.0, 4.0, 6.0, 7.0]])
    found = other_classes(logits, tf.constant([2, 3]), 2)
    assert found.numpy().tolist() == [[1, 3], [2, 0]]


def test_constants_of_the_search_by_hand():
    """A failure multiplies by ten until there is a success; then the interval is halved."""
    search = carlini_wagner.start_search(tf.zeros([1, 2]), 1.0)
    tried = []
    for success in (False, False, True, False, True):
        tried.append(float(search.const[0]))
        search = carlini_wagner.record(
            search, tf.constant([success]), tf.zeros([1, 2]), tf.constant([1.0])
        )
        search = carlini_wagner.end_round(search, tf.constant([True]), 9)
    # Fails at 1, 10 and 55, succeeds at 100 and 77.5.
    assert [*tried, float(search.const[0])] == [1.0, 10.0, 100.0, 55.0, 77.5, 66.25]


def test_carlini_wagner_finds_the_distance_to_a_hyperplane():
    attack = CarliniWagnerL2(
        he.ThreatModel("l2", 1.0),
        num_steps=100,
        binary_search_steps=1,
        initial_const=1.0,
        learning_rate=0.02,
    )
    found = run(attack, two_classes, IMAGES, [0, 0])
    np.testing.assert_allclose(found.distance, distances("l2"), rtol=0.02)


@pytest.mark.parametrize("kind", [SPSA, NES])
def test_estimate_on_a_linear_model_is_the_sum_of_its_directions(kind):
    """`(1/q) sum <g, u> u`, exactly: differences of a linear function have no error."""
    attack = kind(he.ThreatModel("linf", 0.1), num_samples=5)
    batch, seeds = tf.constant(IMAGES), tf.constant([[7, 0], [7, 1]])
    first, second = (attack.draw(index, 0, 5, batch, seeds).numpy() for index in (0, 1))
    estimate = attack.estimate(Victim(two_classes), 1, batch, Goal(tf.constant([0, 0])), seeds)
    expected = np.einsum("p,nqp,nqr->nr", SLOPE, second, second) / 5
    np.testing.assert_allclose(estimate, expected, rtol=1e-9)
    assert (first != second).any() and (first[0] != first[1]).any()


def likeliest_within_reach(images):
    """Logits of three classes: class 1 is 0.1 behind the label 0, class 2 far away."""
    return images @ [[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]] - [0.0, 0.6, 5.0]


def test_the_likeliest_target_comes_first():
    attack = MultiTargeted(he.ThreatModel("linf", 0.2), num_steps=4, num_targets=1)
    found = run(attack, likeliest_within_reach, np.full((1, 2), 0.5), [0])
    assert likeliest_within_reach(found.x_adv).numpy().argmax() == 1


def test_targeted_apgd_begins_with_the_likeliest_wrong_class():
    attack = APGDTargeted(
        he.ThreatModel("linf", 0.2), "cw", num_steps=4, num_targets=1, random_start=False
    )
    found = run(attack, likeliest_within_reach, np.full((1, 2), 0.5), [0])
    assert likeliest_within_reach(found.x_adv).numpy().argmax() == 1


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_starts_of_apgd_lie_on_the_sphere(norm):
    """Each restart and target has a start of its own."""
    threat = he.ThreatModel(norm, 0.1)
    attack, seeds = APGDTargeted(threat), tf.constant([[7, 0], [7, 1]])
    starts = [attack._start(tf.constant(IMAGES), seeds, number) for number in range(2)]
    for start in starts:
        np.testing.assert_allclose(threat.distance(start, IMAGES), 0.1, rtol=1e-9)
    assert (starts[0] != starts[1]).numpy().any(axis=1).all()


def test_the_feature_attack_approaches_its_target():
    """The targets are the images of the other label, here one for each."""
    layers = [keras.Input((2,)), keras.layers.Identity(), keras.layers.Dense(2)]
    images = np.array([[0.5, 0.5], [0.1, 0.9]], "float32")
    attack = FeatureAttack(
        he.ThreatModel("linf", 0.1),
        num_steps=1,
        step_size=0.05,
        num_targets=1,
        random_start=False,
        keep="last",
        stop_when_broken=False,
    )
    found = run(attack, keras.Sequential(layers), images, [0, 1])
    np.testing.assert_allclose(found.x_adv, [[0.45, 0.55], [0.15, 0.85]], rtol=1e-6)


def test_equal_images_have_starts_of_their_own():
    """A start belongs to the number of the example, whatever its place in the batch."""
    attack = PGD(he.ThreatModel("linf", 0.1), num_steps=1, step_size=1e-3, keep="last")
    pair, labels = IMAGES[:1].repeat(2, axis=0), np.zeros(2, int)
    first = attack(two_classes, pair, labels).x_adv
    turned = attack(two_classes, pair, labels, example_ids=np.array([1, 0])).x_adv
    np.testing.assert_array_equal(turned, first[::-1])
    assert (first[0] != first[1]).any()


def test_an_example_that_has_ended_stays_as_it_is():
    # Of 64 examples, up to three that have ended are carried along until a smaller batch fits.
    limits = tf.constant(np.random.default_rng(0).permutation(64) // 2)

    def step(_index, state, _inputs):
        count, limit = state
        return count + 1, limit

    start = tf.zeros_like(limits), limits
    counts, _ = iterate(step, start, (), 20, lambda state: state[0] < state[1])
    np.testing.assert_array_equal(counts, np.minimum(limits, 20))


def test_the_gradient_of_a_random_model_is_the_mean_over_its_passes():
    passes = tf.Variable(0.0)

    class Drifting:
        training = False

        def logits(self, images):
            return images * passes.assign_add(1.0)

    _, _, gradient = loss_and_gradient(
        Drifting(), lambda logits: tf.reduce_sum(logits, axis=1), tf.ones([1, 2]), eot_samples=4
    )
    np.testing.assert_allclose(gradient, [[2.5, 2.5]])
