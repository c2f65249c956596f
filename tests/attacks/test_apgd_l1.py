"""APGD in l1: the NumPy version, the best use of a budget on a linear model, larger radii."""

from collections import Counter

import numpy as np
import pytest
import tensorflow as tf
from apgd_problem import EXAMPLES, NETWORK, problem, run
from apgd_reference import CLASSES, PIXELS, SHAPE, apgd, trace
from attack_victims import seeds_of

import he_keras as he
from he_keras.attacks import Victim
from he_keras.attacks.apgd import APGD
from he_keras.attacks.apgd_targeted import APGDTargeted
from he_keras.attacks.framework.result import Goal

# The fast tests hold this attack to the promises of every attack and run its example.
pytestmark = pytest.mark.slow

EPSILON = 2.0
THREAT = he.ThreatModel("l1", EPSILON)


@pytest.mark.parametrize(
    ("loss", "num_steps"), [("ce", 100), ("cw", 50), ("ce", 12), ("dlr", 100), ("dlr-targeted", 50)]
)
def test_every_iterate_is_that_of_the_numpy_version(loss, num_steps):
    images, labels, starts = problem()
    targets = (labels + 1) % CLASSES if loss == "dlr-targeted" else None
    attack_class = APGD if targets is None else APGDTargeted
    inputs = (images, labels) if targets is None else (images, labels, targets)
    attack = attack_class(THREAT, loss, num_steps, stop_when_broken=False)
    ours = trace(attack, NETWORK, tuple(map(tf.constant, inputs)), starts)
    reasons = Counter()
    for row, (image, start) in enumerate(zip(images, starts, strict=True)):
        evaluate = NETWORK.evaluator(loss, labels[row], None if targets is None else targets[row])
        expected = apgd(evaluate, image, start, "l1", EPSILON, num_steps)
        reasons.update(expected["reasons"])
        np.testing.assert_allclose(ours["points"][:, row], expected["points"], atol=1e-8)
        np.testing.assert_allclose(ours["eta"][:, row], expected["eta"], rtol=1e-12)
        # A DLR of 100 has a denominator of 0.01.
        np.testing.assert_allclose(ours["best"][:, row], expected["best"], atol=1e-6, rtol=1e-6)
        assert ours["broken"][row] == expected["broken"]
    assert reasons["sparser"] and reasons["same"]


def linear_problem(dtype=np.float64):
    """Two classes, images with pixels at the bounds, and the best gain within the budget."""
    random = np.random.default_rng(7)
    direction = random.normal(size=SHAPE)
    images = np.clip(random.uniform(-0.2, 1.2, size=(6, *SHAPE)), 0, 1).astype(dtype)

    def model(batch):
        gain = tf.tensordot(batch, tf.constant(direction, batch.dtype), 3)
        return tf.stack([50 - gain, gain - 50], axis=1)

    best = []
    for image in images:
        # The budget goes to the steepest pixels first, into each as much as its bounds leave room.
        room = np.where(direction > 0, 1 - image, image).ravel()
        gain, left = 0.0, EPSILON
        for pixel in np.argsort(-np.abs(direction).ravel()):
            taken = min(room[pixel], left)
            gain, left = gain + taken * np.abs(direction).ravel()[pixel], left - taken
        best.append(gain)
    return model, direction, images, np.array(best)


def check_gains(gains, best):
    """Equal steps in a few pixels need not end at the optimum, but most examples get there."""
    assert np.median(gains / best) > 0.997
    assert np.all(gains >= 0.9 * best)


@pytest.mark.parametrize("larger_epsilons", [False, True])
@pytest.mark.parametrize("random_start", [True, False])
def test_comes_near_the_optimum_of_a_linear_model(larger_epsilons, random_start):
    model, direction, images, best = linear_problem()
    attack = APGD(THREAT, "cw", 100, larger_epsilons=larger_epsilons, random_start=random_start)
    x_adv = run(attack, model, np.zeros(6, np.int32), images).x_adv
    change = x_adv - images
    assert np.abs(change).reshape(6, -1).sum(axis=1).max() <= EPSILON * (1 + 1e-9)
    assert x_adv.min() >= 0 and x_adv.max() <= 1
    gains = np.tensordot(change, direction, 3)
    assert np.all(gains <= best + 1e-9)
    check_gains(gains, best)


def test_single_precision_comes_near_it_too():
    model, direction, images, best = linear_problem(np.float32)
    result = APGD(THREAT, "cw", 100)(model, images, np.zeros(6, int))
    gains = np.tensordot(result.x_adv - images, direction, 3)
    check_gains(gains, best)
    assert result.distance.max() <= EPSILON * (1 + 1e-5)


