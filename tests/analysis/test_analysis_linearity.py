"""gamma(epsilon, x) on linear and quadratic models, whose closed forms are known."""

import numpy as np
import pytest
import tensorflow as tf
from analysis_subjects import drawn, linear_model, subject, texts

import he_keras as he
from he_keras import analysis
from he_keras.analysis import linearity
from he_keras.analysis.analysis import plain
from he_keras.analysis.linearity import local_linearity

THREAT = he.ThreatModel("linf", 0.1)
KERNEL = np.array([[2.0, -1.0], [-3.0, 0.5], [0.4, 1.0], [1.0, 0.5]])
IMAGES = np.random.default_rng(0).uniform(0.2, 0.8, (7, 4)).astype("float32")
LABELS = np.array([0, 1, 0, 1, 1, 0, 0])


def logistic_gamma(images, labels, epsilon):
    """Gamma for `l = log(1 + exp(-z))`, z linear in the image: the worse end of a segment."""
    sign = np.where(labels == 0, 1.0, -1.0)
    weights = KERNEL[:, 0] - KERNEL[:, 1]
    z = sign * (images.astype(float) @ weights)
    reach = epsilon * np.abs(weights).sum()
    ends = [
        np.logaddexp(0, -(z + move)) - np.logaddexp(0, -z) + move / (1 + np.exp(z))
        for move in (reach, -reach)
    ]
    return np.maximum(*ends), reach / (1 + np.exp(z)), np.logaddexp(0, -z)


def quadratic(curvatures):
    """Logits `(sum b x^2, 0)`: the margin's deviation is `|sum b d^2|`."""

    def logits(images):
        first = tf.reduce_sum(tf.constant(curvatures, images.dtype) * images**2, axis=1)
        return tf.stack([first, tf.zeros_like(first)], axis=1)

    return logits


def test_logistic_loss():
    found = local_linearity(linear_model(KERNEL), IMAGES, LABELS, THREAT, 6, num_restarts=2)
    gamma, slope, loss = logistic_gamma(IMAGES, LABELS, 0.1)
    np.testing.assert_allclose(found.gamma, gamma, rtol=1e-4)
    np.testing.assert_allclose(found.slope, slope, rtol=1e-4)
    np.testing.assert_allclose(found.loss, loss, rtol=1e-4)
    np.testing.assert_allclose(np.abs(found.x_adv - IMAGES), 0.1, atol=1e-6)


def test_the_margin_of_a_linear_model_does_not_deviate():
    found = local_linearity(linear_model(KERNEL), IMAGES, LABELS, THREAT, loss="cw")
    np.testing.assert_allclose(found.gamma, 0.0, atol=1e-6)
    assert np.all(found.slope > 0)


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_the_margin_of_a_quadratic_model(norm):
    curvatures = np.array([0.2, 3.0, 0.1, 0.4])
    threat = he.ThreatModel(norm, 0.1)
    model = quadratic(curvatures)
    found = local_linearity(model, IMAGES, LABELS, threat, num_steps=40, loss="cw")
    largest = curvatures.sum() if norm == "linf" else curvatures.max()
    np.testing.assert_allclose(found.gamma, 0.01 * largest, rtol=0.03)


def test_of_mixed_curvatures_the_stronger_sign_counts():
    found = local_linearity(
        quadratic([0.1, -3.0, 0.1, 0.1]), IMAGES, LABELS, THREAT, 20, 8, loss="cw"
    )
    np.testing.assert_allclose(found.gamma, 0.03, rtol=0.05)
    assert np.all(found.gamma <= 0.03 + 1e-6)


def test_the_points_lie_in_the_ball_and_the_box():
    images = np.where(IMAGES > 0.5, 0.97, 0.02).astype("float32")
    found = local_linearity(linear_model(KERNEL), images, LABELS, THREAT, num_steps=5)
    assert np.abs(found.x_adv - images).max() <= 0.1 + 1e-6
    assert 0.0 <= found.x_adv.min() and found.x_adv.max() <= 1.0
    free, _, _ = logistic_gamma(images, LABELS, 0.1)
    assert np.all(found.gamma <= free + 1e-6) and np.any(found.gamma < 0.9 * free)


