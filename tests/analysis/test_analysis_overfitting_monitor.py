"""The monitor of catastrophic overfitting: its evidence in closed form, and its thresholds."""

import json
import math

import numpy as np
import pytest
import tensorflow as tf

import he_keras as he
from he_keras.analysis import Subject
from he_keras.analysis.overfitting_monitor import (
    OverfittingMonitor,
    gradient_alignment,
    overfitting_verdict,
    read_history,
)

EPSILON = 0.1
IMAGES = np.full((6, 20, 20, 1), 0.5, np.float32)
LABELS = np.zeros(6, int)
THREAT = he.ThreatModel("linf", EPSILON)


def two_logits(other):
    return tf.stack([tf.zeros_like(other), other], axis=1)


def linear(images):
    return two_logits(tf.reduce_mean(images, axis=[1, 2, 3]) - 0.52)


def kinked(images):
    """Its gradient is the sign of every pixel's distance from 0.5."""
    return two_logits(tf.reduce_sum(tf.abs(images - 0.5), axis=[1, 2, 3]))


def hidden(images):
    """Class 1 lies half an epsilon away along the gradient, and one step goes past it."""
    place = (tf.reduce_mean(images, axis=[1, 2, 3]) - 0.5) / EPSILON
    return two_logits(0.1 - tf.square(place - 0.5))


def test_gradients_of_a_linear_model_are_aligned():
    cosines = gradient_alignment(linear, IMAGES, LABELS, THREAT, batch_size=4)
    np.testing.assert_allclose(cosines, np.ones(6), atol=1e-5)


def test_gradients_of_a_kinked_model_are_as_random_as_the_noise():
    threat = he.ThreatModel("linf", 0.1)
    # u is positive enough where it is above -0.05: three quarters of the pixels agree.
    cosines = gradient_alignment(kinked, IMAGES + np.float32(0.05), LABELS, threat, batch_size=4)
    assert np.abs(cosines - 0.5).max() < 0.2
    assert np.unique(cosines).size == 6
    again = gradient_alignment(kinked, IMAGES + np.float32(0.05), LABELS, threat, batch_size=6)
    np.testing.assert_allclose(cosines, again, atol=1e-6)
    other = gradient_alignment(kinked, IMAGES + np.float32(0.05), LABELS, threat, seed=1)
    assert not np.allclose(cosines, other)


def test_an_image_without_gradient_has_no_cosine():
    def constant(images):
        return two_logits(0.0 * tf.reduce_sum(images, axis=[1, 2, 3]))

    assert np.isnan(gradient_alignment(constant, IMAGES, LABELS, THREAT)).all()


@pytest.mark.parametrize(
    ("single", "multi", "alignment", "expected", "num_reasons"),
    [
        (0.40, 0.35, 0.9, "sound", 0),
        (0.40, 0.33, 0.51, "sound", 0),
        (0.40, 0.31, 0.9, "at risk", 1),
        (0.40, 0.21, 0.9, "at risk", 1),
        (0.40, 0.19, 0.9, "collapsed", 1),
        (0.40, 0.35, 0.49, "at risk", 1),
        (0.40, 0.35, 0.21, "at risk", 1),
        (0.40, 0.35, 0.19, "collapsed", 1),
        (0.40, 0.35, math.nan, "collapsed", 1),
        (0.90, 0.00, 0.02, "collapsed", 2),
        (0.40, 0.31, 0.1, "collapsed", 2),
        (0.0, 0.0, 0.9, "sound", 0),
        (0.04, 0.0, 0.9, "sound", 0),
    ],
)
def test_verdict_on_the_model(single, multi, alignment, expected, num_reasons):
    judged, reasons = overfitting_verdict(single, multi, alignment)
    assert (judged, len(reasons)) == (expected, num_reasons)


@pytest.mark.parametrize(
    ("values", "expected", "reason"),
    [
        ([0.1, 0.2, 0.3, 0.24, 0.31], "sound", ""),
        ([0.1, 0.2, 0.3, 0.22, 0.31], "at risk", "fell from 30.0% to 22.0% in epoch 4"),
        ([0.1, 0.3, 0.0, 0.3], "at risk", "collapsed from 30.0% to 0.0% in epoch 3"),
        ([math.nan, 0.3, math.nan, 0.1], "at risk", "collapsed from 30.0% to 10.0% in epoch 4"),
        ([math.nan], "sound", ""),
        ([0.0, 0.0], "sound", ""),
        ([0.04, 0.0], "sound", ""),
        ([], "sound", ""),
    ],
)
def test_verdict_on_the_history(values, expected, reason):
    judged, reasons = overfitting_verdict(0.4, 0.35, 0.9, {"guard_accuracy": values})
    assert judged == expected
    assert reasons == ([f"guard_accuracy {reason}"] if reason else [])


