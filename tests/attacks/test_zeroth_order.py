"""ZOO: derivatives in closed form, a NumPy version of its coordinate Adam, and its strength."""

import functools

import golden_models
import numpy as np
import pytest
import tensorflow as tf
from attack_victims import CLASSES, PIXELS, THREAT, images, labels, linear, seeds_of, weights

import he_keras as he
from he_keras import attacks
from he_keras.attacks import Victim
from he_keras.attacks.carlini_wagner import DirectSpace, TanhSpace
from he_keras.attacks.framework.result import Goal
from he_keras.attacks.gradient_estimation import SPSA
from he_keras.attacks.zeroth_order import ZOO

# The fast tests hold this attack to the promises of every attack and run its example.
pytestmark = pytest.mark.slow

L2 = he.ThreatModel("l2", 0.25)
SPACES = {"tanh": TanhSpace, "direct": DirectSpace}
both_spaces = pytest.mark.parametrize("space", SPACES)


def draws(attack, count, num_steps):
    """The pixels of all steps, `(num_steps, count, coordinates_per_step)`."""
    seeds = tf.constant(seeds_of(count))
    draw = tf.function(lambda step: attack.draw(step, seeds, PIXELS))
    return np.stack([draw(tf.constant(step)).numpy() for step in range(num_steps)])


def penalty_of(x_adv, label, confidence=0.0):
    """Hinge of the margin of `linear`, and its gradient, for one flat image in float64."""
    exact = weights().astype(np.float64)
    logits = x_adv @ exact
    rival = np.where(np.arange(CLASSES) == label, -np.inf, logits).argmax()
    lead = logits[label] - logits[rival] + confidence
    return max(lead, 0.0), (exact[:, label] - exact[:, rival]) * (lead > 0)


@both_spaces
@pytest.mark.parametrize("bounds", [(0.0, 1.0), (-1.0, 2.5)])
def test_spaces(space, bounds):
    """Images come back, inside the bounds even from far outside, with the slope that they have."""
    low, high = bounds
    made = SPACES[space](he.ThreatModel("linf", 0.1, bounds))
    batch = tf.constant(np.linspace(low, high, 41)[np.newaxis])
    variable = made.variable(batch)
    np.testing.assert_allclose(made.images(variable), batch, atol=1e-6 * (high - low))
    far = made.images(variable * 100.0 + 50.0)
    assert low <= far.numpy().min() and far.numpy().max() <= high
    inner = variable[:, 1:-1]
    rise = (made.images(inner + 1e-6) - made.images(inner - 1e-6)) / 2e-6
    np.testing.assert_allclose(made.slope(inner), rise, rtol=1e-6, atol=1e-9)


@both_spaces
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_partial_derivatives_on_a_linear_model(space, dtype):
    attack = ZOO(L2, num_queries=100, coordinates_per_step=5, space=space)
    made = SPACES[space](L2)
    batch, goal = images().astype(dtype), Goal(tf.constant(labels()))
    start = made.variable(tf.constant(batch.reshape(-1, PIXELS)))
    variable = start + np.random.default_rng(0).uniform(-0.02, 0.02, start.shape).astype(dtype)
    const = tf.constant(np.linspace(0.1, 3.0, 20).astype(dtype))
    coordinates = attack.draw(3, tf.constant(seeds_of(20)), PIXELS)
    found = attack.partial_derivatives(
        Victim(linear), tf.constant(batch), goal, start, variable, const, coordinates
    ).numpy()
    x_adv, x, slope = (
        made.images(variable).numpy(), made.images(start).numpy(), made.slope(variable).numpy()
    )  # fmt: skip
    for row in range(20):
        _, gradient = penalty_of(x_adv[row].astype(np.float64), labels()[row])
        whole = (2 * (x_adv[row] - x[row]) + const[row].numpy() * gradient) * slope[row]
        expected = whole[coordinates[row].numpy()]
        # Rounding of a float32 logit of size 3, divided by 2 sigma.
        close = {"rtol": 1e-5, "atol": 1e-7} if dtype == np.float64 else {"atol": 2e-2}
        np.testing.assert_allclose(found[row], expected, **close)


def test_coordinates_are_drawn_without_replacement_and_evenly():
    attack = ZOO(L2, num_queries=1000, coordinates_per_step=5)
    drawn = draws(attack, 20, 60)
    assert all(len(set(one)) == 5 for one in drawn.reshape(-1, 5))
    shares = np.bincount(drawn.ravel(), minlength=PIXELS) / drawn.size
    np.testing.assert_allclose(shares, 1 / PIXELS, atol=0.02)
    assert not np.array_equal(drawn[0], drawn[1]) and not np.array_equal(drawn[:, 0], drawn[:, 1])
    single = ZOO(L2, num_queries=1000, coordinates_per_step=1)
    drawn = draws(single, 20, 60)
    assert drawn.shape == (60, 20, 1) and set(drawn.ravel()) == set(range(PIXELS))


