"""Random starts of a ThreatModel: uniform in volume, and independent of batching."""

import numpy as np
import pytest
import tensorflow as tf

from he_keras.balls import NORMS, draw_per_seed
from he_keras.threat import ThreatModel

ORDER = {"linf": np.inf, "l2": 2, "l1": 1}


def lengths(vectors, order):
    """Length of each row, in float64."""
    flat = np.asarray(vectors, np.float64).reshape(len(vectors), -1)
    return np.linalg.norm(flat, ord=order, axis=1)


def kolmogorov_distance(values):
    """Largest gap between the empirical distribution of `values` and the uniform one on [0, 1]."""
    values = np.sort(np.asarray(values, np.float64))
    steps = np.arange(len(values) + 1) / len(values)
    return max(np.max(steps[1:] - values), np.max(values - steps[:-1]))


def draws(norm, per_example, dimension=5, count=3000, radius=0.4):
    """Perturbations of the centre of the box, none of which reaches the box's faces."""
    threat = ThreatModel(norm, radius)
    images = tf.fill([count, dimension], 0.5)
    seed = tf.constant([11, 3])
    if per_example:
        seed = tf.stack([tf.fill([count], 11), tf.range(count)], axis=1)
    start = tf.function(threat.random_start)(images, seed)
    return (start - images).numpy().astype(np.float64) / radius


@pytest.mark.parametrize("per_example", [False, True])
@pytest.mark.parametrize("norm", NORMS)
def test_random_start_is_uniform_in_volume(norm, per_example):
    """The radius r of a uniform point satisfies P(r <= t) = t^D; each direction is as likely."""
    noise = draws(norm, per_example)
    count, dimension = noise.shape
    critical = 1.63 / np.sqrt(count)
    radii = lengths(noise, ORDER[norm])
    assert radii.max() <= 1 + 1e-6
    assert kolmogorov_distance(radii**dimension) < critical
    assert kolmogorov_distance(radii) > 10 * critical
    second_moment = {"linf": 1 / 3, "l2": 1 / 7, "l1": 2 / (6 * 7)}[norm]
    deviation = np.sqrt(np.mean(noise**4) / count)
    covariance = noise.T @ noise / count
    assert np.abs(covariance - second_moment * np.eye(dimension)).max() < 4 * deviation
    assert np.abs(noise.mean(axis=0)).max() < 4 * np.sqrt(second_moment / count)
    assert abs(np.corrcoef(radii[:-1], radii[1:])[0, 1]) < 4 / np.sqrt(count)


def test_linf_coordinates_and_l1_shares_follow_their_laws():
    noise = draws("linf", per_example=False)
    assert kolmogorov_distance((noise[:, 0] + 1) / 2) < 1.63 / np.sqrt(len(noise))
    shares = np.abs(draws("l1", per_example=False))
    share = shares[:, 2] / shares.sum(axis=1)
    assert kolmogorov_distance(1 - (1 - share) ** 4) < 1.63 / np.sqrt(len(noise))


@pytest.mark.parametrize("norm", NORMS)
def test_seeds_per_example_make_the_draw_independent_of_batching(norm):
    threat = ThreatModel(norm, 0.2)
    images = tf.constant(np.random.default_rng(4).uniform(size=(7, 3, 2, 1)), tf.float32)
    seeds = tf.constant([[5, identity] for identity in range(7)])
    whole = threat.random_start(images, seeds).numpy()
    parts = [threat.random_start(images[i : i + 3], seeds[i : i + 3]) for i in range(0, 7, 3)]
    assert np.array_equal(whole, np.concatenate(parts))
    order = [6, 2, 0]
    shuffled = threat.random_start(tf.gather(images, order), tf.gather(seeds, order))
    assert np.array_equal(whole[order], shuffled)
    for dtype in (tf.float32, tf.float64):
        spec = [tf.TensorSpec([None, 3, 2, 1], dtype), tf.TensorSpec([None, 2], tf.int32)]
        compiled = tf.function(threat.random_start, input_signature=spec)
        typed = tf.cast(images, dtype)
        eager = threat.random_start(typed, seeds)
        np.testing.assert_allclose(compiled(typed, seeds), eager, rtol=0, atol=1e-7)
        assert compiled(typed[:0], seeds[:0]).shape == (0, 3, 2, 1)
    noise = whole - images.numpy()
    assert len({row.tobytes() for row in noise}) == 7


@pytest.mark.parametrize("norm", NORMS)
def test_seed_decides_the_draw(norm):
    threat = ThreatModel(norm, 0.2)
    images = np.full((4, 6), 0.5, np.float32)
    first, same = (threat.random_start(images, [1, 2]).numpy() for _ in range(2))
    assert np.array_equal(first, same)
    for other in ([1, 3], [2, 2], [2, 1]):
        assert not np.any(first == threat.random_start(images, other).numpy())
    rows = {row.tobytes() for row in first}
    assert len(rows) == 4


@pytest.mark.parametrize("norm", NORMS)
def test_radius_scales_the_draw_and_bounds_clip_it(norm):
    wide = ThreatModel(norm, 0.2, bounds=(-10, 10))
    images = np.zeros((3, 8), np.float64)
    full, half = wide.random_start(images, [1, 2]), wide.random_start(images, [1, 2], radius=0.1)
    np.testing.assert_allclose(half, full / 2, rtol=1e-12)
    assert np.array_equal(wide.random_start(images, [1, 2], radius=0.0), images)
    clipped = ThreatModel(norm, 0.2).random_start(images, [1, 2]).numpy()
    np.testing.assert_allclose(clipped, np.maximum(full, 0.0), rtol=1e-12)


def test_draw_per_seed_hands_the_sampler_one_example_at_a_time():
    shapes = []

    def sampler(shape, seed, dtype):
        shapes.append(tuple(shape.numpy()))
        return tf.fill(shape, tf.cast(seed[1], dtype))

    noise = draw_per_seed(sampler, tf.zeros((2, 3, 1)), [[0, 4], [0, 9]])
    assert shapes == [(1, 3, 1), (1, 3, 1)]
    assert noise.numpy().ravel().tolist() == [4.0] * 3 + [9.0] * 3
