"""The loss over a plane around images, against closed forms."""

import json

import numpy as np
import pytest
import tensorflow as tf

import he_keras as he
from he_keras.analysis import Subject
from he_keras.analysis.loss_landscape import LossSurfaces, loss_surface

# Sums of plus or minus these tell all the signs apart.
WEIGHTS = np.array([1, 2, 4, 8, 16, 32, 64, 128], np.float32).reshape(2, 2, 2)
EPSILON = 0.125
IMAGES = np.full((5, 2, 2, 2), 0.5, np.float32)
LABELS = np.zeros(5, int)


def linear(images):
    """The margin loss of class 0 is `<WEIGHTS, x>`."""
    other = tf.reduce_sum(tf.constant(WEIGHTS) * images, axis=[1, 2, 3])
    return tf.stack([tf.zeros_like(other), other], axis=1)


def peaked(images):
    """The margin loss has its maximum, 0.25, where the mean pixel is EPSILON / 2 above 0.5."""
    place = (tf.reduce_mean(images, axis=[1, 2, 3]) - 0.5) / EPSILON
    other = 0.25 - tf.square(place - 0.5)
    return tf.stack([tf.zeros_like(other), other], axis=1)


def random_signs(surface, index):
    """Recovers the signs of an image's random direction from the slope of the margin loss."""
    values = surface.losses["cw"][index]
    middle = len(surface.offsets) // 2
    slope = (values[middle, middle + 1] - values[middle, middle]) / surface.offsets[middle + 1]
    total = round(float(slope) / EPSILON)
    bits = (total + 255) // 2
    assert 2 * bits - 255 == total
    return np.array([1 if bits >> place & 1 else -1 for place in range(8)], float)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["ce", "cw"])
def test_a_linear_model_has_a_plane(loss):
    threat = he.ThreatModel("linf", EPSILON)
    surface = loss_surface(linear, IMAGES, LABELS, threat, loss, num_points=5, batch_size=2)
    np.testing.assert_allclose(surface.offsets, [-1, -0.5, 0, 0.5, 1])
    for index in range(len(IMAGES)):
        random = random_signs(surface, index) @ WEIGHTS.reshape(-1)
        first, second = np.meshgrid(surface.offsets, surface.offsets, indexing="ij")
        expected = 127.5 + EPSILON * (255 * first + random * second)
        np.testing.assert_allclose(surface.losses["cw"][index], expected, rtol=1e-6)
        # So large a loss is its own softplus.
        np.testing.assert_allclose(surface.losses["ce"][index], expected, rtol=1e-6)


def test_random_directions_differ_between_images_and_seeds_not_batches():
    threat = he.ThreatModel("linf", EPSILON)
    images, labels = np.repeat(IMAGES, 8, axis=0), np.repeat(LABELS, 8)
    options = {"num_points": 3, "seed": 3}
    surface = loss_surface(linear, images, labels, threat, batch_size=40, **options)
    signs = np.array([random_signs(surface, index) for index in range(40)])
    assert len(np.unique(signs, axis=0)) > 30
    assert np.abs(signs.mean(axis=0)).max() < 0.6
    again = loss_surface(linear, images, labels, threat, batch_size=7, **options)
    np.testing.assert_array_equal(surface.losses["cw"], again.losses["cw"])
    other = loss_surface(linear, images, labels, threat, num_points=3, seed=4)
    assert not np.array_equal(surface.losses["cw"], other.losses["cw"])


@pytest.mark.fast_cases("linf")
@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_points_inside_the_ball_are_those_within_epsilon(norm):
    threat = he.ThreatModel(norm, EPSILON)
    surface = loss_surface(linear, IMAGES[:2], LABELS[:2], threat, num_points=9, extent=1.5)
    order = {"linf": np.inf, "l2": 2, "l1": 1}[norm]
    flat = WEIGHTS.reshape(-1)
    along = {
        "linf": np.ones(8),
        "l2": flat / np.linalg.norm(flat),
        "l1": (flat == flat.max()).astype(float),
    }[norm]
    for index in range(2):
        unscaled = loss_surface(
            linear, IMAGES[:2], LABELS[:2], he.ThreatModel("linf", EPSILON), num_points=3
        )
        random = random_signs(unscaled, index)
        random /= np.linalg.norm(random, order)
        expected = [
            [np.linalg.norm(a * along + b * random, order) <= 1 + 1e-9 for b in surface.offsets]
            for a in surface.offsets
        ]
        np.testing.assert_array_equal(surface.inside[index], expected)


