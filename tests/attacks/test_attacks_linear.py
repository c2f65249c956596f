"""FGSM, PGD and MIM on linear models against NumPy versions and numbers worked out by hand."""

import numpy as np
import pytest
import tensorflow as tf

import he_keras as he
from he_keras.attacks import FGSM, MIM, PGD

pytestmark = pytest.mark.usefixtures("op_by_op")

RTOL = 1e-5
PARITY = {"random_start": False, "keep": "last", "stop_when_broken": False}
NORMS = {"linf": 0.06, "l2": 0.3, "l1": 0.5}
ORDERS = {"linf": np.inf, "l2": 2, "l1": 1}
DUAL_ORDERS = {"linf": 1, "l2": 2, "l1": np.inf}
PIXELS, CLASSES = 12, 3


def linear_problem(low=0.3, high=0.7):
    """Weights, bias, ten images with pixels in [low, high] and labels, in float64."""
    random = np.random.default_rng(3)
    weights = random.normal(size=(PIXELS, CLASSES))
    bias = random.normal(size=CLASSES)
    images = random.uniform(low, high, size=(10, PIXELS))
    return weights, bias, images, random.integers(CLASSES, size=10)


def classifier(weights, bias):
    return lambda images: tf.linalg.matmul(images, tf.constant(weights)) + tf.constant(bias)


def cross_entropy_gradient(images, labels, weights, bias):
    """`W (softmax(o) - onehot(y))`."""
    logits = images @ weights + bias
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    softmax = exponentials / exponentials.sum(axis=1, keepdims=True)
    return (softmax - np.eye(CLASSES)[labels]) @ weights.T


def unit_step(gradient, norm):
    """Lemma 1: the maximiser of `<g, v>` over the unit ball."""
    if norm == "linf":
        return np.sign(gradient)
    if norm == "l2":
        return gradient / np.linalg.norm(gradient, axis=1, keepdims=True)
    step = np.zeros_like(gradient)
    largest = np.abs(gradient).argmax(axis=1)
    rows = np.arange(len(gradient))
    step[rows, largest] = np.sign(gradient[rows, largest])
    return step


def project_row_l1(perturbation, image, epsilon):
    """Euclidean projection of one perturbation onto l1 ball and box, by bisection on the shift."""
    room = np.where(perturbation > 0, 1 - image, image)

    def shrunk(shift):
        return np.clip(np.abs(perturbation) - shift, 0, room)

    low, high = 0.0, np.abs(perturbation).max()
    if shrunk(0.0).sum() <= epsilon:
        high = 0.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if shrunk(middle).sum() > epsilon else (low, middle)
    return np.sign(perturbation) * shrunk(high)


def project(perturbation, images, norm, epsilon):
    """Ball, then box."""
    if norm == "linf":
        perturbation = np.clip(perturbation, -epsilon, epsilon)
    elif norm == "l2":
        length = np.linalg.norm(perturbation, axis=1, keepdims=True)
        perturbation = perturbation * np.minimum(1, epsilon / np.maximum(length, 1e-12))
    else:
        pairs = zip(perturbation, images, strict=True)
        perturbation = np.stack([project_row_l1(row, image, epsilon) for row, image in pairs])
    return np.clip(images + perturbation, 0, 1)


def expected_ascent(problem, norm, epsilon, step_size, num_steps, decay=None):
    """Plain NumPy version of the loop; returns all iterates."""
    weights, bias, images, labels = problem
    iterates, velocity = [images], 0.0
    for _ in range(num_steps):
        direction = cross_entropy_gradient(iterates[-1], labels, weights, bias)
        if decay is not None:
            mean_size = np.abs(direction).mean(axis=1, keepdims=True)
            direction = velocity = decay * velocity + direction / mean_size
        moved = iterates[-1] + step_size * unit_step(direction, norm)
        iterates.append(project(moved - images, images, norm, epsilon))
    return iterates


def attacked(attack, problem):
    weights, bias, images, labels = problem
    return attack(classifier(weights, bias), images, labels)


