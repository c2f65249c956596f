"""Figures of an evaluation that can be worked out by hand."""

import numpy as np
import pytest
import tensorflow as tf

import he_keras as he
from he_keras.evaluation.statistics import wilson_interval


class Breaks(he.attacks.Attack):
    """Breaks the images whose second pixel is one of its tags."""

    def __init__(self, name, *tags):
        super().__init__(he.ThreatModel("linf", 0.2), name=name)
        self.tags = tags

    def run(self, victim, images, labels, seeds):
        is_chosen = tf.reduce_any(tf.abs(images[:, 1:] - tf.constant([self.tags])) < 0.01, axis=1)
        step = tf.where(is_chosen, -0.2, 0.0)[:, tf.newaxis] * tf.constant([1.0, 0.0])
        passes = tf.zeros_like(labels)
        return he.attacks.Crafted(images + step, passes, passes)


@pytest.mark.parametrize("mode", ["survivors", "individual"])
def test_attacks_that_break_different_examples_add_up(mode):
    """One mistake, one example broken by both attacks, one by either, two by none."""
    images = np.array([[0.4, 0.0], *([0.6, tag / 10] for tag in range(1, 6))], "float32")
    model = lambda images: images[:, :1] * [-1.0, 1.0] + [0.5, -0.5]  # noqa: E731
    attacks = [Breaks("one", 0.1, 0.2), Breaks("other", 0.2, 0.3)]
    report = he.evaluate_robustness(
        model, (images, np.ones(6, int)), attacks[0].threat, attacks, mode=mode, checks=False
    )
    one, other = report.rows
    assert (report.clean_accuracy, report.worst_case) == (5 / 6, 2 / 6)
    assert (one.num_broken, other.num_broken) == (2, 1 if mode == "survivors" else 2)
    assert (one.remaining, other.remaining) == (3 / 6, 2 / 6)
    assert other.robust_accuracy == (2 / 6 if mode == "survivors" else 3 / 6)


def test_the_interval_of_eight_in_ten():
    """As published tables have it: 49.0 % to 94.3 %."""
    np.testing.assert_allclose(wilson_interval(8, 10), (0.49016, 0.94332), atol=1e-5)
