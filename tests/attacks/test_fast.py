"""`fast`, the order of its targets, and AutoAttack that begins with it."""

import functools

import numpy as np
import pytest
import tensorflow as tf

import he_keras as he
from he_keras import attacks
from he_keras.attacks import Victim
from he_keras.attacks.framework.boundary import nearest_classes

# Images are not square: nothing may depend on that.
SHAPE = (4, 6, 1)
PIXELS = 24
DUAL_ORDERS = {"linf": 1, "l2": 2, "l1": np.inf}
EPSILONS = {"linf": 0.02, "l2": 0.06, "l1": 0.2}
CLASSES = (2, 3, 10, 100, 1000)

all_norms = pytest.mark.parametrize("norm", DUAL_ORDERS)
op_by_op = pytest.mark.usefixtures("op_by_op")


def threat_of(norm):
    return he.ThreatModel(norm, EPSILONS[norm])


@functools.cache
def problem(num_classes, count=16):
    """A linear classifier whose classes differ in their steepness, images, and their labels."""
    random = np.random.default_rng(num_classes)
    steepness = random.uniform(0.2, 3.0, size=num_classes)
    weights = (random.normal(size=(PIXELS, num_classes)) * steepness).astype(np.float32)
    # Far enough from the bounds that they do not count.
    images = random.uniform(0.3, 0.7, size=(count, *SHAPE)).astype(np.float32)
    logits = images.reshape(count, PIXELS) @ weights
    return weights, images, logits.argmax(axis=1).astype(np.int32)


def linear(num_classes):
    weights = problem(num_classes)[0]
    return lambda batch: tf.reshape(batch, [-1, PIXELS]) @ tf.cast(weights, batch.dtype)


def linear_distances(num_classes, norm):
    """Distance of each image to the boundary of each class; infinite for its own: `(n, classes)`"""
    weights, images, labels = problem(num_classes)
    gaps = weights[:, np.newaxis, :] - weights[:, labels, np.newaxis]
    ways = -np.einsum("np,pnc->nc", images.reshape(-1, PIXELS), gaps)
    with np.errstate(invalid="ignore"):
        found = ways / np.linalg.norm(gaps, DUAL_ORDERS[norm], axis=0)
    found[np.arange(len(labels)), labels] = np.inf
    return found


def breakable(num_classes, norm, radii=1.0):
    """The problem's images and labels, their distances, and a threat of so many median radii."""
    _, images, labels = problem(num_classes)
    distances = linear_distances(num_classes, norm).min(axis=1)
    threat = he.ThreatModel(norm, radii * float(np.median(distances)))
    return images, labels, distances, threat


@op_by_op
@all_norms
@pytest.mark.parametrize("num_classes", [2, 10, 1000])
def test_candidates_stand_in_the_order_of_their_linear_distance(num_classes, norm):
    _, images, labels = problem(num_classes)
    most = 8
    logits, classes, passes = nearest_classes(
        Victim(linear(num_classes)), tf.constant(images), tf.constant(labels), norm, most
    )
    # The gradients of all thousand classes would cost more than the attack.
    assert int(passes) == classes.shape[1] == min(most, num_classes - 1)
    likeliest = np.argsort(-np.array(logits), axis=1)[:, 1 : most + 1]
    distances = np.take_along_axis(linear_distances(num_classes, norm), likeliest, axis=1)
    expected = np.take_along_axis(likeliest, np.argsort(distances, axis=1), axis=1)
    np.testing.assert_array_equal(classes, expected)
    if num_classes > 2:
        assert np.any(expected != likeliest)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [16, None])
def test_the_order_is_the_same_under_xla(rows):
    _, images, labels = problem(10)
    specs = tf.TensorSpec((rows, *SHAPE)), tf.TensorSpec((rows,), tf.int32)

    def ordered(images, labels):
        return nearest_classes(Victim(linear(10)), images, labels, "l2", 5)[1]

    compiled = tf.function(ordered, input_signature=specs, jit_compile=True)
    expected = ordered(tf.constant(images), tf.constant(labels))
    np.testing.assert_array_equal(compiled(images, labels), expected)


@op_by_op
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_one_target_suffices_where_it_is_the_nearest(norm):
    """The first target breaks exactly what can be broken, which the likeliest one does not."""
    images, labels, distances, threat = breakable(10, norm)
    broken = {}
    for order in ("distance", "logit"):
        attack = attacks.APGDTargeted(
            threat, loss="cw", num_steps=2, num_targets=1, target_order=order
        )
        broken[order] = attack(linear(10), images, labels).success
    np.testing.assert_array_equal(broken["distance"], distances < threat.epsilon)
    assert np.all(broken["distance"] >= broken["logit"]) and broken["logit"].sum() < 8