@pytest.mark.parametrize("norm", NORMS)
def test_fgsm(norm):
    problem = linear_problem()
    weights, bias, images, labels = problem
    gradient = cross_entropy_gradient(images, labels, weights, bias)
    result = attacked(FGSM(he.ThreatModel(norm, NORMS[norm]), stop_when_broken=False), problem)
    expected = np.clip(images + NORMS[norm] * unit_step(gradient, norm), 0, 1)
    wrong_at_start = (images @ weights + bias).argmax(axis=1) != labels
    # "best" prefers the image itself where it is misclassified and the step is not.
    assert wrong_at_start.any() and not wrong_at_start.all()
    right = ~wrong_at_start
    np.testing.assert_allclose(result.x_adv[right], expected[right], rtol=RTOL)
    last = attacked(FGSM(he.ThreatModel(norm, NORMS[norm]), **PARITY), problem)
    np.testing.assert_allclose(last.x_adv, expected, rtol=RTOL)
    np.testing.assert_array_equal(
        last.success, (expected @ weights + bias).argmax(axis=1) != labels
    )
    assert result.x_adv.dtype == np.float64


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("num_steps", [1, 2, 6])
def test_pgd(norm, num_steps):
    epsilon = NORMS[norm]
    attack = PGD(he.ThreatModel(norm, epsilon), num_steps, step_size=0.4 * epsilon, **PARITY)
    model = classifier(*linear_problem()[:2])
    # Pixels inside the bounds and at them: of one linear model, compiled once.
    for pixels in ((0.3, 0.7), (0.0, 1.0)):
        _, _, images, labels = problem = linear_problem(*pixels)
        # Two steps of 0.4 epsilon stay in the ball; six reach it, and clipping at 0 and 1 begins.
        expected = expected_ascent(problem, norm, epsilon, 0.4 * epsilon, num_steps)
        result = attack(model, images, labels)
        np.testing.assert_allclose(result.x_adv, expected[-1], rtol=RTOL, atol=1e-9)
        lengths = np.linalg.norm(expected[-1] - images, ORDERS[norm], axis=1)
        np.testing.assert_allclose(result.distance, lengths, rtol=RTOL)
        np.testing.assert_array_equal(result.backward_passes, num_steps)


def test_projected_steps_end_on_the_ball_and_the_box():
    weights, bias, images, labels = problem = linear_problem(0.0, 1.0)
    for norm, epsilon in NORMS.items():
        result = attacked(
            PGD(he.ThreatModel(norm, epsilon), 6, step_size=0.4 * epsilon, **PARITY), problem
        )
        on_the_box = (result.x_adv == 0) | (result.x_adv == 1)
        assert on_the_box.sum() > np.sum((images == 0) | (images == 1))
        on_the_ball = np.isclose(result.distance, epsilon, rtol=1e-4)
        assert on_the_ball.any(), norm


@pytest.mark.parametrize("norm", NORMS)
def test_mim(norm):
    problem = linear_problem()
    epsilon = NORMS[norm]
    expected = expected_ascent(problem, norm, epsilon, 0.3 * epsilon, 3, decay=1.0)
    attack = MIM(he.ThreatModel(norm, epsilon), 3, step_size=0.3 * epsilon, **PARITY)
    np.testing.assert_allclose(attacked(attack, problem).x_adv, expected[-1], rtol=RTOL)


def overshooting(images):
    """Logits (0, f), f = x1 - 10 (x0 - 0.53)^2: ascending f overshoots in x0."""
    score = images[:, 1] - 10.0 * tf.square(images[:, 0] - 0.53)
    return tf.stack([tf.zeros_like(score), score], axis=1)


