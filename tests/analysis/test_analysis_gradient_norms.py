"""Ratios of weight-gradient norms against closed forms and finite differences."""

import types

import keras
import numpy as np
import pytest
from analysis_subjects import drawn, he_model, linear_model, subject, texts

from he_keras import analysis, attacks
from he_keras.analysis import gradient_norms

RANDOM = np.random.RandomState(0)
KERNEL = RANDOM.normal(size=(4, 3)).astype("float32")
IMAGES = RANDOM.uniform(0.2, 0.8, (5, 4)).astype("float32")
LABELS = np.array([0, 1, 2, 0, 1])


def softmax(logits):
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    return shifted / shifted.sum(axis=1, keepdims=True)


def linear_gradients(images, labels, kernel):
    """The gradient x (p - e_y)^T of each example's cross-entropy, (n, features, classes)."""
    errors = softmax(images @ kernel) - np.eye(kernel.shape[1])[labels]
    return images[:, :, None] * errors[:, None, :]


def norms_of(gradients):
    return np.sqrt((gradients**2).sum(axis=(1, 2)))


def test_norms_of_each_example_of_a_linear_model():
    found = analysis.weight_gradient_norms(linear_model(KERNEL), IMAGES, LABELS)
    assert list(found) == ["head"]
    expected = norms_of(linear_gradients(IMAGES, LABELS, KERNEL))
    np.testing.assert_allclose(found["head"], expected, rtol=1e-5)


def test_norms_of_batches_are_those_of_the_mean():
    found = analysis.weight_gradient_norms(linear_model(KERNEL), IMAGES, LABELS, batch_size=2)
    each = linear_gradients(IMAGES, LABELS, KERNEL)
    expected = norms_of(np.array([each[:2].mean(axis=0), each[2:4].mean(axis=0), each[4]]))
    np.testing.assert_allclose(found["head"], expected, rtol=1e-5)


def test_loss_of_an_he_head_has_its_margin():
    model = he_model(KERNEL, scale=3.0, margin=0.4)

    def loss(kernel):
        cosines = IMAGES[:1] @ (kernel / np.linalg.norm(kernel, axis=0))
        logits = 3.0 * cosines / np.linalg.norm(IMAGES[:1])
        logits[0, 0] -= 3.0 * 0.4
        return -np.log(softmax(logits)[0, 0])

    step, gradient = 1e-5, np.zeros(KERNEL.shape)
    for place in np.ndindex(*KERNEL.shape):
        change = np.zeros(KERNEL.shape)
        change[place] = step
        gradient[place] = (loss(KERNEL + change) - loss(KERNEL - change)) / (2 * step)
    (found,) = analysis.weight_gradient_norms(model, IMAGES[:1], LABELS[:1]).values()
    np.testing.assert_allclose(found, [np.linalg.norm(gradient)], rtol=1e-4)


def test_statistics_and_dropout_stay_out_of_it():
    layers = [
        keras.layers.Dense(6, name="first"),
        keras.layers.BatchNormalization(name="bn"),
        keras.layers.Dropout(0.5),
        keras.layers.Dense(3, name="second"),
    ]
    model = keras.Sequential([keras.Input((4,)), *layers])
    before = [weight.copy() for weight in model.get_weights()]
    first, again = (analysis.weight_gradient_norms(model, IMAGES, LABELS) for _ in range(2))
    assert list(first) == ["first", "second"]
    for layer in first:
        np.testing.assert_array_equal(first[layer], again[layer])
    for now, then in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(now, then)


def test_ratios_of_a_linear_model_are_those_of_its_corner():
    # With two classes the corner of the ball is the worst image: the loss rises along w_1 - w_0.
    kernel = np.array([[1.0, -1.0], [0.5, 0.2], [-0.3, 0.4]])
    images = RANDOM.uniform(0.3, 0.7, (4, 3)).astype("float32")
    labels = np.array([0, 1, 0, 1])
    mine = subject(linear_model(kernel), images, labels, epsilon=0.05)
    numbers = analysis.get("gradient-norms").measure([mine])["mine"]
    away = np.sign(kernel[:, 1] - kernel[:, 0])
    x_adv = images + 0.05 * np.where(labels == 0, 1, -1)[:, None] * away
    clean = norms_of(linear_gradients(images, labels, kernel))
    adversarial = norms_of(linear_gradients(x_adv, labels, kernel))
    assert numbers["layers"] == ["head"]
    ratios = adversarial / clean
    np.testing.assert_allclose(numbers["mean_ratio"], [ratios.mean()], rtol=1e-4)
    np.testing.assert_allclose(numbers["median_ratio"], [np.median(ratios)], rtol=1e-4)
    expected = [adversarial.mean() / clean.mean()]
    np.testing.assert_allclose(numbers["ratio_of_means"], expected, rtol=1e-4)
    assert numbers["skipped"] == [0]
    assert not np.allclose(numbers["mean_ratio"], numbers["ratio_of_means"], rtol=1e-3)


