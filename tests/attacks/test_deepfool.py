"""DeepFool against stored reference outputs, a NumPy version, and exact distances."""

import functools

import fab_reference
import golden_models
import numpy as np
import pytest
import tensorflow as tf
from attack_victims import images, labels, linear

import he_keras as he
from he_keras.attacks import get
from he_keras.attacks.deepfool import DeepFool

pytestmark = pytest.mark.slow

NORMS = ("linf", "l2")
#: So small that the framework cannot shorten what was found by projecting it.
TINY = {norm: he.ThreatModel(norm, 1e-6) for norm in NORMS}
CLASSES, PIXELS = 4, 30

both_norms = pytest.mark.parametrize("norm", NORMS)
both_heads = pytest.mark.parametrize("head", golden_models.HEADS)


@functools.cache
def golden_result(head, norm):
    attack = DeepFool(TINY[norm])
    return attack(golden_models.classifier(head), golden_models.images(), golden_models.labels())


@both_heads
@both_norms
def test_gives_the_stored_images(head, norm):
    key = f"deepfool_{norm}_foolbox"
    stored = golden_models.outputs("deepfool", head, key)
    allowed = golden_models.tolerances(head, key)
    result = golden_result(head, norm)
    logits = golden_models.float64_logits(head, result.x_nearest)
    flags = logits.argmax(axis=1) != golden_models.labels()
    assert np.sum(flags != stored["success"]) <= allowed["flags_max_mismatch"]
    error = np.abs(golden_models.cross_entropy(logits, golden_models.labels()) - stored["ce"])
    assert np.quantile(error, 0.95) < allowed["ce_abs_p95"]
    count = len(stored["x_adv"])
    differs = np.abs(result.x_nearest[:count] - stored["x_adv"]) > 1e-5
    assert differs.mean() <= allowed["pix_frac_mean"]
    np.testing.assert_allclose(result.distance, stored[norm], rtol=1e-3)
    assert np.quantile(np.abs(result.distance - stored[norm]), 0.95) < 1e-5


@both_heads
def test_is_as_near_as_another_variant(head):
    """torchattacks scales and clips every single step, and stops exactly on the boundary."""
    stored = golden_models.outputs("deepfool", head, "deepfool_l2_torchattacks")
    distance = golden_result(head, "l2").distance
    right = distance > 0
    np.testing.assert_allclose(distance[right], stored["l2"][right], rtol=0.03)
    assert np.quantile(np.abs(distance[right] / stored["l2"][right] - 1), 0.9) < 3e-3


def problem(low=0.0, high=1.0, classes=CLASSES, seed=1):
    """A linear model, and images with their predictions as labels; float64."""
    random = np.random.default_rng(seed)
    weights = random.normal(size=(PIXELS, classes))
    bias = -0.5 * weights.sum(axis=0)
    x = np.clip(random.uniform(low, high, size=(12, PIXELS)), 0, 1)
    return weights, bias, x, (x @ weights + bias).argmax(axis=1)


def classifier(weights, bias):
    return lambda batch: tf.linalg.matmul(batch, tf.constant(weights)) + tf.constant(bias)


def expected(image, label, weights, bias, norm, num_steps, overshoot, candidates):
    """Plain NumPy version for one example: the last point and the number of iterations."""
    ranked = np.argsort(-(image @ weights + bias))[1:candidates]
    point, total = image, np.zeros_like(image)
    for iteration in range(num_steps):
        logits = point @ weights + bias
        if logits.argmax() != label:
            return point, iteration
        best = np.inf, None
        for other in ranked:
            normal, gap = weights[:, other] - weights[:, label], abs(logits[other] - logits[label])
            size = np.linalg.norm(normal, fab_reference.DUAL_ORDERS[norm])
            if gap / size < best[0]:
                best = gap / size, np.sign(normal) if norm == "linf" else normal / size
        total = total + (best[0] + 1e-4) * best[1]
        point = np.clip(image + (1 + overshoot) * total, 0, 1)
    return point, num_steps