def test_pixels_stay_in_their_bounds():
    threat = he.ThreatModel("linf", EPSILON)
    surface = loss_surface(linear, np.ones_like(IMAGES), LABELS, threat, num_points=3)
    np.testing.assert_allclose(surface.losses["cw"][:, :, 1], [[255 * 0.875, 255, 255]] * 5)
    assert surface.inside[:, 1:, 1].all()


@pytest.mark.slow
def test_the_maximum_inside_the_ball_is_found_where_one_step_overshoots():
    subject = Subject("peaked", peaked, IMAGES, LABELS, he.ThreatModel("linf", EPSILON))
    analysis = LossSurfaces(loss="cw", num_points=5, num_pictured=1, num_steps=10)
    entry = analysis.measure([subject])["peaked"]
    assert entry["loss_at_image"] == pytest.approx(0.0)
    assert entry["loss_after_one_step"] == pytest.approx(0.0, abs=1e-6)
    assert entry["loss_after_attack"] == pytest.approx(0.25, abs=5e-3)
    assert entry["mean_of_maxima"] == pytest.approx(0.25)
    best = {"loss": pytest.approx(0.25), "along_gradient": 0.5, "along_random": 0.0}
    assert entry["maximum"] == best
    assert [image["maximum"] for image in entry["images"]] == [best]
    # Out of the ball the loss may be higher: nowhere here, but everywhere if the ball is small.
    small = Subject("small", peaked, IMAGES, LABELS, he.ThreatModel("linf", EPSILON / 4))
    surface = loss_surface(peaked, IMAGES, LABELS, small.threat, "cw", 5, extent=2.0)
    values, inside = surface.losses["cw"].mean(axis=0), surface.inside.all(axis=0)
    assert values.max() > values[inside].max()
    wide = LossSurfaces(loss="cw", num_points=5, extent=2.0, num_steps=1).measure([small])["small"]
    assert wide["maximum"]["loss"] == values[inside].max()


@pytest.mark.slow
def test_numbers_and_picture_are_written(tmp_path):
    threat = he.ThreatModel("linf", EPSILON)
    subjects = [Subject(name, peaked, IMAGES, LABELS, threat) for name in ("one", "two")]
    analysis = LossSurfaces(num_points=3, num_steps=2)
    content = analysis.run(subjects, tmp_path)
    assert json.loads((tmp_path / "loss-surface.json").read_text()) == content
    assert (tmp_path / "loss-surface.png").read_bytes()[:4] == b"\x89PNG"
    # Half an epsilon off the peak the other logit is 0: both losses know that place.
    assert analysis.table(content["numbers"]).splitlines()[1].startswith("one: 0.693, 0.693, ")
    from matplotlib.figure import Figure

    figure = Figure()
    analysis.draw(content["numbers"], figure)
    titles = [axes.get_title() for axes in figure.axes]
    assert len(titles) == 10
    assert {"one\nmean cross-entropy", "two\nmean cross-entropy", "mean margin loss"} <= set(titles)
    crosses = [line for axes in figure.axes for line in axes.lines if line.get_marker() == "X"]
    assert len(crosses) == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "dlr"}, "Unknown loss"),
        ({"num_points": 4}, "odd number"),
        ({"num_points": 1}, "odd number"),
        ({"extent": 0}, "extent"),
        ({"batch_size": 0}, "batch_size"),
        ({"seed": -1}, "seed"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LossSurfaces(**options)
    with pytest.raises(ValueError, match=message):
        loss_surface(linear, IMAGES, LABELS, he.ThreatModel("linf", EPSILON), **options)
