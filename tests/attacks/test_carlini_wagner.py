"""C&W-l2: a NumPy version step by step, distances in closed form, and foolbox's stored results."""

import functools

import golden_models
import numpy as np
import pytest
import tensorflow as tf
from attack_victims import images, labels, linear, weights

import he_keras as he
from he_keras import attacks
from he_keras.attacks.carlini_wagner import CarliniWagnerL2

# The fast tests hold this attack to the promises of every attack and run its example.
pytestmark = pytest.mark.slow

THREAT = he.ThreatModel("l2", 0.25)


class NumpyVersion:
    """One example at a time, on the linear model, in float64; written from the paper."""

    def __init__(self, bounds=(0.0, 1.0), confidence=0.0, learning_rate=0.01, first_const=1e-3):
        self.low, self.high = bounds
        self.confidence, self.learning_rate = confidence, learning_rate
        self.first_const = first_const
        self.weights = weights().astype(np.float64)
        self.passes = 0

    def to_image(self, variable):
        return self.low + (self.high - self.low) * (np.tanh(variable) + 1) / 2

    def objective(self, variable, start, image, label, const):
        """Value, gradient with respect to the variable, image, and whether it is adversarial."""
        self.passes += 1
        x_adv = self.to_image(variable)
        logits = x_adv @ self.weights
        others = np.where(np.arange(logits.size) == label, -np.inf, logits)
        rival = others.argmax()
        lead = logits[label] - logits[rival] + self.confidence
        perturbation = x_adv - self.to_image(start)
        width = self.high - self.low
        gradient = 2 * perturbation / width**2
        if lead > 0:
            gradient = gradient + const * (self.weights[:, label] - self.weights[:, rival])
        gradient = gradient * (self.high - self.low) / 2 * (1 - np.tanh(variable) ** 2)
        value = np.sum((perturbation / width) ** 2) + const * max(lead, 0.0)
        return value, gradient, x_adv, lead < 0

    def search(self, image, label, num_steps, rounds, abort_early=False):
        """Returns the best image, its distance, and the constants tried."""
        unit = 2 * (image - self.low) / (self.high - self.low) - 1
        start = np.arctanh(0.999999 * unit)
        best, best_distance = image, np.inf
        const, lower, upper, tried = self.first_const, 0.0, np.inf, []
        for number in range(rounds):
            if rounds >= 10 and number == rounds - 1:
                const = min(upper, 1e10)
            tried.append(const)
            variable, first, second, found, checked = start, 0.0, 0.0, False, np.inf
            for step in range(1, num_steps + 1):
                value, gradient, x_adv, wrong = self.objective(variable, start, image, label, const)
                found |= wrong
                distance = np.linalg.norm(x_adv - image)
                if wrong and distance < best_distance:
                    best, best_distance = x_adv, distance
                first = 0.9 * first + 0.1 * gradient
                second = 0.999 * second + 0.001 * gradient**2
                mean, size = first / (1 - 0.9**step), second / (1 - 0.999**step)
                variable = variable - self.learning_rate * mean / (np.sqrt(size) + 1e-8)
                if abort_early and (step - 1) % int(np.ceil(num_steps / 10)) == 0:
                    if value > 0.9999 * checked:
                        break
                    checked = value
            if found:
                upper = const
            else:
                lower = const
            const = 10 * const if np.isinf(upper) else (lower + upper) / 2
        return best, best_distance, tried


def problem(low=0.0, high=1.0, count=20):
    """Images in float64 that `linear` predicts, all but four."""
    batch = low + (high - low) * images(count).reshape(count, -1).astype(np.float64)
    predicted = linear(tf.constant(batch)).numpy().argmax(axis=1)
    predicted[::5] = (predicted[::5] + 1) % 4
    return batch, predicted


CASES = {
    "plain": ({"num_steps": 30, "binary_search_steps": 6}, {}),
    "repeat": ({"num_steps": 12, "binary_search_steps": 11}, {"first_const": 0.01}),
    "confident": ({"num_steps": 30, "binary_search_steps": 5}, {"confidence": 0.7}),
    "bounds": ({"num_steps": 25, "binary_search_steps": 5}, {"bounds": (-2.5, 3.0)}),
    "abort": ({"num_steps": 60, "binary_search_steps": 6, "abort_early": True}, {}),
    "fast": ({"num_steps": 60, "binary_search_steps": 4}, {"learning_rate": 0.05}),
}