def test_momentum_worked_out_by_hand():
    # df/dx = (20 (0.53 - x0), 1); the cross-entropy scales it, which dividing by the mean undoes.
    #   x0 = 0.50: (0.6, 1)  -> (0.75, 1.25)   velocity (0.75, 1.25)    next x0 0.52
    #   x0 = 0.52: (0.2, 1)  -> (1/3, 5/3)     velocity (13/12, 35/12)  next x0 0.54
    #   x0 = 0.54: (-0.2, 1) -> (-1/3, 5/3)    velocity (3/4, 55/12)    next x0 0.56, on and up,
    # where BIM, which sees only the last sign, steps back to 0.52.
    images, labels = np.array([[0.5, 0.5]]), np.array([0])
    threat = he.ThreatModel("linf", 0.25)
    momentum = MIM(threat, 3, step_size=0.02, **PARITY)(overshooting, images, labels)
    np.testing.assert_allclose(momentum.x_adv, [[0.56, 0.56]], rtol=RTOL)
    plain = PGD(threat, 3, step_size=0.02, **PARITY)(overshooting, images, labels)
    np.testing.assert_allclose(plain.x_adv, [[0.52, 0.56]], rtol=RTOL)
    # With decay 0.2 the third velocity is (0.04 * 0.75 + 0.2 / 3 - 1 / 3, ...) = (-0.2367, ...).
    short = MIM(threat, 3, step_size=0.02, decay=0.2, **PARITY)(overshooting, images, labels)
    np.testing.assert_allclose(short.x_adv, [[0.52, 0.56]], rtol=RTOL)
    # In l2 the velocity's direction counts, not only its signs.
    euclidean = MIM(he.ThreatModel("l2", 0.25), 1, step_size=0.02, **PARITY)
    first = euclidean(overshooting, images, labels).x_adv - images
    np.testing.assert_allclose(first, [0.02 * np.array([0.6, 1.0]) / np.sqrt(1.36)], rtol=RTOL)


@pytest.mark.parametrize("norm", NORMS)
def test_one_step_gains_epsilon_times_the_dual_norm(norm):
    """Lemma 1 (Eq. 7): exact for a loss that is linear in the image, away from the bounds."""
    weights, bias, images, _ = linear_problem()
    weights, bias, labels = weights[:, :2], bias[:2], np.zeros(10, int)
    epsilon = 0.2 * NORMS[norm]
    attack = FGSM(he.ThreatModel(norm, epsilon), loss="cw", keep="last", stop_when_broken=False)
    x_adv = attack(classifier(weights, bias), images, labels).x_adv
    slope = weights[:, 1] - weights[:, 0]
    gain = (x_adv - images) @ slope
    np.testing.assert_allclose(gain, epsilon * np.linalg.norm(slope, DUAL_ORDERS[norm]), rtol=RTOL)


def test_cross_entropy_rises_by_its_first_order_prediction():
    """The rise of a curved loss is epsilon times the dual norm, to first order in epsilon."""
    weights, bias, images, labels = linear_problem()
    gradient = cross_entropy_gradient(images, labels, weights, bias)

    def losses_of(points):
        logits = points @ weights + bias
        true_logits = logits[np.arange(10), labels]
        return np.log(np.exp(logits).sum(axis=1)) - true_logits

    for norm in NORMS:
        threat = he.ThreatModel(norm, 1e-5)
        x_adv = FGSM(threat, **PARITY)(classifier(weights, bias), images, labels).x_adv
        rise = losses_of(x_adv) - losses_of(images)
        expected = 1e-5 * np.linalg.norm(gradient, DUAL_ORDERS[norm], axis=1)
        np.testing.assert_allclose(rise, expected, rtol=1e-3)


def test_ties_share_the_l1_step():
    weights = np.array([[0.0, 2.0], [0.0, -2.0], [0.0, 1.0]])
    attack = FGSM(he.ThreatModel("l1", 0.2), **PARITY)
    x_adv = attack(classifier(weights, np.zeros(2)), np.full((1, 3), 0.5), np.array([0])).x_adv
    np.testing.assert_allclose(x_adv, [[0.6, 0.4, 0.5]], rtol=RTOL)


def test_default_step_is_madrys_rule():
    threat = he.ThreatModel("linf", 0.1)
    assert PGD(threat, 20).step_size == pytest.approx(2.5 * 0.1 / 20)
    assert MIM(threat, 4).step_size == pytest.approx(2.5 * 0.1 / 4)
    assert FGSM(threat).step_size == 0.1
    assert PGD(threat, step_size="2/255").step_size == pytest.approx(2 / 255)
