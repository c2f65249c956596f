"""ThreatModel: the ball maps against float64 NumPy versions, Lemma 1, arguments and config."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from he_keras.arguments import parse_epsilon
from he_keras.balls import NORMS, sparse_step
from he_keras.threat import ThreatModel, check_examples

ORDER = {"linf": np.inf, "l2": 2, "l1": 1}
DUAL_ORDER = {"linf": 1, "l2": 2, "l1": np.inf}
PROPERTY = settings(max_examples=40, deadline=None, derandomize=True, database=None)
WHAT_EXPECTED_RECEIVED = r"[^;]+; expected [^;]+; received \w+=.+"
FLOAT32_ROUNDING = 2.0**-24


def lengths(vectors, order):
    """Length of each row, in float64."""
    flat = np.asarray(vectors, np.float64).reshape(len(vectors), -1)
    return np.linalg.norm(flat, ord=order, axis=1)


def l1_box_projection(perturbation, below, above, epsilon):
    """The nearest point of {|z|_1 <= epsilon, -below <= z <= above}, one example, in float64.

    Each coordinate of the minimiser of |z - d|^2 / 2 + a |z|_1 is d shrunk by a, clipped to the
    box; the multiplier a is found by bisection to the last bit.
    """

    def candidate(multiplier):
        shrunk = np.sign(perturbation) * np.maximum(np.abs(perturbation) - multiplier, 0.0)
        return np.clip(shrunk, -below, above)

    low, high = 0.0, float(np.abs(perturbation).max())
    if np.abs(candidate(low)).sum() <= epsilon:
        return candidate(low)
    for _ in range(200):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if np.abs(candidate(middle)).sum() > epsilon else (low, middle)
    return candidate(high)


def dykstra(perturbation, below, above, epsilon, rounds=4000):
    """The same point by alternating projections, which knows nothing of the closed form."""
    point, box_memory, ball_memory = perturbation.copy(), 0.0, 0.0
    for _ in range(rounds):
        in_box = np.clip(point + box_memory, -below, above)
        box_memory = point + box_memory - in_box
        point = _l1_ball_projection(in_box + ball_memory, epsilon)
        ball_memory = in_box + ball_memory - point
    return point


def _l1_ball_projection(vector, epsilon):
    """Projection onto the l1 ball alone by sorting (Duchi et al., 2008)."""
    if np.abs(vector).sum() <= epsilon:
        return vector
    descending = np.sort(np.abs(vector))[::-1]
    shifts = (np.cumsum(descending) - epsilon) / np.arange(1, len(vector) + 1)
    shift = shifts[np.flatnonzero(descending > shifts)[-1]]
    return np.sign(vector) * np.maximum(np.abs(vector) - shift, 0.0)


@st.composite
def problems(draw, norms=NORMS):
    """A threat model, images within its bounds and points anywhere."""
    low, high = draw(st.sampled_from([(0.0, 1.0), (-1.0, 1.0), (0.0, 255.0)]))
    share = draw(st.floats(0.01, 0.9))
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 7)))
    unit = arrays(np.float32, shape, elements=st.floats(0, 1, width=32))
    anywhere = arrays(np.float32, shape, elements=st.floats(-2, 3, width=32))
    images = np.clip(low + (high - low) * draw(unit), low, high).astype(np.float32)
    x_adv = (low + (high - low) * draw(anywhere)).astype(np.float32)
    norm = draw(st.sampled_from(norms))
    return ThreatModel(norm, share * (high - low), (low, high)), images, x_adv


def rounding(threat, images):
    """What storing images + perturbation as float32 can add to a perturbation's length."""
    size = images[0].size
    return size ** (1 / ORDER[threat.norm]) * 2 * FLOAT32_ROUNDING * np.abs(threat.bounds).max()


@PROPERTY
@given(problems())
def test_projection_is_feasible_idempotent_and_keeps_feasible_points(problem):
    threat, images, x_adv = problem
    projected = threat.project(x_adv, images).numpy()
    low, high = threat.bounds
    slack = rounding(threat, images)
    assert projected.dtype == np.float32 and projected.shape == images.shape
    assert low <= projected.min() and projected.max() <= high
    perturbation = projected.astype(np.float64) - images
    assert lengths(perturbation, ORDER[threat.norm]).max() <= threat.epsilon * (1 + 1e-6) + slack
    again = threat.project(projected, images).numpy()
    np.testing.assert_allclose(again, projected, rtol=0, atol=1e-6 * (high - low))
    inside = images + 0.999 * (projected - images)
    kept = threat.project(inside, images).numpy()
    np.testing.assert_allclose(kept, inside, rtol=0, atol=4 * FLOAT32_ROUNDING * max(-low, high))


