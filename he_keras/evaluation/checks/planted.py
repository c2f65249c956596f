"""An active test of an attack: an adversarial image is planted, and the attack must find it.

An attack may fail because the model is robust, or because the attack does not work. Its failure
does not say which. So for each image a linear read-out of two classes replaces the head of the
network. It separates the surroundings of the image from one point on the border of the ball. That
point is adversarial by construction. A sound attack finds it, or another one.

Paper: Zimmermann et al. 2022, "Increasing confidence in adversarial robustness evaluations"; 11 of
the 13 published evaluations that it looks at fail.
Deviations: the read-out is the linear discriminant of regularised covariance instead of a fitted
logistic regression. All images are attacked in one batch. There are fewer points around each image.
"""

from typing import NamedTuple

import numpy as np
import tensorflow as tf

from he_keras.attacks import Victim
from he_keras.evaluation.checks.check import AttackedSample, Outcome, compiled, passed, skipped
from he_keras.evaluation.statistics import CHANCE_LEVEL, POWER, chance_of_at_least
from he_keras.threat import ThreatModel

#: Bounds the cost: each of these images takes five restarts of the attack.
_NUM_PLANTED = 16
#: Points inside the ball that keep the image's class; fewer than the paper's, for their cost.
_NUM_INNER = 48
#: Chosen: one unlucky start is no failure of the attack.
_RESTARTS = 5
#: Points that random search tries: as many as there are inner points.
_NUM_RANDOM = 48
#: Border points of which the one farthest from the inner points is planted.
_NUM_CANDIDATES = 4
#: Share of epsilon: chosen so that no inner point lies as far out as the planted one.
_INNER_RADIUS = 0.95
#: Added variance, as a share of the mean one: there are fewer inner points than features.
_RIDGE = 1e-3
#: Where the decision lies between the farthest inner point (0) and the planted one (1).
_THRESHOLD = 0.75
#: Chosen: fewer read-outs say nothing about an attack.
_FEWEST = 4
#: What a sound attack of few steps finds.
_SOUND = 0.95
#: Chosen: an attack that finds fewer than half fails instead of warning.
_LOW = 0.5


class Readouts(NamedTuple):
    """Two-class read-outs, one row for each image: class 1 where `weights @ features > threshold`.

    Attributes:
        weights: `(n, features)`.
        threshold: `(n,)`.
        planted: the adversarial images.
        valid: whether the read-out separates the planted image from the image and its surroundings.
    """

    weights: np.ndarray
    threshold: np.ndarray
    planted: np.ndarray
    valid: np.ndarray


def planted_adversarial(sample: AttackedSample) -> Outcome:
    """Plants an adversarial image near each image, and says how often an attack finds one.

    The attack is the iterated one on the margin, with five restarts. Where the model gives no
    access to its features, the read-outs stand on its logits. Labels play no part.

    Example:
        >>> import he_keras as he, numpy as np, tensorflow as tf
        >>> from he_keras.evaluation.checks.planted import planted_adversarial
        >>> from he_keras.evaluation.checks.check import AttackedSample
        >>> images = np.random.default_rng(0).uniform(size=(8, 30)).astype("float32")
        >>> rounded = lambda images: tf.round(8 * images) / 8 + 0 * images
        >>> labels, threat = images.argmax(1), he.ThreatModel("linf", 0.1)
        >>> sound = AttackedSample(lambda images: images, images, labels, threat)
        >>> planted_adversarial(sound).verdict
        'pass'
        >>> planted_adversarial(AttackedSample(rounded, images, labels, threat)).verdict
        'fail'
    """
    images, threat, seed = sample.images[:_NUM_PLANTED], sample.threat, sample.seed
    features = _features(Victim(sample.model), images)
    readouts = plant(features, images, threat, seed)
    rows = np.flatnonzero(readouts.valid)
    if len(rows) < _FEWEST:
        return skipped("The features hardly change inside the ball: nothing to plant.")
    classifier = _ReadoutClassifier(features, readouts, rows)
    labels = np.zeros(len(rows), np.int64)
    planted = AttackedSample(classifier, images[rows], labels, threat, seed=seed)
    # Without the early stop, rows stay in the order in which their read-outs stand.
    attack = planted.ascent(steps=sample.num_steps, num_restarts=_RESTARTS, stop_when_broken=False)
    found = int(planted.run(attack).sum())
    # Random points find few, if the test is a hard one.
    all_rows = np.arange(len(planted))
    by_chance = int(planted.broken_by_noise(all_rows, _NUM_RANDOM, seed + 1).sum())
    return judge(found, len(rows), by_chance)