@pytest.mark.parametrize("case", CASES)
def test_step_by_step(case):
    run, settings = CASES[case]
    bounds = settings.get("bounds", (0.0, 1.0))
    batch, y = problem(*bounds)
    attack = CarliniWagnerL2(
        he.ThreatModel("l2", 1e-3, bounds),
        learning_rate=settings.get("learning_rate", 0.01),
        initial_const=settings.get("first_const", 1e-3),
        confidence=settings.get("confidence", 0.0),
        **run,
    )
    result = attack(linear, batch, y)
    right = linear(tf.constant(batch)).numpy().argmax(axis=1) == y
    names = {
        "num_steps": "num_steps",
        "binary_search_steps": "rounds",
        "abort_early": "abort_early",
    }
    run = {names[key]: value for key, value in run.items()}
    spent, kinds = set(), set()
    for row in np.flatnonzero(right):
        version = NumpyVersion(**settings)
        best, distance, tried = version.search(batch[row], y[row], **run)
        np.testing.assert_allclose(result.distance[row], distance, rtol=1e-9)
        np.testing.assert_allclose(result.x_nearest[row], best, atol=1e-9)
        # The clean check, the score of the best image, and the passes of the search.
        assert result.forward_passes[row] == version.passes + 2
        assert result.backward_passes[row] == version.passes
        spent.add(version.passes)
        kinds.add(bool(np.any(np.diff(tried) < 0)))
    assert (len(spent) > 1) == (case == "abort")
    assert True in kinds
    np.testing.assert_array_equal(result.distance[~right], 0.0)


def test_nothing_found_leaves_the_image_and_an_infinite_distance():
    def unbeatable(batch):
        return linear(batch) + 1e4 * tf.one_hot([2], 4, dtype=batch.dtype)

    y = np.full(20, 2)
    result = CarliniWagnerL2(THREAT, 5, binary_search_steps=3)(unbeatable, images(), y)
    assert not result.success.any() and np.all(np.isinf(result.distance))
    np.testing.assert_array_equal(result.x_adv, images())
    np.testing.assert_array_equal(result.x_nearest, images())


def two_class(slope, threshold):
    def model(batch):
        score = tf.linalg.matvec(batch, tf.constant(slope, batch.dtype)) - threshold
        return tf.stack([tf.zeros_like(score), -score], axis=1)

    return model


@pytest.mark.parametrize("bounds", [(0.0, 1.0), (-1.0, 3.0)])
def test_finds_the_distance_to_a_hyperplane(bounds):
    random = np.random.default_rng(5)
    slope = random.normal(size=30)
    low, high = bounds
    batch = low + (high - low) * random.uniform(0.35, 0.65, size=(12, 30))
    threshold = (batch @ slope).min() - 0.3 * (high - low)
    attack = CarliniWagnerL2(he.ThreatModel("l2", 0.4, bounds), 300)
    result = attack(two_class(slope, threshold), batch, np.zeros(12, int))
    expected = (batch @ slope - threshold) / np.linalg.norm(slope)
    assert np.all(result.distance >= expected * (1 - 1e-6))
    np.testing.assert_allclose(result.distance, expected, rtol=0.02)
    np.testing.assert_array_equal(result.success, result.distance <= 0.4)
    assert 0 < result.success.sum() < 12


def test_finds_the_nearest_point_within_the_bounds():
    """One pixel is at its bound: the others must do its share."""
    slope, batch = np.array([1.0, 1.0, 1.0, 1.0]), np.array([[0.0, 0.5, 0.5, 0.5]])
    result = CarliniWagnerL2(THREAT)(two_class(slope, 1.2), batch, np.zeros(1, int))
    np.testing.assert_allclose(result.x_nearest, [[0.0, 0.4, 0.4, 0.4]], atol=2e-3)
    np.testing.assert_allclose(result.distance, 0.1 * np.sqrt(3), rtol=0.02)
    assert result.x_nearest.min() >= 0