@PROPERTY
@given(problems())
def test_perturbation_without_bounds_keeps_to_the_ball_to_relative_precision(problem):
    threat, images, x_adv = problem
    perturbation = x_adv - images
    projected = threat.project_perturbation(perturbation).numpy()
    before, after = (lengths(each, ORDER[threat.norm]) for each in (perturbation, projected))
    assert after.max() <= threat.epsilon * (1 + 1e-6)
    np.testing.assert_allclose(after, np.minimum(before, threat.epsilon), rtol=1e-5, atol=1e-30)
    assert np.all(projected * perturbation >= 0)


@PROPERTY
@given(problems(norms=("linf", "l1")), st.integers(0, 2**31))
def test_linf_and_l1_projections_are_nearest(problem, seed):
    """No feasible z is closer, nor is any behind the supporting plane: <d - p, z - p> <= 0."""
    threat, images, x_adv = problem
    low, high = threat.bounds
    target, center = x_adv.astype(np.float64), images.astype(np.float64)
    projected = threat.project(x_adv, images).numpy().astype(np.float64)
    generator = np.random.default_rng(seed)
    scale = (high - low) ** 2 * images.shape[1]
    for _ in range(20):
        noise = generator.normal(size=images.shape) * generator.choice([1.0, 0.0], images.shape)
        length = np.maximum(lengths(noise, ORDER[threat.norm]), 1e-12)[:, None]
        other = np.clip(center + threat.epsilon * noise / length, low, high)
        ahead = np.sum((target - projected) * (other - projected), axis=1)
        assert ahead.max() <= 2e-6 * scale
        distances = [np.sum((target - each) ** 2, axis=1) for each in (projected, other)]
        assert np.all(distances[0] <= distances[1] + 4e-6 * scale)


