"""FAB and FAB-T against a NumPy version and exact distances; stored outputs: test_fab_goldens."""

import fab_reference
import numpy as np
import pytest
import tensorflow as tf
from attack_victims import Counting, images, labels, linear, seeds_of

import he_keras as he
from he_keras.attacks import Victim, get
from he_keras.attacks.fab import FAB, FABT
from he_keras.attacks.framework.boundary import nearest_boundary
from he_keras.attacks.framework.result import Goal

# The fast tests hold this attack to the promises of every attack and run its example.
pytestmark = pytest.mark.slow

NORMS = ("linf", "l2", "l1")
CLASSES, PIXELS = 4, 30
#: So small that the framework cannot shorten what was found by projecting it.
TINY = {norm: he.ThreatModel(norm, 1e-4) for norm in NORMS}
all_norms = pytest.mark.parametrize("norm", NORMS)


def problem(seed, low=0.0, high=1.0, classes=CLASSES):
    """A linear model, and images with their predictions as labels; float64."""
    random = np.random.default_rng(seed)
    weights = random.normal(size=(PIXELS, classes))
    x = random.uniform(low, high, size=(12, PIXELS))
    bias = -0.5 * weights.sum(axis=0)
    return weights, bias, x, (x @ weights + bias).argmax(axis=1)


def classifier(weights, bias):
    return lambda batch: tf.linalg.matmul(batch, tf.constant(weights)) + tf.constant(bias)


@all_norms
@pytest.mark.parametrize("targeted", [False, True], ids=["fab", "fab-t"])
@pytest.mark.parametrize(
    ("num_steps", "settings"),
    [(3, {"alpha_max": 0.05, "eta": 1.3, "beta": 0.4}), (25, {})],
    ids=["other", "default"],
)
def test_equals_the_numpy_version(norm, num_steps, settings, targeted):
    weights, bias, x, y = problem(0)
    x[:, ::5] = np.round(x[:, ::5])
    y = (x @ weights + bias).argmax(axis=1)
    reference = fab_reference.LinearFAB(weights, bias, norm, num_steps, **settings)
    attack = FAB(TINY[norm], num_steps, num_targets=2 if targeted else None, **settings)
    result = attack(classifier(weights, bias), x, y)
    for row, (image, label) in enumerate(zip(x, y, strict=True)):
        targets = np.argsort(-(image @ weights + bias))[1:3] if targeted else [None]
        runs = [reference.run(image, label, target) for target in targets]
        _, best, distance = min(runs, key=lambda run: run[2])
        assert np.isfinite(distance)
        np.testing.assert_allclose(result.distance[row], distance, rtol=1e-9)
        np.testing.assert_allclose(result.x_nearest[row], best, atol=1e-9)


@all_norms
@pytest.mark.parametrize("low", [0.45, -0.5], ids=["inside", "on-the-bounds"])
def test_reaches_the_distance_of_a_linear_boundary(norm, low):
    for name, classes in (("fab-60", 2), ("fab-t-60", 3)):
        weights, bias, x, _ = problem(1, low, 1 - low, classes)
        x = np.clip(x, 0, 1)
        y = (x @ weights + bias).argmax(axis=1)
        exact = [
            fab_reference.smallest_distance(*pair, weights, bias, norm)
            for pair in zip(x, y, strict=True)
        ]
        result = get(name, TINY[norm])(classifier(weights, bias), x, y)
        assert np.all(result.distance >= np.array(exact) * (1 - 1e-9))
        np.testing.assert_allclose(result.distance, exact, rtol=0.05)
        length = np.linalg.norm(result.x_nearest - x, fab_reference.ORDERS[norm], axis=1)
        np.testing.assert_allclose(result.distance, length, rtol=1e-12)


def test_other_pixel_bounds():
    weights, bias, x, y = problem(3)
    result = FAB(he.ThreatModel("l2", 0.1), 20)(classifier(weights, bias), x, y)
    wide = he.ThreatModel("l2", 0.5, bounds=(-2, 3))
    shifted = FAB(wide, 20)(classifier(weights / 5, bias + 0.4 * weights.sum(axis=0)), 5 * x - 2, y)
    np.testing.assert_allclose(shifted.distance, 5 * result.distance, rtol=1e-9)


@all_norms
def test_the_nearest_boundary_is_that_of_the_whole_jacobian(norm):
    random = np.random.default_rng(4)
    first, second = random.normal(size=(12, 16)), random.normal(size=(16, 7))
    x = tf.constant(random.uniform(size=(9, 12)))
    y = random.integers(7, size=9).astype(np.int32)

    def network(batch):
        # Control flow inside the model must not disturb gradients inside the attack's own loop.
        hidden = tf.while_loop(
            lambda count, _: count < 2,
            lambda count, hidden: (count + 1, tf.tanh(hidden)),
            (0, batch @ first),
        )[1]
        return hidden @ second

    with tf.GradientTape() as tape:
        tape.watch(x)
        logits = network(x)
    jacobian = tape.batch_jacobian(logits, x).numpy()
    logits, rows = logits.numpy(), np.arange(9)
    gradients = jacobian - jacobian[rows, y][:, np.newaxis]
    gaps = logits - logits[rows, y][:, np.newaxis]
    size = np.linalg.norm(gradients, fab_reference.DUAL_ORDERS[norm], axis=2)
    distances = np.abs(gaps) / (size + 1e-12)
    distances[rows, y] = np.inf
    nearest = distances.argmin(axis=1)
    goal = Goal(tf.constant(y))
    find = tf.function(lambda batch: nearest_boundary(Victim(network), batch, goal, norm))
    boundary, passes = find(x)
    assert passes.numpy() == 6
    np.testing.assert_allclose(boundary.gap, gaps[rows, nearest], rtol=1e-10)
    np.testing.assert_allclose(boundary.gradient, gradients[rows, nearest], rtol=1e-8, atol=1e-12)
    np.testing.assert_allclose(boundary.distance, distances[rows, nearest], rtol=1e-10)