def test_an_order_needs_a_name_and_candidates():
    with pytest.raises(ValueError, match="Unknown target_order; expected one of"):
        attacks.get("apgd-t", threat_of("l2"), target_order="nearest")
    with pytest.raises(ValueError, match="Too few candidates for the targets; expected num_cand"):
        attacks.get("apgd-t", threat_of("l2"), target_order="distance", num_candidates=3)


@all_norms
@pytest.mark.parametrize("num_classes", CLASSES)
def test_fast_is_at_most_an_eighth_of_autoattack(num_classes, norm):
    fast, whole = (attacks.get(name, threat_of(norm)) for name in ("fast", "autoattack"))
    assert fast.most_passes(num_classes) <= whole.most_passes(num_classes) / 8
    _, targeted, _ = fast.components
    settings = targeted.target_order, targeted.num_candidates, targeted.num_targets
    assert settings == ("distance", 20, 3)
    assert fast.most_passes(1000) == fast.most_passes(21)


@pytest.mark.slow
@op_by_op
@pytest.mark.parametrize(("num_classes", "norm"), [(3, "l1"), (1000, "linf")])
def test_fast_breaks_what_can_be_broken_and_nothing_else(num_classes, norm):
    images, labels, distances, threat = breakable(num_classes, norm)
    result = attacks.Fast(threat)(linear(num_classes), images, labels)
    # In l1 its steps end near the corner of the ball.
    reached = 0.95 if norm == "l1" else 0.999
    assert np.all(result.success[distances < reached * threat.epsilon])
    assert not np.any(result.success[distances > threat.epsilon])
    assert not result.warnings


@all_norms
def test_fast_first_runs_every_part_with_its_own_settings(norm):
    options = {"seed": 7, "batch_size": 9, "logit_scale": 2.0}
    for version in ("standard", "plus"):
        plain = attacks.AutoAttack(threat_of(norm), version, **options)
        first = attacks.AutoAttack(threat_of(norm), version, order="fast-first", **options)
        fast = attacks.Fast(threat_of(norm), **options)
        # The queries of fast are the first ones of Square: see the test below.
        expected = [*fast.components[:-1], *plain.components]
        assert [part.get_config() for part in first.components] == [
            part.get_config() for part in expected
        ]
        assert [type(part) for part in first.components] == [type(part) for part in expected]


def test_fast_first_is_refused_for_random_models():
    with pytest.raises(ValueError, match="expected order='standard' for version='rand'"):
        attacks.AutoAttack(threat_of("l2"), "rand", order="fast-first")


@pytest.mark.parametrize("num_classes", [2, 3])
def test_fast_first_needs_as_many_classes_as_autoattack(num_classes):
    _, images, labels = problem(num_classes)
    with pytest.raises(ValueError, match="Too few classes for autoattack-fast-first; expected at"):
        attacks.get("autoattack-fast-first", threat_of("l2"))(linear(num_classes), images, labels)


def quantised(num_classes):
    """Its gradient is zero, so that nearly everything is left to Square."""
    model = linear(num_classes)
    return lambda batch: model(tf.round(batch * 100.0) / 100.0 + 0.0 * batch)


def plain_and_first(model, images, labels, threat, **options):
    names = "autoattack", "autoattack-fast-first"
    return [attacks.get(name, threat, **options)(model, images, labels) for name in names]


def check_same_beyond_the_first(plain, first):
    """Each part does to an example that reaches it what it does in plain AutoAttack."""
    assert np.all(first.success >= plain.success)
    reached = (first.broken_by < 0) | (first.broken_by > 1)
    parts = np.where(first.broken_by > 1, first.broken_by - 2, -1)
    np.testing.assert_array_equal(parts[reached], plain.broken_by[reached])
    return parts[reached]


@pytest.mark.slow
@op_by_op
@pytest.mark.parametrize(("num_classes", "norm"), [(10, "l1"), (100, "l2")])
def test_fast_first_changes_nothing_for_what_it_leaves(num_classes, norm):
    images, labels, _, threat = breakable(num_classes, norm, radii=2.0)
    budget = {"num_steps": 3, "num_queries": 40}
    plain, first = plain_and_first(quantised(num_classes), images, labels, threat, **budget)
    # Some hold out, and Square breaks some.
    assert {-1, 3} <= set(check_same_beyond_the_first(plain, first))