@PROPERTY
@given(problems(norms=("l1",)))
def test_l1_projection_solves_the_quadratic_program(problem):
    threat, images, x_adv = problem
    low, high = threat.bounds
    projected = threat.project(x_adv, images).numpy()
    for row, image, point in zip(projected, images.astype(np.float64), x_adv, strict=True):
        expected = l1_box_projection(point - image, image - low, high - image, threat.epsilon)
        np.testing.assert_allclose(row - image, expected, rtol=0, atol=1e-5 * (high - low))


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 2.5])
def test_l1_projection_agrees_with_alternating_projections(epsilon):
    generator = np.random.default_rng(7)
    threat = ThreatModel("l1", epsilon)
    images = generator.uniform(size=(6, 5))
    x_adv = images + generator.normal(size=images.shape)
    projected = threat.project(x_adv, images).numpy()
    for row, image, point in zip(projected, images, x_adv, strict=True):
        expected = dykstra(point - image, image, 1 - image, epsilon)
        np.testing.assert_allclose(row - image, expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("spread", [0.0, 1e-6, 1e-2, 1.0])
def test_l1_projection_of_a_large_image_keeps_to_the_ball(spread):
    """Many coordinates of nearly the same size: the rounding of the shift adds up over all."""
    generator = np.random.default_rng(0)
    images = np.full((3, 32, 32, 3), 0.5, np.float32)
    sizes = (0.49 - 0.45 * spread * generator.uniform(size=images.shape)) * 0.999
    signs = generator.choice([-1, 1], images.shape)
    x_adv = (images + signs * sizes).astype(np.float32)
    threat = ThreatModel("l1", 12.0)
    perturbation = threat.project_perturbation(x_adv - images).numpy()
    assert lengths(perturbation, 1).max() <= 12.0 * (1 + 1e-6)
    for row, raw in zip(perturbation, x_adv - images, strict=True):
        room = np.full(raw.size, np.inf)
        expected = l1_box_projection(raw.ravel().astype(np.float64), room, room, 12.0)
        np.testing.assert_allclose(row.ravel(), expected, rtol=0, atol=1e-6)


def test_l1_projection_does_not_depend_on_the_other_rows():
    """Some rows need more steps than others; each ends where it would end alone, to the bit."""
    generator = np.random.default_rng(0)
    images = generator.uniform(size=(6, 300)).astype(np.float32)
    factors = 10.0 ** generator.uniform(-4, 1, size=images.shape)
    x_adv = (images + factors * generator.normal(size=images.shape)).astype(np.float32)
    threat = ThreatModel("l1", 5.0)
    together = threat.project(x_adv, images).numpy()
    alone = [threat.project(x_adv[[row]], images[[row]]).numpy()[0] for row in range(6)]
    assert np.array_equal(together, alone)


def test_l1_projection_ends_without_a_number():
    x_adv = np.array([[np.nan, 1.0], [np.inf, 1.0], [3.0, 1.0]], np.float32)
    projected = ThreatModel("l1", 1.0).project_perturbation(x_adv).numpy()
    assert projected[2].tolist() == [1.0, 0.0]


def test_l1_projection_is_a_small_graph():
    """Its search is a loop: unrolled, forty halvings of an interval took 545 operations."""
    rows = tf.TensorSpec([None, 8, 8, 3])
    project = tf.function(ThreatModel("l1", 1.0).project).get_concrete_function(rows, rows)
    graph = project.graph.as_graph_def()
    inside = sum(len(function.node_def) for function in graph.library.function)
    assert len(graph.node) + inside < 150


def test_l2_projection_scales_down_and_never_up_then_clips():
    threat = ThreatModel("l2", 0.5)
    images = np.array([[0.5, 0.5], [0.5, 0.5], [0.9, 0.5]], np.float32)
    x_adv = images + np.array([[0.6, 0.8], [0.03, 0.04], [0.6, -0.8]], np.float32)
    expected = [[0.8, 0.9], [0.53, 0.54], [1.0, 0.1]]
    np.testing.assert_allclose(threat.project(x_adv, images), expected, rtol=0, atol=1e-6)


def test_examples_are_copied_only_where_they_change():
    threat, labels = ThreatModel("linf", 0.1), np.array([0])
    for dtype in (np.float32, np.float64):
        images = np.array([[0.0, 0.5, 1.0]], dtype)
        assert np.shares_memory(check_examples(threat, images, labels)[0], images)
    beyond = np.array([[-5e-7, 1.0 + 5e-7]], np.float32)
    assert check_examples(threat, beyond, labels)[0].tolist() == [[0.0, 1.0]]
    assert beyond[0, 0] < 0.0


@pytest.mark.parametrize("norm", NORMS)
def test_zero_perturbation_stays_zero(norm):
    images = np.full((2, 3), 0.25, np.float32)
    assert np.array_equal(ThreatModel(norm, 0.1).project(images, images), images)


def test_steepest_steps_by_hand():
    gradient = np.array([[3.0, -4.0, 0.0], [0.0, 0.0, 0.0]])
    expected = {"linf": [1, -1, 0], "l2": [0.6, -0.8, 0], "l1": [0, -1, 0]}
    for norm, step in expected.items():
        result = ThreatModel(norm, 0.1).steepest_step(gradient).numpy()
        np.testing.assert_allclose(result, [step, [0, 0, 0]], rtol=0, atol=1e-15)


def test_sparse_steps_by_hand():
    gradient = tf.constant([[3.0, -2.0, 1.0], [3.0, -2.0, 2.0], [0.0, 0.0, 0.0], [0.5, -4.0, 1.0]])
    number, length = tf.constant([2, 2, 1, 0]), tf.constant([0.5, 0.6, 1.0, 1.0])
    step = sparse_step(gradient, number, length)
    # Ties are all taken, zeros give no step, and there is at least one entry to step in.
    expected = [[0.25, -0.25, 0.0], [0.2, -0.2, 0.2], [0.0, 0.0, 0.0], [0.0, -1.0, 0.0]]
    np.testing.assert_allclose(step, expected, rtol=1e-6)


def test_l1_step_divides_by_the_number_of_ties():
    gradient = np.array([[2.0, -2.0, 1.0, 2.0], [-5.0, 5.0, 0.0, 0.0]], np.float32)
    step = ThreatModel("l1", 1.0).steepest_step(gradient).numpy()
    expected = [[1 / 3, -1 / 3, 0, 1 / 3], [-0.5, 0.5, 0, 0]]
    np.testing.assert_allclose(step, expected, rtol=1e-7)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e-13, 1.0, 1e25])