def test_passes_are_those_spent():
    x, y = images(), labels()
    wrong = linear(tf.constant(x)).numpy().argmax(axis=1) != y
    threat = he.ThreatModel("linf", 1e-6)
    # Clean check, K times two, scoring; for FAB-T also the ranking of the targets.
    for name, forward, backward in (("fab-7", 16, 21), ("fab-t-7", 31, 14)):
        targets = {"num_targets": 2} if name == "fab-t-7" else {}
        result = get(name, threat, **targets)(linear, x, y)
        np.testing.assert_array_equal(result.forward_passes, np.where(wrong, 1, forward))
        np.testing.assert_array_equal(result.backward_passes, np.where(wrong, 0, backward))
    result = get("fab-7", he.ThreatModel("linf", 0.9), stop_when_broken=True)(linear, x, y)
    np.testing.assert_array_equal(result.backward_passes[~wrong], 3)


@all_norms
def test_restarts_begin_at_half_of_epsilon(norm):
    x = images(5)
    threat = he.ThreatModel(norm, 0.02, bounds=(-1, 2))
    attack, batch = FAB(threat, num_restarts=3), tf.constant(x)
    unmoved, *starts = [
        attack._start(batch, seeds_of(5, restart), number).numpy()
        for restart, number in ((0, 0), (1, 0), (1, 1), (2, 0))
    ]
    np.testing.assert_array_equal(unmoved, x)
    for start in starts:
        np.testing.assert_allclose(threat.distance(start, x), 0.01, rtol=1e-4)
    # Another restart and another target start elsewhere.
    for other in starts[1:]:
        assert np.all(np.abs(starts[0] - other).max(axis=(1, 2, 3)) > 1e-4)


def test_restarts_find_a_nearer_boundary_on_the_other_side():
    def valley(batch):
        first = batch[:, 0]
        # The boundaries are at 0.7 and 0.45; seen from 0.5, the gradient leads to the farther one.
        gap = tf.maximum(first - 0.7, 10.0 * (0.45 - first))
        return tf.stack([-gap, gap], axis=1)

    x, y = np.full((20, 2), 0.5), np.zeros(20, int)
    threat = he.ThreatModel("linf", 0.15)
    first = FAB(threat, 10, seed=9)(valley, x, y)
    np.testing.assert_allclose(first.distance, 0.2, rtol=0.05)
    again = FAB(threat, 10, num_restarts=4)(valley, x, y)
    near = again.distance < 0.053
    assert 0.5 < near.mean() < 1
    np.testing.assert_array_equal(again.success, near)
    np.testing.assert_allclose(again.distance[~near], first.distance[~near], rtol=0.05)
    np.testing.assert_array_equal(again.forward_passes, 4 * first.forward_passes)


@all_norms
def test_models_without_slope_and_with_nan_give_finite_images(norm):
    x, y = images(), np.zeros(20, int)
    threat = he.ThreatModel(norm, 0.1)
    weights = tf.one_hot([0] * 12, 3)

    def flat(batch):
        return tf.reshape(batch, [-1, 12]) @ weights * 0.0 + tf.constant([1.0, 0.0, -1.0])

    def breaks_down(batch):
        return linear(batch) + tf.where(batch[:, 0, 0, 0] > 0.5, np.nan, 0.0)[:, tf.newaxis]

    result = FAB(threat, 4)(flat, x, y)
    assert not result.success.any() and np.isposinf(result.distance).all()
    np.testing.assert_array_equal(result.x_adv, x)
    predicted = linear(tf.constant(x)).numpy().argmax(axis=1)
    result = FAB(threat, 4)(breaks_down, x, predicted)
    assert np.isfinite(result.x_adv).all() and np.isfinite(result.x_nearest).all()


def test_any_number_of_classes():
    random = np.random.default_rng(0)
    for classes in (2, 300):
        weights = tf.constant(random.normal(size=(12, classes)), tf.float32)
        model = Counting(lambda batch, weights=weights: tf.reshape(batch, [-1, 12]) @ weights)
        y = model(images()).numpy().argmax(axis=1)
        near = FAB(he.ThreatModel("l2", 1.0), 5)(model, images(), y)
        calls = model.calls
        per_target = FABT(he.ThreatModel("l2", 1.0), num_steps=5)(model, images(), y)
        assert calls < 8 and np.isfinite(near.distance).all()
        targets = min(9, classes - 1)
        np.testing.assert_array_equal(per_target.backward_passes, 5 * targets)
        assert np.mean(per_target.distance <= near.distance * 1.5) > 0.9


def test_names_and_errors():
    threat = he.ThreatModel("linf", 0.1)
    assert (get("fab-30", threat).num_steps, get("fab", threat).num_targets) == (30, None)
    assert (get("fab-t-30", threat).num_steps, get("fab-t", threat).num_targets) == (30, 9)
    again = FAB.from_config(FABT(threat, num_targets=3, eta=1.2, beta=0.5).get_config())
    assert (again.num_targets, again.eta, again.beta, again.name) == (3, 1.2, 0.5, "fab-t")
    for setting, value in (
        ("eta", 0.99),
        ("beta", 1.1),
        ("beta", -0.1),
        ("alpha_max", 1.5),
        ("alpha_max", float("nan")),
        ("num_targets", 0),
        ("num_steps", 0),
    ):
        with pytest.raises(ValueError, match=f"Invalid {setting}; expected .*; received {setting}"):
            FAB(threat, **{setting: value})