def test_history_is_read_with_gaps(tmp_path):
    assert read_history(None) == {} and read_history(tmp_path) == {}
    (tmp_path / "history.csv").write_text("epoch,guard_accuracy\n0,0.5\n1,\n2,x\n")
    history = read_history(tmp_path)
    assert history["epoch"] == [0, 1, 2]
    np.testing.assert_equal(history["guard_accuracy"], [0.5, math.nan, math.nan])
    (tmp_path / "history.csv").write_text("")
    assert read_history(tmp_path) == {}


@pytest.mark.slow
def test_what_one_step_cannot_break_and_many_can_is_collapsed(tmp_path):
    (tmp_path / "history.csv").write_text(
        "epoch,accuracy,val_robust_accuracy,guard_accuracy\n0,0.2,0.3,0.3\n1,0.9,0.01,0.02\n"
    )
    labels = np.array([0, 0, 0, 0, 1, 1])
    subjects = [
        Subject("hidden", hidden, IMAGES, labels, THREAT, folder=tmp_path),
        Subject("linear", linear, IMAGES, labels, THREAT),
    ]
    analysis = OverfittingMonitor(num_steps=10)
    content = analysis.run(subjects, tmp_path)
    assert json.loads((tmp_path / "overfitting-monitor.json").read_text()) == content
    assert (tmp_path / "overfitting-monitor.png").read_bytes()[:4] == b"\x89PNG"
    one, other = content["numbers"]["hidden"], content["numbers"]["linear"]
    accuracies = [one["clean"], one["single_step"], one["multi_step"], one["gap"]]
    assert accuracies == pytest.approx([4 / 6, 4 / 6, 0.0, 4 / 6])
    assert (one["verdict"], len(one["reasons"])) == ("collapsed", 3)
    assert one["history"]["val_robust_accuracy"] == [0.3, 0.01]
    assert (other["clean"], other["single_step"], other["multi_step"]) == (4 / 6, 0.0, 0.0)
    assert (other["verdict"], other["history"]) == ("sound", {})
    assert other["alignment"] == pytest.approx(1.0, abs=1e-5)
    lines = analysis.table(content["numbers"]).splitlines()
    assert lines[0].startswith("hidden: collapsed (PGD leaves 0.0% correct where FGSM leaves 66.7%")
    assert lines[1].startswith("linear: sound; clean 66.7%, FGSM 0.0%, PGD-10 0.0%, alignment 1.00")


def test_curves_and_bars_are_drawn():
    from matplotlib.figure import Figure

    history = {"accuracy": [0.2, 0.9], "val_robust_accuracy": [0.3, None], "guard_accuracy": [0, 1]}
    entry = {"clean": 0.8, "single_step": 0.5, "multi_step": 0.1, "alignment": None}
    entry |= {"verdict": "collapsed", "history": history}
    figure = Figure()
    OverfittingMonitor(num_steps=7).draw({"run": entry, "bare": {**entry, "history": {}}}, figure)
    curves, bars = figure.axes
    labels = {line.get_label(): list(line.get_ydata()) for line in curves.lines}
    np.testing.assert_equal(
        labels,
        {
            "run, validation": [30.0, math.nan],
            "run, guard": [0.0, 100.0],
            "_training": [20.0, 90.0],
        },
    )
    assert [round(bar.get_height()) for bar in bars.patches] == [80, 80, 50, 50, 10, 10]
    assert "PGD-7" in [text.get_text() for text in bars.get_legend().get_texts()]
    assert bars.get_xticklabels()[0].get_text() == "run\nalignment none\ncollapsed"
    figure = Figure()
    OverfittingMonitor().draw({"bare": {**entry, "history": {}}}, figure)
    assert figure.axes[0].get_title() == "no history.csv"


@pytest.mark.parametrize("option", ["num_steps", "batch_size"])
def test_wrong_options_are_refused(option):
    with pytest.raises(ValueError, match=option):
        OverfittingMonitor(**{option: 0})