def test_examples_without_a_clean_gradient_are_counted_not_divided_by():
    # A logit of 1000 has a softmax of exactly 1 in float32.
    sure = subject(linear_model(1000.0 * np.eye(2)), [[1.0, 0.0], [0.5, 0.49]], [0, 0])
    numbers = analysis.get("gradient-norms", num_steps=1).measure([sure])["mine"]
    assert numbers["skipped"] == [1]
    assert np.isfinite(numbers["mean_ratio"]).all()
    none = gradient_norms._ratios(np.zeros(2, np.float32), np.ones(2, np.float32))
    assert none == {"mean_ratio": None, "median_ratio": None, "ratio_of_means": None, "skipped": 2}


def test_models_without_kernels_are_refused():
    function = subject(lambda images: images, IMAGES[:, :3], LABELS)
    with pytest.raises(ValueError, match="expected a built keras.Model.*received function"):
        analysis.get("gradient-norms").measure([function])


def test_picture():
    numbers = {
        "linear": {
            "layers": ["conv", "dense"],
            "mean_ratio": [1.5, 2.5],
            "median_ratio": [1.2, 2.0],
        },
        "he": {
            "layers": ["conv", "cosine_head"],
            "mean_ratio": [3.0, None],
            "median_ratio": [2.0, None],
        },
    }
    built = analysis.get("gradient-norms")
    figure = drawn(built, numbers)
    mean, median = figure.axes
    np.testing.assert_array_equal(mean.lines[0].get_ydata(), [1.5, 2.5])
    np.testing.assert_array_equal(mean.lines[1].get_ydata(), [3.0, np.nan])
    # The line at 1 stands after the curves.
    np.testing.assert_array_equal(median.lines[0].get_ydata(), [1.2, 2.0])
    shown = texts(figure)
    assert {"linear", "he", "conv", "head", "layer, from input to head"} <= set(shown)
    assert mean.get_yscale() == "linear"
    numbers["he"]["mean_ratio"][0] = 300.0
    assert drawn(built, numbers).axes[1].get_yscale() == "log"


def test_table():
    entry = {"mean_ratio": [1.5, 2.5], "median_ratio": [1, None], "ratio_of_means": [3, 4]}
    table = analysis.get("gradient-norms").table({"a": {"layers": ["x", "y"], **entry}})
    assert table == (
        "a: mean_ratio 1.50 to 2.50, median_ratio 1.00 to 1.00, ratio_of_means 3.00 to 4.00 "
        "over 2 layers"
    )


def test_every_example_is_attacked_to_the_end(monkeypatch):
    seen = []

    def build(threat, **options):
        seen.append(options)
        return lambda model, images, labels: types.SimpleNamespace(x_adv=images)

    monkeypatch.setattr(attacks, "PGD", build)
    mine = subject(linear_model(KERNEL), IMAGES, LABELS)
    analysis.get("gradient-norms", num_steps=3, seed=4).measure([mine])
    assert seen == [{"num_steps": 3, "keep": "last", "stop_when_broken": False, "seed": 4}]


def test_layers_that_models_do_not_share_are_numbered():
    numbers = {
        "a": {"layers": ["conv", "x", "dense"], "mean_ratio": [1, 1, 1], "median_ratio": [1, 1, 1]},
        "b": {"layers": ["conv", "y"], "mean_ratio": [1, 1], "median_ratio": [1, 1]},
    }
    shown = texts(drawn(analysis.get("gradient-norms"), numbers))
    assert {"conv", "layer 2", "dense"} <= set(shown) and "head" not in shown
