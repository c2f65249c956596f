"""An active test of an attack: an adversarial image is planted, and the attack must find it.

Whether an attack fails because the model is robust or because the attack does not work cannot be
told from its failure. So the head of the network is replaced, for each image, by a linear read-out
of two classes that separates the surroundings of the image from one point on the border of the
ball. That point is adversarial by construction; a sound attack finds it, or another.

Paper: Zimmermann et al. 2022, "Increasing confidence in adversarial robustness evaluations"; 11 of
the 13 published evaluations that it looks at fail.
Deviations: the read-out is the linear discriminant of regularised covariance instead of a fitted
logistic regression; all images are attacked in one batch; fewer points around each image.
"""

import math
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from he_keras.attacks import Victim, check_examples
from he_keras.attacks.attack import is_wrong
from he_keras.evaluation.check import Check
from he_keras.evaluation.sanity.sample import Sample, compiled, skipped
from he_keras.threat import ThreatModel

_NAME = "planted-adversarial"
#: Points inside the ball that keep the image's class, those tried by random search, and candidates.
_NUM_INNER = 48
_RESTARTS = 5
_NUM_RANDOM = 48
_NUM_CANDIDATES = 4
_INNER_RADIUS = 0.95
_RIDGE = 1e-3
#: Where the decision lies between the farthest inner point (0) and the planted one (1).
_THRESHOLD = 0.75
_FEWEST = 4
#: What a sound attack of few steps finds, and how rarely chance may make it look worse.
_SOUND = 0.95
_FALSE_ALARM = 0.05
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


def planted_adversarial(
    model,
    images,
    labels,
    threat: ThreatModel,
    num_images: int = 16,
    num_steps: int = 20,
    seed: int = 0,
) -> Check:
    """Plants an adversarial image near each image, and returns how often an attack finds one.

    Args:
        model: a `keras.Model` or a callable `images -> logits`. Where it gives no access to its
            features, the read-outs stand on its logits.
        images: images within the threat model's bounds.
        labels: integer labels; only their number matters here.
        threat: the threat model.
        num_images: how many of the images to use, from the first.
        num_steps: steps of the attack on the margin that is tested, with five restarts.
        seed: seed of all draws.

    Example:
        >>> import he_keras as he, numpy as np, tensorflow as tf
        >>> from he_keras.evaluation.planted import planted_adversarial
        >>> images = np.random.default_rng(0).uniform(size=(8, 30)).astype("float32")
        >>> rounded = lambda images: tf.round(8 * images) / 8 + 0 * images
        >>> labels, threat = images.argmax(1), he.ThreatModel("linf", 0.1)
        >>> planted_adversarial(lambda images: images, images, labels, threat).verdict
        'pass'
        >>> planted_adversarial(rounded, images, labels, threat).verdict
        'fail'
    """
    images, labels = check_examples(threat, images, labels)
    images = images[:num_images].astype(np.float32)
    features = _features(Victim(model), images)
    readouts = plant(features, images, threat, seed)
    rows = np.flatnonzero(readouts.valid)
    if len(rows) < _FEWEST:
        return skipped(_NAME, "The features hardly change inside the ball: nothing to plant.")
    classifier = _ReadoutClassifier(features, readouts, rows)
    sample = Sample(classifier, images[rows], np.zeros(len(rows), np.int64), threat, seed=seed)
    # Without the early stop, rows stay in the order in which their read-outs stand.
    attack = sample.ascent(steps=num_steps, num_restarts=_RESTARTS, stop_when_broken=False)
    found = int(sample.run(attack).sum())
    return _verdict(found, len(rows), _random_search(sample))


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
    """The features in front of the head, or the logits of a model that hides them."""
    try:
        victim.features(tf.constant(images[:1]))
    except (ValueError, AttributeError, TypeError):
        return compiled(victim.logits, images)
    return compiled(victim.features, images)


def _random_search(sample: Sample) -> int:
    """How many planted decisions random points in the ball find: few, if the test is a hard one."""
    found = np.zeros(len(sample), bool)
    for point in range(_NUM_RANDOM):
        seed = tf.constant([sample.seed + 1, point])
        noisy = sample.threat.random_start(tf.constant(sample.images), seed)
        found |= is_wrong(sample.model(noisy), sample.labels).numpy()
    return int(found.sum())


def _verdict(found: int, total: int, by_chance: int) -> Check:
    figure = f"{found} of {total} found, {by_chance} by random search"
    if _chance_of_so_few(found, total) >= _FALSE_ALARM:
        message = "The attack finds adversarial images that are known to exist."
        return Check(_NAME, "after", "pass", figure, message)
    return Check(
        _NAME,
        "after",
        "fail" if found < _LOW * total else "warn",
        figure,
        "The attack misses adversarial images that are known to exist, so what it does not break "
        "is not thereby robust: find what blocks the gradient, and use square-5000.",
    )


def _chance_of_so_few(found: int, total: int) -> float:
    """How often an attack that finds a share `_SOUND` of all finds at most so many of these.

    Example:
        >>> from he_keras.evaluation.planted import _chance_of_so_few
        >>> [round(_chance_of_so_few(found, 16), 2) for found in (16, 15, 14, 13)]
        [1.0, 0.56, 0.19, 0.04]
    """
    return sum(
        math.comb(total, count) * _SOUND**count * (1.0 - _SOUND) ** (total - count)
        for count in range(found + 1)
    )


def _as_rows(features) -> np.ndarray:
    return np.asarray(features, np.float64)