def test_the_first_step_goes_along_a_fifth_of_the_pixels():
    model, direction, images, _ = linear_problem()
    attack = APGD(THREAT, "cw", 5, random_start=False)
    inputs = tf.constant(images), tf.zeros(6, tf.int32)
    points = trace(attack, model, inputs, images)["points"]
    moved = np.abs(points[1] - images) > 1e-12
    largest = np.argsort(-np.abs(direction).ravel())[:5]
    # A fifth of 24 pixels, rounded up; those at the bound stay where they are.
    assert moved.reshape(6, -1)[:, largest].any()
    others = np.setdiff1d(np.arange(PIXELS), largest)
    assert not moved.reshape(6, -1)[:, others].any()


def by_hand(loss, start, labels, num_steps):
    """The NumPy version with radii of 3, 2 and 1 epsilon."""
    images = problem()[0]
    results = []
    for row, image in enumerate(images):
        point = start[row]
        for factor, steps in zip((3, 2, 1), num_steps, strict=True):
            found = apgd(
                NETWORK.evaluator(loss, labels[row]),
                image,
                point,
                "l1",
                factor * EPSILON,
                steps,
                continues=True,
            )
            point = found["final"]
        results.append(found)
    return results


@pytest.mark.parametrize(("num_steps", "split"), [(100, (30, 30, 40)), (12, (4, 4, 4))])
def test_larger_radii_come_first(num_steps, split):
    images, labels, starts = problem()
    attack = APGD(THREAT, "ce", num_steps, larger_epsilons=True, stop_when_broken=False)
    assert tuple(each.num_steps for each in attack.rules) == split
    inputs = tf.constant(images), Goal(tf.constant(labels))
    state = attack.search(Victim(NETWORK), inputs, tf.constant(starts))
    expected = by_hand("ce", starts, labels, split)
    for row, found in enumerate(expected):
        np.testing.assert_allclose(state.best.point[0][row], found["final"], atol=1e-7)
        np.testing.assert_allclose(state.adversarial[row], found["adversarial"], atol=1e-7)
        assert state.broken.numpy()[row] == found["broken"]
    np.testing.assert_array_equal(state.passes, num_steps + 3)


@pytest.mark.parametrize(("num_steps", "split"), [(3, (1, 1, 1)), (4, (1, 1, 2)), (5, (2, 2, 1))])
def test_every_radius_has_a_step(num_steps, split):
    attack = APGD(THREAT, num_steps=num_steps, larger_epsilons=True)
    assert tuple(each.num_steps for each in attack.rules) == split
    radii = [each.threat.epsilon for each in attack.rules]
    np.testing.assert_allclose(radii, [3 * EPSILON, 2 * EPSILON, EPSILON])


@pytest.mark.parametrize("attack_class", [APGD, pytest.param(APGDTargeted, marks=pytest.mark.slow)])
def test_only_the_smallest_radius_counts_as_broken(attack_class):
    """Points outside the ball are misclassified early on; no example may end there."""
    images, labels, _ = problem()
    threat = he.ThreatModel("l1", 0.4)
    attack = attack_class(threat, num_steps=20, larger_epsilons=True)
    result = attack(NETWORK, images, labels)
    wide = APGD(he.ThreatModel("l1", 1.2), num_steps=20)(NETWORK, images, labels)
    assert (wide.success & ~result.success).sum() > 1
    assert result.distance.max() <= 0.4 * (1 + 1e-6)
    attacked = result.backward_passes > 0
    broken = attacked & result.success
    assert broken.any()
    # Both larger radii are run to their ends: seven passes each.
    assert result.backward_passes[broken].min() > 14
    runs = 1 if attack_class is APGD else CLASSES - 1
    np.testing.assert_array_equal(result.backward_passes[~result.success], 23 * runs)


def test_the_random_start_is_projected_gaussian_noise():
    images, labels, _ = problem()
    attack = APGD(THREAT, num_steps=1)
    seeds = tf.constant(seeds_of(EXAMPLES))
    noise = attack._start(tf.constant(images), seeds).numpy() - images
    assert abs(noise.mean()) < 0.2 and abs(noise.std() - 1) < 0.15
    (rule,), starts = attack.rules, tf.constant(images + noise)
    first = attack.initial_state(rule, tf.constant(images), starts).point
    distance = np.abs(first - images).reshape(EXAMPLES, -1).sum(axis=1)
    np.testing.assert_allclose(distance, EPSILON, rtol=1e-9)


def test_too_few_steps_for_three_radii():
    message = "Too few steps for larger_epsilons; expected at least 3; received num_steps=2"
    with pytest.raises(ValueError, match=message):
        APGD(THREAT, num_steps=2, larger_epsilons=True)