def test_step_has_unit_length_however_small_or_large_the_gradient(norm, size):
    """A saturated loss leaves gradients whose squares underflow; the direction is still there."""
    gradient = np.float32(size) * np.array([[[3.0, -4.0], [1.0, 0.5]]], np.float32)
    threat = ThreatModel(norm, 0.1)
    step = threat.steepest_step(gradient).numpy()
    np.testing.assert_allclose(lengths(step, ORDER[norm]), 1.0, rtol=1e-6)
    np.testing.assert_allclose(step, threat.steepest_step(gradient / np.float32(size)), rtol=1e-5)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("shape", [(4, 9), (3, 4, 4, 3)])
def test_lemma_1_loss_change_of_a_linear_model_is_epsilon_times_the_dual_norm(norm, shape):
    generator = np.random.default_rng(1)
    gradient = generator.normal(size=shape)
    threat = ThreatModel(norm, 0.05)
    step = threat.steepest_step(gradient).numpy()
    assert step.dtype == np.float64
    np.testing.assert_allclose(lengths(step, ORDER[norm]), 1.0, rtol=1e-12)
    images = generator.uniform(0.1, 0.9, shape)
    x_adv = threat.project(images + 0.05 * step, images).numpy()
    change = np.sum((gradient * (x_adv - images)).reshape(shape[0], -1), axis=1)
    np.testing.assert_allclose(change, 0.05 * lengths(gradient, DUAL_ORDER[norm]), rtol=1e-10)


@pytest.mark.parametrize("norm", NORMS)
def test_lemma_1_step_beats_random_unit_vectors(norm):
    generator = np.random.default_rng(2)
    gradient = generator.normal(size=(1, 6))
    best = float(np.sum(gradient * ThreatModel(norm, 0.1).steepest_step(gradient).numpy()))
    others = generator.normal(size=(20_000, 6)) ** generator.choice([1, 3, 9], (20_000, 1))
    others /= lengths(others, ORDER[norm])[:, None]
    corners = np.vstack([np.eye(6), -np.eye(6), generator.choice([-1.0, 1.0], (200, 6))])
    corners /= lengths(corners, ORDER[norm])[:, None]
    reached = np.vstack([others, corners]) @ gradient[0]
    assert 0.8 * best < reached.max() <= best * (1 + 1e-12)


@pytest.mark.parametrize("norm", NORMS)
def test_equation_8_increment_of_a_smooth_loss(norm):
    generator = np.random.default_rng(3)
    weights, images = tf.constant(generator.normal(size=(5, 4))), generator.uniform(size=(2, 5))
    images = tf.Variable(images)

    def loss(points):
        return tf.reduce_logsumexp(tf.tanh(points @ weights) * 3.0, axis=1)

    with tf.GradientTape() as tape:
        value = loss(images)
    gradient = tape.gradient(value, images)
    step_size = 1e-6
    moved = loss(images + step_size * ThreatModel(norm, 0.1).steepest_step(gradient))
    predicted = step_size * lengths(gradient.numpy(), DUAL_ORDER[norm])
    np.testing.assert_allclose(moved - value, predicted, rtol=1e-4)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_method_takes_arrays_and_tensors_and_keeps_their_dtype(norm, dtype):
    threat = ThreatModel(norm, "8/255")
    array = np.random.default_rng(5).uniform(size=(2, 4, 3)).astype(dtype)
    for images in (array, tf.constant(array)):
        results = [
            threat.random_start(images, [0, 1]),
            threat.steepest_step(images),
            threat.project(images * 0.5, images),
            threat.project_perturbation(images),
            threat.clip_to_bounds(images),
            threat.distance(images * 0.5, images),
        ]
        assert {result.dtype.name for result in results} == {dtype}
        np.testing.assert_allclose(results[-1], lengths(array / 2, ORDER[norm]), rtol=1e-6)


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64])
@pytest.mark.parametrize("norm", NORMS)
def test_unknown_batch_size_in_a_graph(norm, dtype):
    threat = ThreatModel(norm, 0.1)
    spec = [tf.TensorSpec([None, 2, 2, 1], dtype)] * 2
    project = tf.function(threat.project, input_signature=spec)
    step = tf.function(threat.steepest_step, input_signature=spec[:1])
    images = tf.random.stateless_uniform((3, 2, 2, 1), [0, 0], dtype=dtype)
    x_adv = images + tf.random.stateless_normal(images.shape, [0, 1], dtype=dtype)
    np.testing.assert_allclose(
        project(x_adv, images), threat.project(x_adv, images), rtol=0, atol=1e-6
    )
    np.testing.assert_allclose(step(x_adv), threat.steepest_step(x_adv), rtol=0, atol=1e-6)
    assert project(x_adv[:0], images[:0]).shape == (0, 2, 2, 1)


