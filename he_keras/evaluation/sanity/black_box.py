"""Checks whether gradients are worth more than guessing: attacks that use none must find less.

Papers: Carlini et al. 2019, "On evaluating adversarial robustness"; Croce & Hein 2020, whose
threshold of 0.2 points for Square this is.
"""

import numpy as np
import tensorflow as tf

from he_keras.attacks.attack import is_wrong
from he_keras.evaluation.check import Check
from he_keras.evaluation.sanity.sample import Sample, points, skipped, surplus_check

_QUERY_GAIN = 0.002
_MOST_NOISY = 32


def black_box(sample: Sample, num_queries: int) -> Check:
    """Runs Square on what no gradient attack has broken."""
    if sample.images.ndim != 4:
        return skipped("black-box", "Square changes windows of images, and these are none.")
    rows = np.flatnonzero(sample.unbroken)
    gained = int(sample.run(sample.build(f"square-{num_queries}"), rows).sum())
    return surplus_check(
        "black-box",
        gained,
        sample,
        _QUERY_GAIN,
        f"{points(gained, sample)} from {num_queries} queries without gradient",
        "Without gradients, nothing is found that attacks with gradients missed.",
        "An attack without gradients breaks what attacks with gradients left: gradients are "
        "masked; report square-5000 and transfer attacks, and look for what blocks the gradient.",
    )


def random_noise(sample: Sample, num_points: int) -> Check:
    """Looks at random points of the ball around what no gradient attack has broken."""
    rows = np.flatnonzero(sample.unbroken)[:_MOST_NOISY]
    images, labels = tf.constant(sample.images[rows]), sample.labels[rows]
    found = np.zeros(len(rows), bool)
    for point in range(num_points if len(rows) else 0):
        noisy = sample.threat.random_start(images, tf.constant([sample.seed, point]))
        found |= is_wrong(sample.model(noisy), labels).numpy()
    figure = f"{found.sum()} of {len(rows)} images that held, {num_points} points each"
    if not found.any():
        message = "Random noise finds nothing that the attacks missed."
        return Check("random-noise", "after", "pass", figure, message)
    return Check(
        "random-noise",
        "after",
        "fail" if found.sum() > 1 else "warn",
        figure,
        "Random noise breaks what gradient attacks left, so these do not work on this model: see "
        "the checks of the gradients; if the model is random, use autoattack-rand.",
    )
