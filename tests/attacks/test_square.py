"""The Square attack against a NumPy version, and by hand; stored runs: test_square_goldens."""

import numpy as np
import pytest
import query_references
import tensorflow as tf
from query_references import problem, random_draws, windows_of

import he_keras as he
from he_keras.attacks import Victim
from he_keras.attacks.square import Draws, Square, pattern, window_origin

# The fast tests hold this attack to the promises of every attack and run its example.
pytestmark = pytest.mark.slow

EPSILON = {"linf": 0.1, "l2": 0.4, "l1": 2.0}
LOSSES = {"cw": query_references.margin, "ce": query_references.negative_cross_entropy}


def threat(norm):
    return he.ThreatModel(norm, EPSILON[norm])


def run_with(attack, network, images, labels, draws):
    compiled = tf.function(
        lambda *arguments: attack.search(Victim(network), *arguments[:2], Draws(*arguments[2:]))
    )
    arguments = images, labels.astype(np.int32), *draws
    signature = [tf.TensorSpec([None, *array.shape[1:]], array.dtype) for array in arguments]
    crafted = compiled.get_concrete_function(*signature)(*map(tf.constant, arguments))
    return crafted.x_adv.numpy(), crafted.forward_passes.numpy()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    "norm, shape",
    [("linf", (10, 10, 3)), ("linf", (6, 9, 2)), ("l2", (17, 17, 3)), ("l1", (10, 10, 3))],
)
def test_every_query_is_that_of_the_numpy_version(norm, shape, loss):
    network, images, labels = problem(shape)
    # Broken from the start: nothing to do.
    labels[0] = (labels[0] + 1) % 4
    attack = Square(threat(norm), 60, loss=loss)
    random = np.random.default_rng(1)
    draws = random_draws(attack, images, random)
    x_adv, passes = run_with(attack, network, images, labels, draws)
    accepted = []
    for each in range(len(images)):
        best, history = query_references.square(
            images[each].transpose(2, 0, 1),
            labels[each],
            network.of_one,
            norm,
            EPSILON[norm],
            draws.start[each],
            draws.queries[each],
            loss=LOSSES[loss],
        )
        np.testing.assert_allclose(x_adv[each], best.transpose(1, 2, 0), atol=1e-6)
        assert passes[each] == 1 + len(history)
        accepted += history
    # Both answers were given often, some examples were broken, and some were not.
    assert 0.05 < np.mean(accepted) < 0.95 and len(accepted) > 100
    assert passes.min() < 61 and passes.max() == 61


def test_one_rejected_and_one_accepted_window_by_hand():
    # The first windows, of 4 x 4 pixels, cover the whole image.
    def sums(images):
        total = tf.reduce_sum(images, axis=[1, 2, 3])
        return tf.stack([total, tf.zeros_like(total)], axis=1)

    images = np.full((1, 4, 4, 2), 0.5)
    images[0, 0, 0, 0] = 0.02
    attack = Square(he.ThreatModel("linf", 0.1), 2)
    start = np.array([0.1, 0.9] * 4, np.float32).reshape(1, 1, 4, 2)
    # Row, column, a sign for each channel.
    up, sideways, down = [0.7, 0.7, 0.5, 0.99], [0.0, 0.3, 0.49, 0.6], [0.9, 0.1, 0.49, 0.2]
    begin = images + [-0.1, 0.1]
    begin[0, 0, 0, 0] = 0.0
    lowest = images - 0.1
    lowest[0, 0, 0, 0] = 0.0
    # Upwards raises the sum, and sideways changes nothing: neither is taken.
    for queries, expected in (([up, sideways], begin), ([up, down], lowest), ([down, up], lowest)):
        draws = Draws(start, np.array([queries], np.float32))
        x_adv, passes = run_with(attack, sums, images, np.array([0]), draws)
        np.testing.assert_allclose(x_adv, expected, atol=1e-7)
        assert passes == 3