def test_an_adversarial_within_epsilon_is_enough_when_asked():
    attack = functools.partial(CarliniWagnerL2, THREAT, 60, binary_search_steps=5)
    whole = attack()(linear, images(), labels())
    stopped = attack(stop_when_broken=True)(linear, images(), labels())
    np.testing.assert_array_equal(whole.success, stopped.success)
    right = linear(images()).numpy().argmax(axis=1) == labels()
    broken = right & whole.success
    assert 0 < broken.sum() < right.sum()
    assert np.all(stopped.forward_passes[broken] < whole.forward_passes[broken])
    assert np.all(stopped.distance[broken] <= THREAT.epsilon)
    assert np.all(stopped.distance[broken] >= whole.distance[broken] - 1e-6)
    held = right & ~whole.success
    np.testing.assert_allclose(stopped.distance[held], whole.distance[held], rtol=1e-5)
    np.testing.assert_array_equal(whole.forward_passes[right], 5 * 60 + 2)


def test_examples_do_not_influence_each_other():
    attack = CarliniWagnerL2(THREAT, 40, binary_search_steps=4, abort_early=True)
    together = attack(linear, images(), labels())
    for rows in (slice(1, 2), slice(6, 9)):
        alone = attack(linear, images()[rows], labels()[rows])
        np.testing.assert_allclose(alone.distance, together.distance[rows], rtol=1e-4)
        np.testing.assert_array_equal(alone.forward_passes, together.forward_passes[rows])


def test_a_model_without_gradient_is_refused():
    def opaque(batch):
        logits = tf.numpy_function(lambda x: x.reshape(len(x), -1) @ weights(), [batch], tf.float32)
        return tf.ensure_shape(logits, [None, 4])

    with pytest.raises(ValueError, match="needs gradients"):
        CarliniWagnerL2(THREAT, 3)(opaque, images(), labels())


def test_a_model_that_returns_nan_leaves_finite_images():
    def broken(batch):
        flat = tf.reshape(batch, [-1, 12])
        same = tf.reduce_all(flat[:, None] == images().reshape(-1, 12), axis=2)
        return tf.where(tf.reduce_any(same, axis=1)[:, None], linear(batch), np.nan)

    result = CarliniWagnerL2(THREAT, 4, binary_search_steps=2)(broken, images(), labels())
    assert np.all(np.isfinite(result.x_adv)) and np.all(np.isfinite(result.x_nearest))


def test_names_and_defaults():
    assert attacks.get("cw-l2-70", THREAT).num_steps == 70
    config = attacks.get("cw-l2", THREAT).get_config()
    expected = {
        "num_steps": 300,
        "binary_search_steps": 9,
        "learning_rate": 0.01,
        "initial_const": 1e-3,
        "confidence": 0.0,
        "abort_early": False,
        "stop_when_broken": False,
        "name": "cw-l2",
    }
    assert {key: config[key] for key in expected} == expected


@pytest.mark.parametrize(
    "options",
    [
        {"num_steps": 0},
        {"binary_search_steps": 0},
        {"learning_rate": 0},
        {"initial_const": -1e-3},
        {"confidence": -1.0},
        {"abort_early": 1},
    ],
    ids=str,
)
def test_refuses(options):
    name = next(iter(options))
    with pytest.raises((ValueError, TypeError), match=rf"{name}; expected .*; received {name}="):
        CarliniWagnerL2(THREAT, **options)
    with pytest.raises(ValueError, match="received norm='linf'"):
        CarliniWagnerL2(he.ThreatModel("linf", 0.03))


@pytest.mark.slow
@pytest.mark.parametrize("head", golden_models.HEADS)
def test_distances_of_foolbox(head):
    stored = golden_models.arrays(f"stats_{head}")
    right = stored["clean_correct"]
    attack = CarliniWagnerL2(he.ThreatModel("l2", 0.5), 300)
    model = golden_models.classifier(head)
    result = attack(model, golden_models.images(), golden_models.labels())
    distance, expected = result.distance[right], stored["cw_l2_foolbox/dist"][right]
    mean = float(stored["cw_l2_foolbox/mean_dist_clean_correct"])
    # Asked for: the mean within 1 %. Measured: 0.03 %, one example 0.6 %, the median 1e-7.
    assert distance.mean() == pytest.approx(mean, rel=1e-3)
    error = np.abs(distance / expected - 1)
    assert error.max() < 0.03 and np.quantile(error, 0.9) < 1e-3 and np.median(error) < 1e-5
    pixels = np.abs(result.x_nearest[:16] - stored["cw_l2_foolbox/x_adv_first16"])[right[:16]]
    # The path is chaotic for some examples; half are equal to within a few roundings.
    assert np.median(pixels.max(axis=(1, 2, 3))) < 1e-5
    np.testing.assert_array_equal(result.success, ~right | (result.distance <= 0.5))