def test_parse_epsilon():
    assert parse_epsilon("8/255") == 8 / 255
    assert parse_epsilon(" 8 / 255 ") == 8 / 255
    assert parse_epsilon("0.031") == parse_epsilon(0.031) == 0.031
    assert parse_epsilon(2) == 2.0 and isinstance(parse_epsilon(2), float)
    assert parse_epsilon(np.float32(0.5)) == 0.5
    assert parse_epsilon("-1/4") == -0.25


BAD_SIZES = ["x", "", "nan", "inf", "1/0", "0/0", "8/", "/255", "8/255/2", "1e999", None, [1], {}]


@pytest.mark.parametrize("value", [*BAD_SIZES, float("nan"), float("inf"), 10**400, 1j])
def test_parse_epsilon_refuses(value):
    with pytest.raises(ValueError) as caught:
        parse_epsilon(value)
    assert re.fullmatch(WHAT_EXPECTED_RECEIVED, str(caught.value), re.DOTALL)
    with pytest.raises(ValueError):
        ThreatModel("l2", value)


BAD_ARGUMENTS = [
    (dict(norm="l3"), r"Unknown norm; .*received norm='l3'"),
    (dict(norm=2), r"Unknown norm"),
    (dict(epsilon=0), r"positive; expected > 0; received epsilon=0"),
    (dict(epsilon="-8/255"), r"positive.*received epsilon='-8/255'"),
    (dict(epsilon=8), r"wider than the pixel bounds; expected at most 1.0.*\"8/255\".*epsilon=8"),
    (dict(epsilon=256, bounds=(0, 255)), r"wider than the pixel bounds; expected at most 255.0"),
    (dict(bounds=(1, 0)), r"Invalid bounds.*received bounds=\(1, 0\)"),
    (dict(bounds=(0, 0)), r"Invalid bounds"),
    (dict(bounds=(0, float("nan"))), r"Invalid bounds"),
    (dict(bounds=(0, float("inf"))), r"Invalid bounds"),
    (dict(bounds=(0, 1, 2)), r"Invalid bounds"),
    (dict(bounds=None), r"Invalid bounds"),
    (dict(bounds=("a", "b")), r"Invalid bounds"),
]


@pytest.mark.parametrize("arguments, message", BAD_ARGUMENTS)
def test_constructor_says_what_is_wrong(arguments, message):
    with pytest.raises(ValueError, match=message) as caught:
        ThreatModel(**arguments)
    assert re.fullmatch(WHAT_EXPECTED_RECEIVED, str(caught.value), re.DOTALL)


def test_epsilon_wider_than_the_bounds_is_legal_where_the_diameter_is_unknown():
    assert ThreatModel("l1", 12).epsilon == 12.0
    assert ThreatModel("l2", 2).epsilon == 2.0
    assert ThreatModel("linf", 8, bounds=(0, 255)).epsilon == 8.0
    assert ThreatModel("linf", 1).epsilon == 1.0


def test_config_equality_hash_and_repr():
    threat = ThreatModel("l2", "128/255", bounds=(-1, 1))
    assert threat.get_config() == {"norm": "l2", "epsilon": 128 / 255, "bounds": [-1.0, 1.0]}
    serialized = keras.saving.serialize_keras_object(threat)
    copies = [
        ThreatModel.from_config(threat.get_config()),
        keras.saving.deserialize_keras_object(serialized),
    ]
    for copy in copies:
        assert copy == threat and hash(copy) == hash(threat) and copy is not threat
        assert copy.bounds == (-1.0, 1.0)
    others = [
        ThreatModel("l1", "128/255", (-1, 1)),
        ThreatModel("l2", 0.5, (-1, 1)),
        ThreatModel("l2", "128/255"),
    ]
    assert len({threat, *copies, *others}) == 4
    assert all(other != threat for other in others) and threat != "l2"
    assert repr(threat) == "ThreatModel(norm='l2', epsilon=0.501961, bounds=(-1.0, 1.0))"
    assert ThreatModel() == ThreatModel("linf", 8 / 255, (0, 1))