def test_a_broken_point_is_taken_even_if_its_cross_entropy_is_lower():
    def turning(images):
        # Bright: right, with a cross-entropy of 1.3. Dark: wrong, with a cross-entropy of 0.7.
        is_dark = tf.reduce_mean(images, axis=[1, 2, 3], keepdims=True)[:, :, 0, 0] < 0.45
        return tf.where(is_dark, [[1.0, 1.1, -9.0, -9.0]], [[1.0, 0.9, 0.9, 0.9]])

    images = np.full((1, 4, 4, 1), 0.5, np.float32)
    start = np.array([0.1, 0.9] * 2, np.float32).reshape(1, 1, 4, 1)
    draws = Draws(start, np.array([[[0.5, 0.5, 0.9], [0.5, 0.5, 0.1]]], np.float32))
    attack = Square(he.ThreatModel("linf", 0.1), 2, loss="ce")
    x_adv, passes = run_with(attack, turning, images, np.array([0]), draws)
    np.testing.assert_allclose(x_adv, 0.4, atol=1e-7)
    assert passes == 3


def test_sides_of_the_windows():
    image = np.zeros([1, 32, 32, 3])
    sides = windows_of(Square(he.ThreatModel(), 5000), image).sides
    expected = [29, 20, 14, 10, 7, 5, 4, 3]
    lengths = [11, 40, 150, 300, 500, 1000, 2000, 999]
    np.testing.assert_array_equal(sides, np.repeat(expected, lengths))
    rescaled = windows_of(Square(he.ThreatModel(), 500, rescale_schedule=True), image).sides
    # Query 1 stands for query 20 of 10000.
    assert rescaled[[0, 1, 2, 3]].tolist() == [29, 20, 20, 14]
    assert rescaled[-1] == 1
    small = windows_of(Square(he.ThreatModel(), 100, initial_fraction=0.1), image).sides
    assert small[0] == 10
    odd = windows_of(Square(he.ThreatModel("l2", 1.0), 5000), image).sides
    assert list(dict.fromkeys(odd.tolist())) == [29, 21, 15, 11, 7, 5, 3]


def test_where_windows_begin():
    numbers = tf.constant([0.0, 0.031, 0.034, 0.5, 1 - 2**-23])
    # One of the 32 rows is never the first.
    assert window_origin(numbers, 32, 1).numpy().tolist() == [0, 0, 1, 15, 30]
    assert window_origin(numbers, 32, 32).numpy().tolist() == [0] * 5


@pytest.mark.parametrize("order, exponent", [(2, 2), (1, 4)])
def test_the_pattern_of_the_l2_and_l1_windows(order, exponent):
    drawn = pattern(3, order)
    assert np.linalg.norm(drawn.ravel(), order) == pytest.approx(1.0)
    # One row of three above two rows of three; the middle of each lies in two squares.
    near, far = 1 + 1 / 2**exponent, 1 / 2**exponent
    upper = np.array([[far, near, far]])
    lower = np.array([[far, far, far], [far, near, far]])
    halves = [part / np.linalg.norm(part.ravel(), order) for part in (upper, -lower)]
    expected = np.concatenate(halves)
    np.testing.assert_allclose(drawn, expected / np.linalg.norm(expected.ravel(), order))


@pytest.mark.parametrize(
    "norm, shape",
    [
        ("linf", (1, 1, 1)),
        ("linf", (2, 2, 3)),
        ("linf", (7, 4, 1)),
        ("l2", (1, 1, 1)),
        ("l2", (2, 2, 3)),
        ("l2", (4, 7, 1)),
        ("l2", (12, 14, 3)),
        ("l1", (2, 2, 3)),
        ("l1", (3, 16, 2)),
    ],
)
def test_any_image_size(norm, shape):
    network, images, labels = problem(shape, count=3)
    result = Square(threat(norm), 12)(network, images, labels)
    assert np.isfinite(result.x_adv).all()
    assert np.all(result.distance <= EPSILON[norm] * (1 + 1e-6))
    moved = result.distance[result.forward_passes > 1]
    assert np.all(moved > 0)


@pytest.mark.parametrize("norm", ["l2", "l1"])
def test_l2_and_l1_perturbations_use_all_of_epsilon(norm):
    network, images, labels = problem((10, 10, 3))
    images = 0.4 + 0.2 * images
    result = Square(threat(norm), 30, stop_when_broken=False)(network, images, labels)
    np.testing.assert_allclose(result.distance, EPSILON[norm], rtol=2e-6)