@both_norms
@pytest.mark.parametrize(("overshoot", "candidates"), [(0.02, 10), (0.0, 3), (0.3, 2)])
def test_equals_the_numpy_version(norm, overshoot, candidates):
    weights, bias, x, y = problem(-0.5, 1.5)
    attack = DeepFool(TINY[norm], 20, overshoot, candidates)
    result = attack(classifier(weights, bias), x, y)
    others = min(candidates, CLASSES) - 1
    for row, (image, label) in enumerate(zip(x, y, strict=True)):
        point, iterations = expected(image, label, weights, bias, norm, 20, overshoot, candidates)
        broken = (point @ weights + bias).argmax() != label
        np.testing.assert_allclose(result.x_nearest[row], point if broken else image, atol=1e-9)
        length = np.linalg.norm(point - image, fab_reference.ORDERS[norm])
        np.testing.assert_allclose(result.distance[row], length if broken else np.inf, rtol=1e-9)
        # Clean check, ranking, two for each iteration, score.
        assert result.forward_passes[row] == 2 * iterations + 3
        assert result.backward_passes[row] == others * iterations


@both_norms
@pytest.mark.parametrize("low", [0.45, -0.5], ids=["inside", "on-the-bounds"])
def test_reaches_the_distance_of_a_linear_boundary(norm, low):
    weights, bias, x, y = problem(low, 1 - low, classes=2, seed=3)
    exact = [
        fab_reference.smallest_distance(*pair, weights, bias, norm)
        for pair in zip(x, y, strict=True)
    ]
    result = DeepFool(TINY[norm])(classifier(weights, bias), x, y)
    assert np.all(result.distance >= np.array(exact) * (1 - 1e-9))
    # The extra length of 1e-4 counts where the distance itself is tiny.
    np.testing.assert_allclose(result.distance, exact, rtol=0.05, atol=2e-4)


def test_the_extra_length_scales_with_the_bounds():
    weights, bias, x, y = problem()
    result = DeepFool(TINY["l2"])(classifier(weights, bias), x, y)
    wide = he.ThreatModel("l2", 1e-6, bounds=(-2, 3))
    model = classifier(weights / 5, bias + 0.4 * weights.sum(axis=0))
    shifted = DeepFool(wide)(model, 5 * x - 2, y)
    np.testing.assert_allclose(shifted.distance, 5 * result.distance, rtol=1e-9)


def test_success_is_a_distance_within_epsilon():
    near, far = (DeepFool(he.ThreatModel("l2", epsilon)) for epsilon in (1e-6, 0.1))
    near, far = (attack(linear, images(), labels()) for attack in (near, far))
    right = near.distance > 0
    assert not near.success[right].any() and np.isfinite(near.distance).all()
    assert 0 < far.success[right].mean() < 1
    assert np.all(far.success[near.distance <= 0.1])
    np.testing.assert_array_equal(near.backward_passes, far.backward_passes)


@both_norms
def test_models_without_slope_give_the_images_back(norm):
    def flat(batch):
        return tf.reshape(batch, [-1, 12])[:, :3] * 0.0 + tf.constant([1.0, 0.0, -1.0])

    result = DeepFool(he.ThreatModel(norm, 0.1), 4)(flat, images(), np.zeros(20, int))
    assert not result.success.any() and np.isposinf(result.distance).all()
    np.testing.assert_array_equal(result.x_adv, images())


def test_names_and_errors():
    threat = he.ThreatModel("linf", 0.1)
    assert (get("deepfool", threat).num_steps, get("deepfool-7", threat).num_steps) == (50, 7)
    again = DeepFool.from_config(get("deepfool-7", threat, num_candidates=3).get_config())
    assert (again.num_steps, again.num_candidates, again.name) == (7, 3, "deepfool-7")
    with pytest.raises(ValueError, match="expected one of .*; received norm='l1'"):
        DeepFool(he.ThreatModel("l1", 1.0))
    with pytest.raises(ValueError, match="Too few candidate classes.*received num_candidates=1"):
        DeepFool(threat, num_candidates=1)
    with pytest.raises(ValueError, match="Invalid overshoot; expected .*; received overshoot=-0.1"):
        DeepFool(threat, overshoot=-0.1)
