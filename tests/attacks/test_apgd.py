"""APGD in linf and l2: the NumPy version, closed forms, when it stops, and what it costs."""

from collections import Counter

import attack_victims
import numpy as np
import pytest
import tensorflow as tf
from apgd_problem import EXAMPLES, NETWORK, THREATS, problem, run
from apgd_reference import CLASSES, SHAPE, apgd, trace
from attack_victims import seeds_of

import he_keras as he
from he_keras import attacks
from he_keras.attacks import Victim
from he_keras.attacks.apgd import APGD, rise_limits
from he_keras.attacks.apgd_targeted import APGDTargeted
from he_keras.attacks.framework.result import Goal

# The fast tests hold this attack to the promises of every attack and run its example.
pytestmark = pytest.mark.slow


# The NumPy version.

# A DLR whose denominator comes near zero magnifies rounding: it is left to linf and short runs.
SETTINGS = [
    ("linf", "ce", 100, 0.75),
    ("linf", "dlr", 50, 0.75),
    ("linf", "cw", 50, 0.3),
    ("linf", "dlr-targeted", 12, 0.75),
    ("l2", "ce", 100, 0.75),
    ("l2", "cw", 50, 0.3),
    ("l2", "dlr-targeted", 12, 0.5),
]


@pytest.mark.parametrize(("norm", "loss", "num_steps", "rho"), SETTINGS)
def test_every_iterate_is_that_of_the_numpy_version(norm, loss, num_steps, rho):
    images, labels, starts = problem()
    is_targeted = loss == "dlr-targeted"
    targets = (labels + 1) % CLASSES if is_targeted else None
    inputs = tuple(map(tf.constant, (images, labels) + ((targets,) if is_targeted else ())))
    attack_class = APGDTargeted if is_targeted else APGD
    attack = attack_class(THREATS[norm], loss, num_steps, rho=rho, stop_when_broken=False)
    ours = trace(attack, NETWORK, inputs, starts)
    reasons = Counter()
    for row, (image, start) in enumerate(zip(images, starts, strict=True)):
        target = None if targets is None else targets[row]
        evaluate = NETWORK.evaluator(loss, labels[row], target)
        expected = apgd(evaluate, image, start, norm, THREATS[norm].epsilon, num_steps, rho)
        reasons.update(expected["reasons"])
        np.testing.assert_allclose(ours["points"][:, row], expected["points"], atol=1e-9)
        np.testing.assert_allclose(ours["eta"][:, row], expected["eta"], rtol=1e-12)
        np.testing.assert_allclose(ours["best"][:, row], expected["best"], atol=1e-8, rtol=1e-8)
        np.testing.assert_allclose(ours["final"][row], expected["final"], atol=1e-9)
        np.testing.assert_allclose(ours["adversarial"][row], expected["adversarial"], atol=1e-9)
        assert ours["broken"][row] == expected["broken"]
    # Both reasons to halve the step have occurred, and a check that leaves it, where rho is low.
    assert reasons["rarely"]
    if rho == 0.3:
        assert reasons["stuck"] and reasons[""]


def test_the_loop_gives_what_its_steps_give_one_by_one():
    images, labels, starts = problem()
    attack = APGD(THREATS["linf"], num_steps=20, stop_when_broken=False)
    images, labels = tf.constant(images), tf.constant(labels)
    single = trace(attack, NETWORK, (images, labels), starts)
    state = attack.search(Victim(NETWORK), (images, Goal(labels)), tf.constant(starts))
    np.testing.assert_allclose(state.best.point[0], single["final"], atol=1e-12)
    np.testing.assert_allclose(state.best.strength, single["best"][-1], atol=1e-12)
    np.testing.assert_array_equal(state.broken, single["broken"])
    np.testing.assert_array_equal(state.passes, 21)


@pytest.mark.parametrize(
    ("num_steps", "checks"),
    [
        (100, [22, 41, 57, 70, 80, 87, 93, 99]),
        (50, [11, 21, 30, 38, 45]),
        (20, [4, 7, 9, *range(10, 21)]),
        (2, [1, 2]),
        (1, [1]),
    ],
)
def test_checks_are_made_at_fixed_iterations(num_steps, checks):
    limits = rise_limits(num_steps, 0.75)
    assert len(limits) == num_steps + 1
    assert [index for index, limit in enumerate(limits) if limit >= 0] == checks
    periods = np.diff([0, *checks])
    assert [limits[check] for check in checks] == [int(0.75 * period) for period in periods]


# Closed forms.


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("random_start", [True, False])
def test_finds_the_optimum_of_a_linear_model(norm, random_start):
    random = np.random.default_rng(5)
    direction = random.normal(size=SHAPE)
    # Box constraints are active in linf only: there the optimum is known all the same.
    images = random.uniform(0.3, 0.7, size=(6, *SHAPE)) if norm == "l2" else problem()[0][:6]
    epsilon = 0.25
    if norm == "linf":
        best = np.clip(images + epsilon * np.sign(direction), 0, 1)
    else:
        best = images + epsilon * direction / np.linalg.norm(direction)

    def model(batch):
        gain = tf.tensordot(batch, tf.constant(direction, batch.dtype), 3)
        return tf.stack([20 - gain, gain - 20], axis=1)

    threat = he.ThreatModel(norm, epsilon)
    attack = APGD(threat, "cw", 50, random_start=random_start)
    result = run(attack, model, np.zeros(6, np.int32), images)
    gains = np.tensordot(result.x_adv, direction, 3), np.tensordot(best, direction, 3)
    np.testing.assert_allclose(*gains, atol=1e-9 if norm == "linf" else 1e-3)