def plant(features, images: np.ndarray, threat: ThreatModel, seed: int) -> Readouts:
    """Builds a read-out with a planted adversarial image for each image.

    Args:
        features: function from images to feature vectors.
        images: the images.
        threat: the threat model.
        seed: seed of the points.
    """
    centre = _as_rows(features(tf.constant(images)))
    inner = [centre]
    for point in range(_NUM_INNER):
        nearby = threat.random_start(
            tf.constant(images), tf.constant([seed, point]), _INNER_RADIUS * threat.epsilon
        )
        inner.append(_as_rows(features(nearby)))
    candidates = [border_points(images, threat, (seed, 7, each)) for each in range(_NUM_CANDIDATES)]
    outer = [_as_rows(features(tf.constant(candidate))) for candidate in candidates]
    columns = [
        _readout(np.stack([each[row] for each in inner]), np.stack([each[row] for each in outer]))
        for row in range(len(images))
    ]
    weights, thresholds, chosen, valid = (np.array(column) for column in zip(*columns, strict=True))
    planted = np.stack(candidates)[chosen, np.arange(len(images))]
    return Readouts(weights, thresholds, planted, valid)


def border_points(images: np.ndarray, threat: ThreatModel, seed: tuple[int, ...]) -> np.ndarray:
    """Draws a point on the border of the ball around each image (linf: a corner)."""
    random = np.random.default_rng(seed)
    if threat.norm == "linf":
        direction = random.choice([-1.0, 1.0], size=images.shape)
    elif threat.norm == "l2":
        direction = random.normal(size=images.shape)
    else:
        direction = random.laplace(size=images.shape)
    direction = tf.constant(direction.astype(np.float32))
    length = tf.reshape(
        threat.distance(direction, tf.zeros_like(direction)), [-1] + [1] * (images.ndim - 1)
    )
    return np.asarray(threat.project(images + threat.epsilon * direction / length, images))


def _readout(inner: np.ndarray, outer: np.ndarray) -> tuple[np.ndarray, float, int, bool]:
    """Returns the discriminant, its threshold, the number of the planted point, and its validity.

    Of the candidates, the one farthest from the inner points is planted.
    """
    mean = inner.mean(axis=0)
    centred = inner - mean
    covariance = centred.T @ centred / len(inner)
    size = np.trace(covariance) / len(covariance)
    covariance += (_RIDGE * size + 1e-12) * np.eye(len(covariance))
    directions = np.linalg.solve(covariance, (outer - mean).T).T
    chosen = int(np.argmax(np.sum(directions * (outer - mean), axis=1)))
    weights = directions[chosen]
    weights /= np.linalg.norm(weights) + 1e-30
    farthest, planted = float((inner @ weights).max()), float(outer[chosen] @ weights)
    spread = float((inner @ weights).std())
    threshold = (1.0 - _THRESHOLD) * farthest + _THRESHOLD * planted
    # More than rounding: else float32 could not tell the two apart.
    valid = planted - farthest > 1e-5 * max(1.0, abs(planted)) and spread > 0.0
    return weights, threshold, chosen, bool(valid)


class _ReadoutClassifier:
    """The network with a read-out of its own for each row of the batch."""

    def __init__(self, features, readouts: Readouts, rows: np.ndarray) -> None:
        self.features = features
        self.weights = tf.constant(readouts.weights[rows], tf.float32)
        self.threshold = tf.constant(readouts.threshold[rows], tf.float32)

    def __call__(self, images):
        count = tf.shape(images)[0]
        score = tf.reduce_sum(self.features(images) * self.weights[:count], axis=1)
        score -= self.threshold[:count]
        return tf.stack([-score, score], axis=1)


def _features(victim: Victim, images: np.ndarray):
    """Returns the features before the head, or the logits of a model that hides its features."""
    try:
        victim.features(tf.constant(images[:1]))
    except (ValueError, AttributeError, TypeError):
        return compiled(victim.logits, images)
    return compiled(victim.features, images)


def judge(found: int, total: int, by_chance: int) -> Outcome:
    """Returns the outcome of an attack that finds some of the planted images."""
    figure = f"{found} of {total} found, {by_chance} by random search"
    limit = (
        f"with {total} images an attack that finds more than {_found_rate(total):.0%} cannot be "
        "told from a sound one"
    )
    if not _are_too_few(found, total):
        message = "The attack finds adversarial images that are known to exist."
        return passed(figure, message, limit)
    return Outcome(
        "fail" if found < _LOW * total else "warn",
        figure,
        "The attack misses adversarial images that are known to exist, so what it does not break "
        "need not be robust: find what blocks the gradient, and use square-5000.",
        limit,
    )


def _are_too_few(found: int, total: int) -> bool:
    """Whether an attack that finds a share `_SOUND` of all images would hardly ever find so few.

    Example:
        >>> from he_keras.evaluation.checks.planted import _are_too_few
        >>> [_are_too_few(found, 16) for found in (16, 14, 13)]
        [False, False, True]
    """
    return 1.0 - chance_of_at_least(found + 1, total, _SOUND) < CHANCE_LEVEL


def _found_rate(total: int) -> float:
    """Returns the largest share that an attack can find and still warn in four of five samples."""
    enough = next(found for found in range(total + 1) if not _are_too_few(found, total))
    rates = np.arange(100, -1, -1) / 100
    return next(rate for rate in rates if 1.0 - chance_of_at_least(enough, total, rate) >= POWER)


def _as_rows(features) -> np.ndarray:
    return np.asarray(features, np.float64)