def test_examples_have_windows_of_their_own():
    network, images, labels = problem((10, 10, 3))
    same = np.repeat(images[:1], 3, axis=0)
    attack = Square(threat("linf"), 20, stop_when_broken=False)
    result = attack(network, same, np.repeat(labels[:1], 3), example_ids=np.array([7, 8, 7]))
    np.testing.assert_array_equal(result.x_adv[0], result.x_adv[2])
    assert np.mean(result.x_adv[0] != result.x_adv[1]) > 0.2


def test_draws_are_uniform():
    attack = Square(threat("linf"), 400)
    images = tf.zeros([5, 10, 10, 3])
    for seeds in (tf.constant([[0, number] for number in range(5)]), tf.constant([0, 1])):
        draws = attack._draw(images, seeds)
        assert draws.queries.shape == (5, 400, 5) and draws.start.shape == (5, 1, 10, 3)
        numbers = draws.queries.numpy()
        assert 0 <= numbers.min() and numbers.max() < 1
        np.testing.assert_allclose(numbers.mean(axis=(0, 1)), 0.5, atol=0.03)
        np.testing.assert_allclose(numbers.std(axis=(0, 1)), 12**-0.5, atol=0.02)
        columns = numbers.transpose(0, 2, 1).reshape(25, 400)
        correlations = np.corrcoef(columns) - np.eye(25)
        assert np.abs(correlations).max() < 0.25


def test_a_tie_decided_for_the_label_goes_on():
    def constant(images):
        return tf.zeros([tf.shape(images)[0], 2]) * tf.reduce_sum(images)

    images = np.full((2, 4, 4, 1), 0.5, np.float32)
    result = Square(threat("linf"), 9)(constant, images, np.array([0, 1]))
    # Class 0 wins the tie. Clean check, start, nine queries, score.
    assert result.success.tolist() == [False, True]
    assert result.forward_passes.tolist() == [12, 1]


@pytest.mark.parametrize("loss", LOSSES)
def test_to_the_end_without_losing_what_is_broken(loss):
    network, images, labels = problem((8, 8, 3), count=24)
    stopped = Square(threat("linf"), 60, loss=loss)(network, images, labels)
    whole = Square(threat("linf"), 60, loss=loss, stop_when_broken=False)(network, images, labels)
    np.testing.assert_array_equal(stopped.success, whole.success)
    assert 0.1 < stopped.success.mean() < 1
    held = ~stopped.success
    np.testing.assert_array_equal(stopped.x_adv[held], whole.x_adv[held])
    assert np.all(whole.margin <= stopped.margin + 1e-9) or loss == "ce"
    assert whole.margin.mean() < stopped.margin.mean() - 1e-3
    assert np.all(whole.forward_passes == 1 + 1 + 60 + 1)
    assert np.all(stopped.forward_passes[held] == 63)
    assert np.all(stopped.forward_passes[stopped.success] < 63)
    assert np.all(whole.backward_passes == 0)


def test_nan_counts_as_broken():
    def nan_where_dark(images):
        darkness = tf.reduce_min(images, axis=[1, 2, 3])
        value = tf.where(darkness < 0.43, np.float32(np.nan), 2.0)
        return tf.stack([value, tf.zeros_like(darkness)], axis=1)

    images = np.full((1, 6, 6, 3), 0.48, np.float32)
    result = Square(he.ThreatModel("linf", 0.1), 5)(nan_where_dark, images, np.array([0]))
    assert result.success.all() and result.non_finite.all()
    assert np.isfinite(result.x_adv).all()


def test_arguments_are_checked():
    for options, text in [
        ({"num_queries": 0}, "num_queries"),
        ({"initial_fraction": 0.0}, "initial_fraction"),
        ({"initial_fraction": 1.5}, "initial_fraction"),
        ({"loss": "dlr"}, "loss='dlr'"),
    ]:
        with pytest.raises(ValueError, match=text):
            Square(threat("linf"), **options)
    with pytest.raises(TypeError, match="rescale_schedule"):
        Square(threat("linf"), rescale_schedule=1)
    vectors = np.full((2, 5), 0.5, np.float32)
    with pytest.raises(
        ValueError, match=r"expected images of shape \(n, height, width, channels\)"
    ):
        Square(threat("linf"), 3)(lambda batch: batch[:, :3], vectors, np.zeros(2, int))


def test_names():
    assert he.attacks.get("square", threat("linf")).num_queries == 5000
    assert he.attacks.get("square-70", threat("linf")).num_queries == 70