def test_dlr_does_not_depend_on_the_scale_of_the_logits():
    def scaled(batch):
        return 1e4 * NETWORK(batch)

    attack = APGD(THREATS["linf"], "dlr", 10)
    ours, other = run(attack).x_adv, run(attack, scaled).x_adv
    np.testing.assert_allclose(ours, other, atol=1e-9)
    assert np.abs(ours - problem()[0]).max() > 0.05


# When an example ends, and what is returned.


def verdicts(norm, **options):
    """Iterates of a full run, and for each example the numbers of the misclassified ones."""
    images, labels, _ = problem()
    attack = APGD(THREATS[norm], num_steps=10, random_start=False, stop_when_broken=False)
    points = trace(attack, NETWORK, (tf.constant(images), tf.constant(labels)), images)["points"]
    predicted = np.array([[NETWORK.logits(each).argmax() for each in row] for row in points])
    return points, [np.flatnonzero(column) for column in (predicted != labels).T]


@pytest.mark.parametrize("norm", THREATS)
def test_an_example_ends_at_its_first_misclassified_iterate(norm):
    images, labels, _ = problem()
    points, wrong = verdicts(norm)
    result = APGD(THREATS[norm], num_steps=10, random_start=False)(NETWORK, images, labels)
    assert 3 < result.success.sum() < EXAMPLES
    for row, numbers in enumerate(wrong):
        assert result.success[row] == bool(len(numbers))
        if len(numbers):
            np.testing.assert_allclose(result.x_adv[row], points[numbers[0], row], atol=1e-9)
        # Right at the start: the check, the start, the steps, the score of what is returned.
        steps = numbers[0] if len(numbers) else 10
        passes = steps + 1 if steps else 0
        assert result.backward_passes[row] == passes
        assert result.forward_passes[row] == (passes + 2 if passes else 1)


@pytest.mark.parametrize("norm", THREATS)
def test_without_stopping_the_last_misclassified_iterate_is_returned(norm):
    images, labels, _ = problem()
    points, wrong = verdicts(norm)
    options = {"random_start": False, "stop_when_broken": False}
    result = APGD(THREATS[norm], num_steps=10, **options)(NETWORK, images, labels)
    assert any(len(numbers) > 1 for numbers in wrong)
    for row, numbers in enumerate(wrong):
        if len(numbers):
            np.testing.assert_allclose(result.x_adv[row], points[numbers[-1], row], atol=1e-9)
    np.testing.assert_array_equal(result.backward_passes, 11)
    np.testing.assert_array_equal(result.forward_passes, 13)


def test_where_nothing_is_found_the_point_of_largest_loss_is_returned():
    images, labels, _ = problem()
    threat = he.ThreatModel("linf", 0.01)
    attack = APGD(threat, num_steps=20, random_start=False)
    result = attack(NETWORK, images, labels)
    state = attack.search(Victim(NETWORK), (tf.constant(images), Goal(tf.constant(labels))), images)
    held = ~result.success
    assert held.sum() > 6
    np.testing.assert_allclose(result.x_adv[held], state.best.point[0].numpy()[held], atol=1e-9)
    clean = he.losses.cross_entropy(NETWORK(tf.constant(images)), labels).numpy()
    assert np.all(state.best.strength.numpy()[held] > clean[held])


@pytest.mark.parametrize("norm", THREATS)
def test_passes_of_a_randomised_model_are_averaged_and_counted(norm):
    once, thrice = (run(APGD(THREATS[norm], num_steps=6, eot_samples=each)) for each in (1, 3))
    np.testing.assert_allclose(thrice.x_adv, once.x_adv, atol=1e-9)
    np.testing.assert_array_equal(thrice.backward_passes, 3 * once.backward_passes)
    np.testing.assert_array_equal(thrice.forward_passes, 3 * once.forward_passes)
    assert 1 <= once.backward_passes.numpy().min() < once.backward_passes.numpy().max() == 7


# Starts.


