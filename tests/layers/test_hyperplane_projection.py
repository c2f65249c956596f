"""The box-constrained steps onto a hyperplane against bisection in float64, and their limits."""

import fab_reference
import numpy as np
import pytest
import tensorflow as tf

from he_keras.balls import step_to_hyperplane

NORMS = ("linf", "l2", "l1")
#: Absolute tolerances of the conformance tests, for coordinates in [0, 1].
TOLERANCES = {"linf": 1e-5, "l2": 1e-4, "l1": 1e-5}
ROWS, COORDINATES = 40, 300

all_norms = pytest.mark.parametrize("norm", NORMS)


def problem(seed=0, bounds=(0.0, 1.0), dtype=np.float32):
    """Points, some coordinates on the bounds, normals, some zero, and ways near and far."""
    random = np.random.default_rng(seed)
    low, high = bounds
    points = random.uniform(low - 0.2 * (high - low), high, size=(ROWS, COORDINATES))
    points = np.clip(points, low, high).astype(dtype)
    normals = random.normal(size=points.shape)
    normals[:, ::7] = 0.0
    normals = normals.astype(dtype)
    # From a small share of what the bounds allow to nearly all of it.
    share = np.concatenate([np.geomspace(1e-5, 0.3, ROWS // 2), np.linspace(0.35, 0.98, ROWS // 2)])
    sign = random.choice([-1.0, 1.0], size=ROWS)
    excess = [
        each_sign * each_share * np.abs(normal) @ fab_reference.rooms(*args, bounds)[1]
        for each_sign, each_share, normal, args in zip(
            sign, share, normals, zip(points, normals, sign, strict=True), strict=True
        )
    ]
    return points, normals, np.array(excess, dtype)


def expected(points, normals, excess, norm, bounds=(0.0, 1.0)):
    rows = zip(points, normals, excess, strict=True)
    return np.stack([fab_reference.step(*row, norm, bounds) for row in rows])


def steps(points, normals, excess, norm, bounds=(0.0, 1.0)):
    constants = (tf.constant(each) for each in (points, normals, excess))
    return step_to_hyperplane(*constants, norm, bounds).numpy()


@all_norms
@pytest.mark.parametrize("bounds", [(0.0, 1.0), (-2.0, 3.0)])
@pytest.mark.parametrize("seed", range(3))
def test_equals_bisection(norm, bounds, seed):
    points, normals, excess = problem(seed, bounds)
    found = steps(points, normals, excess, norm, bounds)
    width = bounds[1] - bounds[0]
    np.testing.assert_allclose(
        found, expected(points, normals, excess, norm, bounds), atol=TOLERANCES[norm] * width
    )


@all_norms
def test_float64_is_exact(norm):
    points, normals, excess = problem(dtype=np.float64)
    found = steps(points, normals, excess, norm)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, expected(points, normals, excess, norm), atol=1e-12)
    # The step ends on the hyperplane: <normal, point + step> = b.
    np.testing.assert_allclose(np.sum(normals * found, axis=1), -excess, rtol=1e-12)


@all_norms
def test_no_feasible_point_is_nearer(norm):
    """Mixing the step with any other way onto the hyperplane makes it longer."""
    random = np.random.default_rng(5)
    points, normals, excess = problem(dtype=np.float64)
    excess = excess[:8] * 0.5
    points, normals = points[:8], normals[:8]
    found = steps(points, normals, excess, norm)
    order = fab_reference.ORDERS[norm]
    for row in range(8):
        length = np.linalg.norm(found[row], order)
        for _ in range(50):
            weights = normals[row] * random.uniform(0.1, 10, size=COORDINATES)
            other = fab_reference.step(points[row], weights, excess[row], "l2")
            way = -normals[row] @ other / excess[row]
            if way <= 1:
                continue
            # A feasible step that goes past the hyperplane, cut back onto it.
            assert np.linalg.norm(other / way, order) >= length * (1 - 1e-9)
            mixed = 0.9 * found[row] + 0.1 * other / way
            assert np.linalg.norm(mixed, order) >= length * (1 - 1e-9)


@all_norms
def test_out_of_reach_leads_to_the_corner(norm):
    points, normals, excess = problem()
    sign = np.sign(excess)
    corner = np.where(normals * sign[:, None] > 0, 0.0, 1.0)
    corner = np.where(normals == 0, points, corner)
    for factor in (1.0, 1.5, 1e30):
        reach = np.abs(normals * (corner - points)).sum(axis=1).astype(np.float32)
        way = (sign * reach * np.float32(1.001) * np.float32(factor)).astype(np.float32)
        found = steps(points, normals, way, norm)
        np.testing.assert_allclose(points + found, corner, atol=1e-6)


@all_norms
def test_degenerate_cases_stay_finite(norm):
    points, normals, excess = (np.array(each[-6:]) for each in problem())
    normals[0] = 0.0
    excess[1] = 0.0
    normals[2, 1:] = 0.0
    normals[2, 0], points[2, 0], excess[2] = 3.0, 0.5, 0.6
    normals[3] *= np.float32(1e-25)
    excess[3] *= np.float32(1e-25)
    normals[4], excess[4] = 1.0, np.float32(np.finfo(np.float32).max)
    points[5], normals[5], excess[5] = 0.5, 1.0, COORDINATES / 8
    found = steps(points, normals, excess, norm)
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(found[0], 0.0)
    np.testing.assert_array_equal(found[1], 0.0)
    np.testing.assert_allclose(found[2], [-0.2] + [0.0] * (COORDINATES - 1), atol=1e-6)
    # The scale of the normal does not matter, even where squares would underflow.
    wanted = expected(points[3:4] * 1.0, normals[3:4] * 1e25, excess[3:4] * 1e25, norm)
    np.testing.assert_allclose(found[3:4], wanted, atol=TOLERANCES[norm])
    np.testing.assert_allclose(points[4] + found[4], 0.0, atol=1e-6)
    # Ties: any share-out of an l1 step is as short, but the hyperplane must be met.
    np.testing.assert_allclose(found[5].sum(), -COORDINATES / 8, rtol=1e-5)
    assert found[5].min() >= -0.5


def test_ties_in_l1_are_used_up_in_order():
    points = tf.fill([1, 5], 0.5)
    normal = tf.constant([[1.0, 2.0, -2.0, 2.0, 1.0]])
    found = step_to_hyperplane(points, normal, tf.constant([1.5]), "l1", (0.0, 1.0)).numpy()
    np.testing.assert_allclose(found, [[0.0, -0.5, 0.25, 0.0, 0.0]], atol=1e-7)


@all_norms
def test_rows_do_not_influence_each_other_and_shapes_are_kept(norm):
    points, normals, excess = problem(1)
    shape = (ROWS, 10, 10, 3)
    together = steps(points.reshape(shape), normals.reshape(shape), excess, norm)
    assert together.shape == shape
    one_by_one = [
        steps(*(each[row : row + 1] for each in (points, normals, excess)), norm)[0]
        for row in range(ROWS)
    ]
    np.testing.assert_allclose(together.reshape(points.shape), one_by_one, atol=2e-6)


def test_without_bounds_the_steps_are_the_closed_forms():
    points, normals, excess = problem()
    size = np.abs(normals.astype(np.float64))
    wide = (-1e6, 1e6)
    equal = np.abs(steps(points, normals, excess, "linf", wide))
    np.testing.assert_allclose(equal.max(axis=1), np.abs(excess) / size.sum(axis=1), rtol=1e-5)
    direct = steps(points, normals, excess, "l2", wide)
    wanted = -excess[:, None] * normals / np.square(size).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(direct, wanted, rtol=1e-4, atol=1e-7)
    single = np.abs(steps(points, normals, excess, "l1", wide))
    np.testing.assert_array_equal((single > 0).sum(axis=1), 1)
    np.testing.assert_allclose(single.max(axis=1), np.abs(excess) / size.max(axis=1), rtol=1e-5)