@pytest.mark.slow
def test_batches_change_nothing_and_restarts_only_help():
    def gamma(**options):
        model = quadratic([1.0, -2.0, 1.5, -0.5])
        return local_linearity(model, IMAGES, LABELS, THREAT, 3, loss="cw", **options).gamma

    one, four = gamma(), gamma(num_restarts=4)
    np.testing.assert_allclose(gamma(batch_size=3), one, rtol=1e-6)
    assert np.any(gamma(seed=5) != one)
    assert np.all(four >= one) and np.any(four > one)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_steps": 0}, "num_steps=0"),
        ({"num_restarts": 0}, "num_restarts=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"seed": -1}, "seed=-1"),
        ({"loss": "kl"}, "loss='kl'"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=f"expected .*received {message}"):
        local_linearity(linear_model(KERNEL), IMAGES, LABELS, THREAT, **options)
    with pytest.raises(ValueError, match=f"expected .*received {message}"):
        analysis.get("linearity", **options)


@pytest.mark.parametrize("multiples", [(), (0.5, 0.25), (0.0, 1.0), (1.0, 1.0)])
def test_bad_radii_are_refused(multiples):
    with pytest.raises(ValueError, match="multiples; expected increasing numbers > 0"):
        analysis.get("linearity", multiples=multiples)


def test_models_without_gradients_are_refused():
    for model in (lambda x: tf.round(x)[:, :2], lambda x: tf.stop_gradient(x)[:, :2]):
        with pytest.raises(ValueError, match="needs gradients"):
            local_linearity(model, IMAGES, LABELS, THREAT, 2)


@pytest.mark.slow
def test_the_analysis_measures_every_radius_and_draws_a_curve_for_each_model():
    multiples = (0.5, 1.0, 2.0)
    built = analysis.get("linearity", multiples=multiples, num_steps=6, batch_size=4)
    subjects = [
        subject(linear_model(factor * KERNEL), IMAGES, LABELS, name=name)
        for factor, name in ((1.0, "one"), (0.1, "flat"))
    ]
    numbers = plain(built.measure(subjects))
    entry = numbers["one"]
    assert entry["epsilon"] == pytest.approx([0.05, 0.1, 0.2])
    for place, epsilon in enumerate(entry["epsilon"]):
        gamma, slope, loss = logistic_gamma(IMAGES, LABELS, epsilon)
        assert entry["mean_gamma"][place] == pytest.approx(gamma.mean(), rel=1e-4)
        assert entry["mean_slope"][place] == pytest.approx(slope.mean(), rel=1e-4)
        middle = [row[place] for row in entry["quartiles_of_gamma"]]
        assert middle == pytest.approx(np.quantile(gamma, [0.25, 0.5, 0.75]), rel=1e-4)
    assert entry["mean_loss"] == pytest.approx(loss.mean(), rel=1e-4)
    assert max(numbers["flat"]["mean_gamma"]) < min(entry["mean_gamma"])
    figure = drawn(built, numbers)
    curves = figure.axes[0].lines
    for curve, name in zip(curves, numbers, strict=True):
        np.testing.assert_allclose(curve.get_xdata(), numbers[name]["epsilon"])
        np.testing.assert_allclose(curve.get_ydata(), numbers[name]["mean_gamma"])
    assert len({(curve.get_marker(), curve.get_linestyle()) for curve in curves}) == 2
    assert {"one", "flat"} <= set(texts(figure)) and "pixel" in figure.axes[0].get_xlabel()
    lines = built.table(numbers).splitlines()
    assert lines[0].startswith(f"one: gamma(0.1000) = {entry['mean_gamma'][1]:.4f}")


def test_a_point_of_a_smaller_ball_counts_in_the_larger_one(monkeypatch):
    found = {0.05: [1.0, 0.0], 0.1: [0.25, 2.0], 0.2: [3.0, 0.5]}

    def measure(images, labels, epsilon):
        rows = np.array(found[epsilon])
        return linearity.LocalLinearity(rows, rows + 1.0, np.zeros(2), images)

    monkeypatch.setattr(linearity, "_Measure", lambda *settings: measure)
    built = analysis.get("linearity", multiples=(0.5, 1.0, 2.0))
    entry = built.measure([subject(linear_model(KERNEL), IMAGES[:2], LABELS[:2])])["mine"]
    np.testing.assert_allclose(entry["mean_gamma"], [0.5, 1.5, 2.5])
    np.testing.assert_allclose(entry["mean_slope"], [1.5, 2.125, 2.75])


def test_more_steps_never_find_less():
    """The best iterate counts: on mixed curvatures the last is often worse."""
    model = quadratic([1.0, -1.1, 0.9, -0.7])
    gammas = [
        local_linearity(model, IMAGES, LABELS, THREAT, steps, loss="cw").gamma
        for steps in (1, 3, 4)
    ]
    assert np.all(np.diff(gammas, axis=0) >= 0)


def test_no_start_lies_outside_the_box():
    """Beyond pixel value 1 this model bends a thousand times more than anywhere inside."""

    def model(images):
        bend = 1e3 * tf.nn.relu(images - 1.0) ** 2 + images**2
        first = tf.reduce_sum(bend, axis=1)
        return tf.stack([first, tf.zeros_like(first)], axis=1)

    images = np.full((4, 4), 0.97, "float32") + 0.001 * IMAGES[:4]
    found = local_linearity(model, images, LABELS[:4], THREAT, 1, num_restarts=2, loss="cw")
    assert found.x_adv.max() <= 1.0 and np.all(found.gamma <= 0.04 + 1e-6)