@pytest.mark.parametrize("norm", THREATS)
def test_random_starts_lie_on_the_sphere(norm):
    images = np.repeat(problem()[0], 10, axis=0)
    threat = THREATS[norm]
    attack = APGD(threat)
    seeds = tf.constant(seeds_of(len(images)))
    plain = APGD(threat, random_start=False)
    cases = (attack, 0), (attack, 0), (attack, 1), (plain, 0)
    *starts, unmoved = [each._start(tf.constant(images), seeds, number) for each, number in cases]
    starts = [start.numpy() for start in starts]
    noise = (starts[0] - images).reshape(len(images), -1)
    if norm == "linf":
        np.testing.assert_allclose(np.abs(noise).max(axis=1), threat.epsilon, rtol=1e-9)
        # Uniform but for the factor, which is near 1.
        assert 0.4 < np.abs(noise / threat.epsilon).mean() < 0.65
    else:
        np.testing.assert_allclose(np.linalg.norm(noise, axis=1), threat.epsilon, rtol=1e-9)
        kurtosis = np.mean(noise**4) / np.mean(noise**2) ** 2
        assert 2.5 < kurtosis < 3.1
    assert abs(noise.mean()) < 0.1 * threat.epsilon
    np.testing.assert_array_equal(starts[0], starts[1])
    assert np.abs(starts[0] - starts[2]).reshape(len(images), -1).max(axis=1).min() > 1e-3
    np.testing.assert_array_equal(unmoved, images)


def test_seeds_decide_the_start_of_each_example():
    images, labels, _ = problem()
    attack = APGD(THREATS["linf"], num_steps=1, stop_when_broken=False)
    whole = run(attack)
    part = images[3:7], labels[3:7], np.arange(3, 7)
    x_adv = attack(NETWORK, *part).x_adv
    np.testing.assert_allclose(x_adv, whole.x_adv[3:7], atol=1e-12)
    other = APGD(THREATS["linf"], num_steps=1, stop_when_broken=False, seed=1)
    assert np.abs(other(NETWORK, *part).x_adv - x_adv).max() > 1e-3


# Inside other functions, odd models, and wrong arguments.


@pytest.mark.parametrize("stop_when_broken", [True, False])
@pytest.mark.parametrize("attack_class", [APGD, APGDTargeted])
def test_inside_a_function_whose_batch_size_is_known(attack_class, stop_when_broken):
    images, labels, _ = problem()
    attack = attack_class(THREATS["linf"], num_steps=3, stop_when_broken=stop_when_broken)

    @tf.function
    def perturb(batch):
        return attack.perturb(Victim(NETWORK), batch, tf.constant(labels), tf.constant([1, 2]))

    x_adv = perturb(tf.constant(images)).numpy()
    assert x_adv.shape == images.shape
    assert 0.05 < np.abs(x_adv - images).max() <= 0.1 + 1e-9


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
@pytest.mark.parametrize("attack_class", [APGD, APGDTargeted])
@pytest.mark.parametrize("kind", ["constant", "not a number"])
def test_models_without_a_useful_gradient(attack_class, norm, kind):
    images = attack_victims.images(4)

    def model(batch):
        logits = 0.0 * attack_victims.linear(batch) + [2.0, 0.0, 0.0, 0.0]
        is_moved = tf.reduce_any(batch != images, axis=[1, 2, 3])[:, None]
        return tf.where(is_moved, np.nan, logits) if kind == "not a number" else logits

    attack = attack_class(he.ThreatModel(norm, 0.1), num_steps=4)
    result = run(attack, model, np.zeros(4, np.int32), images)
    assert np.isfinite(result.x_adv).all()
    # Logits that are not numbers count as misclassified: the random start is the end.
    passes = 1 if kind == "not a number" else 5 * (3 if attack_class is APGDTargeted else 1)
    np.testing.assert_array_equal(result.backward_passes, passes)


def test_names():
    threat = THREATS["linf"]
    for name, loss in (("apgd-ce", "ce"), ("apgd-dlr", "dlr")):
        attack = attacks.get(f"{name}-30", threat, rho=0.5)
        assert isinstance(attack, APGD)
        assert (attack.loss, attack.num_steps, attack.rho) == (loss, 30, 0.5)
        assert attack.name == f"{name}-30"
        assert attacks.get(name, threat).num_steps == 100
    assert attacks.get("apgd-dlr", threat).min_classes == 3


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"loss": "kl"}, ValueError, "Unknown loss; expected one of .*'ce'.*; received"),
        ({"loss": "dlr-targeted"}, ValueError, "Unknown loss"),
        ({"num_steps": 0}, ValueError, "Invalid num_steps"),
        ({"eot_samples": 0}, ValueError, "Invalid eot_samples"),
        ({"rho": -0.1}, ValueError, "Invalid rho"),
        ({"rho": 1.5}, ValueError, "Invalid rho; expected a number in"),
        ({"random_start": 0.1}, TypeError, "Invalid random_start; expected True or False"),
        ({"larger_epsilons": 1}, TypeError, "Invalid larger_epsilons"),
        ({"larger_epsilons": True}, ValueError, "belongs to l1; .*received norm='linf'"),
        ({"keep": "last"}, ValueError, "expected keep=\"best\"; received keep='last'"),
    ],
)
def test_wrong_arguments(settings, error, message):
    with pytest.raises(error, match=message):
        APGD(THREATS["linf"], **settings)


def test_two_classes_are_too_few_for_dlr():
    images = problem()[0]
    with pytest.raises(ValueError, match="Too few classes for apgd; expected at least 3"):
        APGD(THREATS["linf"], "dlr")(lambda x: NETWORK(x)[:, :2], images, np.zeros(EXAMPLES, int))