def numpy_version(attack, batch, y, row, drawn, num_steps):
    """One example in float64 with exact derivatives; returns the best image and its distance."""
    made = SPACES[attack.space](attack.threat)
    order = np.inf if attack.threat.norm == "linf" else 2
    image = batch[row].reshape(-1)
    start = made.variable(tf.constant(image)).numpy()
    best, best_distance = image, np.inf
    const, lower, upper = attack.initial_const, 0.0, np.inf
    step = 0
    for _ in range(attack.binary_search_steps):
        variable, found = start.copy(), False
        first, second, count = np.zeros(PIXELS), np.zeros(PIXELS), np.zeros(PIXELS, int)
        for _ in range(num_steps // attack.binary_search_steps):
            x_adv = made.images(tf.constant(variable)).numpy()
            distance = np.linalg.norm(x_adv - image, order)
            penalty, gradient = penalty_of(x_adv, y[row], attack.confidence)
            if penalty == 0:
                found = True
                if distance < best_distance:
                    best, best_distance = x_adv, distance
            perturbation = x_adv - made.images(tf.constant(start)).numpy()
            whole = 2 * perturbation + const * gradient
            whole *= made.slope(tf.constant(variable)).numpy()
            for entry in drawn[step][row]:
                count[entry] += 1
                first[entry] = 0.9 * first[entry] + 0.1 * whole[entry]
                second[entry] = 0.999 * second[entry] + 0.001 * whole[entry] ** 2
                correction = np.sqrt(1 - 0.999 ** count[entry]) / (1 - 0.9 ** count[entry])
                move = correction * first[entry] / (np.sqrt(second[entry]) + 1e-8)
                variable[entry] -= attack.learning_rate * move
            if attack.space == "direct":
                variable = np.clip(variable, 0, 1)
            step += 1
        if found:
            upper = const
        else:
            lower = const
        const = 10 * const if np.isinf(upper) else (lower + upper) / 2
    return best, best_distance


CASES = {
    "tanh": {"num_queries": 40 * 9},
    "direct": {"num_queries": 40 * 9, "space": "direct", "sigma": 1e-6},
    "clamped": {"num_queries": 40 * 9, "space": "direct", "sigma": 1e-6, "learning_rate": 0.2},
    "rounds": {"num_queries": 90 * 9, "binary_search_steps": 3, "initial_const": 0.02},
    "single": {"num_queries": 200 * 3, "coordinates_per_step": 1},
    "confident": {"num_queries": 40 * 9, "confidence": 0.3},
    "linf": {"num_queries": 40 * 9},
}


@pytest.mark.parametrize("case", CASES)
def test_step_by_step(case):
    threat = he.ThreatModel("linf" if case == "linf" else "l2", 0.1)
    attack = ZOO(threat, **{"coordinates_per_step": 4, "learning_rate": 0.03, **CASES[case]})
    batch, y = images().astype(np.float64), labels()
    result = attack(linear, batch, y)
    num_steps = attack.num_steps(PIXELS)
    drawn = draws(attack, 20, num_steps)
    right = linear(tf.constant(batch)).numpy().argmax(axis=1) == y
    equal, found = [], 0
    for row in np.flatnonzero(right):
        best, distance = numpy_version(attack, batch, y, row, drawn, num_steps)
        found += np.isfinite(distance)
        if result.success[row] and distance > threat.epsilon:
            continue  # The projection of the best image is adversarial, too.
        equal.append(
            np.isclose(result.distance[row], distance, rtol=1e-5)
            and np.allclose(result.x_nearest[row].ravel(), best, atol=1e-5)
        )
    # A difference may straddle the kink of the hinge, where the derivative is exact.
    assert np.mean(equal) >= 0.9 and len(equal) > 8 and found >= 4
    np.testing.assert_array_equal(result.forward_passes[right], attack.num_queries + 2)
    np.testing.assert_array_equal(result.backward_passes, 0)


def test_no_more_queries_than_allowed():
    # 12 pixels: 25 queries a step, where 128 coordinates would need 257.
    result = ZOO(L2, num_queries=260)(linear, images(), labels())
    right = linear(images()).numpy().argmax(axis=1) == labels()
    np.testing.assert_array_equal(result.forward_passes[right], 250 + 2)
    result = ZOO(L2, num_queries=260, binary_search_steps=1, coordinates_per_step=7)(
        linear, images(), labels()
    )
    np.testing.assert_array_equal(result.forward_passes[right], 17 * 15 + 2)


def test_an_adversarial_within_epsilon_is_enough_when_asked():
    attack = functools.partial(ZOO, L2, num_queries=25 * 40, learning_rate=0.03)
    whole = attack()(linear, images(), labels())
    stopped = attack(stop_when_broken=True)(linear, images(), labels())
    np.testing.assert_array_equal(whole.success, stopped.success)
    right = linear(images()).numpy().argmax(axis=1) == labels()
    broken = right & stopped.success & (whole.distance <= L2.epsilon)
    assert 0 < broken.sum() < right.sum()
    assert np.all(stopped.forward_passes[broken] < whole.forward_passes[broken])
    assert np.all(stopped.distance[broken] >= whole.distance[broken] - 1e-6)


def test_comes_near_the_distance_to_a_hyperplane():
    random = np.random.default_rng(5)
    slope = random.normal(size=30)
    batch = random.uniform(0.35, 0.65, size=(6, 30))
    threshold = (batch @ slope).min() - 0.3

    def model(points):
        score = tf.linalg.matvec(points, tf.constant(slope)) - threshold
        return tf.stack([tf.zeros_like(score), -score], axis=1)

    attack = ZOO(he.ThreatModel("l2", 0.4), num_queries=61 * 1500, binary_search_steps=5)
    result = attack(model, batch, np.zeros(6, int))
    expected = (batch @ slope - threshold) / np.linalg.norm(slope)
    assert np.all(result.distance >= expected * (1 - 1e-6))
    np.testing.assert_allclose(result.distance, expected, rtol=0.05)


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_models_without_gradient(norm):
    def opaque(batch):
        logits = tf.numpy_function(lambda x: x.reshape(len(x), -1) @ weights(), [batch], tf.float32)
        return tf.ensure_shape(logits, [None, CLASSES])

    threat = {"l2": L2, "linf": THREAT}[norm]
    attack = ZOO(threat, num_queries=25 * 40, learning_rate=0.03)
    ours = attack(opaque, images(), labels())
    assert ours.success.sum() > (linear(images()).numpy().argmax(axis=1) != labels()).sum()
    assert np.all(ours.distance[ours.success] <= threat.epsilon + 1e-6)


def test_inside_a_training_step():
    """There the batch size is static, and one seed may serve the whole batch."""
    attack = ZOO(THREAT, num_queries=1000, coordinates_per_step=2, learning_rate=0.03)
    y = tf.constant(labels())

    @tf.function
    def craft(seeds):
        return attack.perturb(Victim(linear), tf.constant(images()), y, seeds)

    result = attack(linear, images(), labels())
    attacked = result.forward_passes > 1
    crafted = craft(tf.constant(seeds_of(20))).numpy()
    np.testing.assert_allclose(crafted[attacked], result.x_adv[attacked], atol=1e-3)
    assert np.abs(craft(tf.constant([3, 4])) - images()).max() <= THREAT.epsilon + 1e-6


def test_useless_answers_leave_finite_images():
    def nan_off_the_image(batch):
        flat = tf.reshape(batch, [-1, PIXELS])
        near = tf.abs(flat[:, None] - images().reshape(-1, PIXELS)) < 1e-6
        same = tf.reduce_any(tf.reduce_all(near, axis=2), axis=1)
        return tf.where(same[:, None], linear(batch), np.nan)

    result = ZOO(L2, num_queries=260)(nan_off_the_image, images(), labels())
    assert np.all(np.isfinite(result.x_adv)) and np.all(np.isfinite(result.x_nearest))


def test_name_and_defaults():
    config = attacks.get("zoo", L2).get_config()
    expected = {
        "num_queries": 20_000,
        "coordinates_per_step": 128,
        "sigma": 1e-4,
        "learning_rate": 0.01,
        "initial_const": 10.0,
        "binary_search_steps": 1,
        "confidence": 0.0,
        "space": "tanh",
        "stop_when_broken": False,
    }
    assert {key: config[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"num_queries": 0}, "num_queries"),
        ({"num_queries": 256}, "num_queries"),
        ({"num_queries": 400, "binary_search_steps": 2}, "num_queries"),
        ({"coordinates_per_step": 0}, "coordinates_per_step"),
        ({"sigma": 0.0}, "sigma"),
        ({"learning_rate": -1}, "learning_rate"),
        ({"initial_const": 0}, "initial_const"),
        ({"binary_search_steps": 0}, "binary_search_steps"),
        ({"confidence": -0.1}, "confidence"),
        ({"space": "fourier"}, "space"),
    ],
    ids=str,
)
def test_refuses(options, name):
    with pytest.raises(ValueError, match=rf"; expected .*; received {name}="):
        ZOO(L2, **options)
    with pytest.raises(ValueError, match="received norm='l1'"):
        ZOO(he.ThreatModel("l1", 1.0))


@pytest.mark.slow
def test_weaker_than_spsa_of_fifty_steps():
    threat, model = he.ThreatModel("linf", "8/255"), golden_models.classifier("linear")
    problem = model, golden_models.images()[:32], golden_models.labels()[:32]
    clean = golden_models.arrays("stats_linear")["clean_correct"][:32]
    zoo, spsa = ZOO(threat)(*problem), SPSA(threat, 50)(*problem)
    # Both stay below 1 + 50 * 257 and 20,000 queries; ZOO breaks something, and much less.
    assert spsa.robust_accuracy + 5 / 64 < zoo.robust_accuracy < clean.mean()
