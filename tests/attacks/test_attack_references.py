"""APGD, FAB and Square step by step against versions in NumPy: short, so that every run has them.

The tests of each attack, which are slow, compare longer runs, more losses and stored outputs.
"""

import apgd_reference
import fab_reference
import numpy as np
import pytest
import query_references
import tensorflow as tf
from apgd_reference import CLASSES, PIXELS, SHAPE, TanhNetwork

import he_keras as he
from he_keras.attacks import APGD, FAB, Square, Victim
from he_keras.attacks.fab import _nothing_found
from he_keras.attacks.framework.result import Goal

NETWORK = TanhNetwork()
THREATS = {
    "linf": he.ThreatModel("linf", 0.1),
    "l2": he.ThreatModel("l2", 0.5),
    "l1": he.ThreatModel("l1", 2.0),
}


def examples(count):
    """Images, many pixels at the bounds; the network's predictions."""
    random = np.random.default_rng(3)
    images = np.clip(random.uniform(-0.2, 1.2, size=(count, *SHAPE)), 0, 1)
    return images, np.array([NETWORK.logits(image).argmax() for image in images], np.int32)


# APGD: checks at 6, 11, 15, 18, ... of 30 steps. A low rho leaves lack of progress as the reason to
# halve a step.
@pytest.mark.parametrize(("norm", "rho"), [("linf", 0.75), ("linf", 0.3), ("l2", 0.75), ("l1", 0)])
def test_apgd_step_by_step(norm, rho):
    images, labels = examples(6)
    labels[0] = (labels[0] + 1) % CLASSES
    starts = images + 0.1 * np.random.default_rng(4).normal(size=images.shape)
    attack = APGD(THREATS[norm], "cw", num_steps=30, rho=rho, stop_when_broken=False)
    inputs = tf.constant(images), tf.constant(labels)
    ours = apgd_reference.trace(attack, NETWORK, inputs, starts)
    reasons = []
    for row, (image, label) in enumerate(zip(images, labels, strict=True)):
        evaluate = NETWORK.evaluator("cw", label)
        threat = attack.threat
        expected = apgd_reference.apgd(
            evaluate, image, starts[row], norm, threat.epsilon, attack.num_steps, rho
        )
        reasons += expected["reasons"]
        np.testing.assert_allclose(ours["points"][:, row], expected["points"], atol=1e-9)
        np.testing.assert_allclose(ours["eta"][:, row], expected["eta"], rtol=1e-12)
        np.testing.assert_allclose(ours["best"][:, row], expected["best"], atol=1e-9)
        np.testing.assert_allclose(ours["final"][row], expected["final"], atol=1e-9)
        np.testing.assert_allclose(ours["adversarial"][row], expected["adversarial"], atol=1e-9)
        assert ours["broken"][row] == expected["broken"]
    # The step was halved for its reason, and was left alone, each several times.
    reason = {"l1": "sparser"}.get(norm, "rarely" if rho > 0.5 else "stuck")
    assert reasons.count(reason) > 3 and len(reasons) - reasons.count(reason) > 3


class TanhFAB(fab_reference.LinearFAB):
    """FAB in NumPy on the network."""

    def __init__(self, *args, **kwargs):
        super().__init__(np.zeros((PIXELS, CLASSES)), np.zeros(CLASSES), *args, **kwargs)

    def logits(self, point):
        return NETWORK.logits(point)

    def boundary(self, point, label, target):
        """Lends the linear version the Jacobian at the point as weights."""
        slope = 1 - np.tanh((point - 0.5) @ NETWORK.first) ** 2
        self.weights = NETWORK.first @ (slope[:, np.newaxis] * NETWORK.second)
        return super().boundary(point, label, target)


@pytest.mark.parametrize("norm", THREATS)
@pytest.mark.parametrize("settings", [{}, {"alpha_max": 0.6, "eta": 1.2, "beta": 0.5}], ids=str)
def test_fab_step_by_step(norm, settings):
    images, labels = examples(5)
    attack, reference = FAB(THREATS[norm], **settings), TanhFAB(norm, 6, **settings)
    inputs = tf.constant(images), Goal(tf.constant(labels))
    state, states = _nothing_found(inputs[0]), []
    for _ in range(reference.num_steps):
        state, _ = attack._step(Victim(NETWORK), state, *inputs), states.append(state)
    for row, (image, label) in enumerate(zip(images.reshape(5, PIXELS), labels, strict=True)):
        points, nearest, distance = reference.run(image, label)
        for point, after in zip(points, [*states[1:], state], strict=True):
            wrong = NETWORK.logits(point).argmax() != label
            expected = image + reference.beta * (point - image) if wrong else point
            np.testing.assert_allclose(np.ravel(after.point[row]), expected, atol=1e-9)
        assert np.isfinite(distance)
        np.testing.assert_allclose(np.ravel(state.best.point[row]), nearest, atol=1e-9)
        np.testing.assert_allclose(state.best.distance[row], distance, rtol=1e-9)


# The first window has a side of 8.9 or 9.8, which is rounded, and in l2 made odd.
@pytest.mark.parametrize(("norm", "epsilon", "side"), [("linf", 0.1, 10), ("l2", 0.4, 11)])
def test_square_query_by_query(norm, epsilon, side):
    network, images, labels = query_references.problem((side, side, 3), count=3)
    attack = Square(he.ThreatModel(norm, epsilon), 24)
    windows = query_references.windows_of(attack, images)
    draws = query_references.random_draws(attack, images, np.random.default_rng(1))
    victim, batch, classes = Victim(network), tf.constant(images), labels.astype(np.int32)
    start = windows.start(batch, tf.constant(draws.start))
    goal = Goal(tf.constant(classes))
    inputs = windows.constants(batch), goal, tf.constant(draws.queries)
    states = [attack._initial_state(victim, start, goal)]
    for query in range(24):
        index = tf.constant(query)
        states.append(attack._step(victim, windows, index, states[-1], inputs))
    accepted = []
    for row, image in enumerate(images.transpose(0, 3, 1, 2)):
        run = image, labels[row], network.of_one, norm, epsilon, draws.start[row]
        for query, state in enumerate(states):
            best, history = query_references.square(*run, draws.queries[row, :query])
            if len(history) < query:
                # It has ended at the first point that is misclassified.
                break
            pixels = best.transpose(1, 2, 0).ravel()
            np.testing.assert_allclose(state.x_best[row], pixels, atol=1e-6)
            margin = query_references.margin(network.of_one(best), labels[row])
            np.testing.assert_allclose(state.loss[row], margin, atol=1e-6)
            assert bool(state.broken[row]) == (margin < 0)
        accepted += history
    assert 5 < sum(accepted) < len(accepted) - 5


def test_the_windows_of_square_shrink_as_published():
    fractions = [query_references.covered_fraction(query, 0.8) for query in range(10_000)]
    areas = Square(THREATS["linf"], 10_000).window_areas(20, 10)
    np.testing.assert_allclose(areas, 200 * np.array(fractions))
    rescaled = Square(THREATS["linf"], 100, rescale_schedule=True).window_areas(20, 10)
    np.testing.assert_allclose(rescaled, areas[::100])
