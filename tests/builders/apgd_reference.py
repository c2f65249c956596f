"""APGD in NumPy and float64, one example at a time with a stored history, and a small network.

Written from the published algorithm alone, to be compared with `he_keras.attacks.APGD`.
"""

from fractions import Fraction

import numpy as np
import tensorflow as tf

from he_keras.attacks import Victim
from he_keras.attacks.framework.result import Goal

PIXELS, HIDDEN, CLASSES = 24, 16, 5
SHAPE = (2, 4, 3)


class TanhNetwork:
    """A two-layer network, curved enough for losses to fall as well as rise along the way."""

    def __init__(self, seed=0, scale=1.5):
        random = np.random.default_rng(seed)
        self.first = scale * random.normal(size=(PIXELS, HIDDEN))
        self.second = random.normal(size=(HIDDEN, CLASSES))

    def __call__(self, batch):
        """Logits in TensorFlow, in the precision of the batch."""
        flat = tf.reshape(batch, [tf.shape(batch)[0], PIXELS])
        hidden = tf.tanh(tf.linalg.matmul(flat - 0.5, tf.cast(self.first, batch.dtype)))
        return tf.linalg.matmul(hidden, tf.cast(self.second, batch.dtype))

    def logits(self, point):
        """Logits of one example in NumPy."""
        return np.tanh((point.ravel() - 0.5) @ self.first) @ self.second

    def evaluator(self, loss, label, target=None):
        """Returns a function from one point to loss, gradient, and whether it is misclassified."""

        def evaluate(point):
            hidden = np.tanh((point.ravel() - 0.5) @ self.first)
            logits = hidden @ self.second
            value, slope = loss_and_slope(loss, logits, label, target)
            gradient = self.first @ ((1 - hidden**2) * (self.second @ slope))
            return value, gradient.reshape(point.shape), logits.argmax() != label

        return evaluate


def loss_and_slope(loss, logits, label, target):
    """Value of a loss and its derivative by the logits."""
    units = np.eye(len(logits))
    order = np.argsort(logits)[::-1]
    if loss == "ce":
        weights = np.exp(logits - logits.max())
        weights /= weights.sum()
        return -np.log(weights[label]), weights - units[label]
    other = target if target is not None else next(each for each in order if each != label)
    gain, slope = logits[other] - logits[label], units[other] - units[label]
    if loss == "cw":
        return gain, slope
    if loss == "dlr":
        spread = units[order[0]] - units[order[2]]
    else:
        spread = units[order[0]] - 0.5 * (units[order[2]] + units[order[3]])
    width = spread @ logits + 1e-12
    return gain / width, slope / width - gain / width**2 * spread


def project(point, image, norm, epsilon):
    """Into the ball, then into [0, 1]; l1: the nearest point of both, by its breakpoints."""
    change = point - image
    if norm == "linf":
        return np.clip(image + np.clip(change, -epsilon, epsilon), 0, 1)
    if norm == "l2":
        length = max(np.linalg.norm(change), 1e-12)
        return np.clip(image + change * min(1.0, epsilon / length), 0, 1)
    size, room = np.abs(change), np.where(change > 0, 1 - image, image)

    def shrunk(shift):
        return np.clip(size - shift, 0, room)

    if shrunk(0.0).sum() > epsilon:
        breakpoints = np.unique(np.concatenate([[0.0], (size - room).ravel(), size.ravel()]))
        breakpoints = breakpoints[breakpoints >= 0]
        sums = np.array([shrunk(each).sum() for each in breakpoints])
        after = np.argmax(sums <= epsilon)
        lower, upper = breakpoints[after - 1], breakpoints[after]
        share = (sums[after - 1] - epsilon) / (sums[after - 1] - sums[after])
        return image + np.sign(change) * shrunk(lower + share * (upper - lower))
    return image + np.sign(change) * shrunk(0.0)


def apgd(evaluate, image, start, norm, epsilon, num_steps, rho=0.75, continues=False):
    """Returns final results and histories of one example."""
    x = project(start, image, norm, epsilon)
    value, gradient, wrong = evaluate(x)
    best = {"point": x, "gradient": gradient, "loss": value}
    adversarial, broken = x, wrong
    previous, eta = x, epsilon * (1.0 if norm == "l1" else 2.0)
    period = max(int((0.04 if norm == "l1" else 0.22) * num_steps), 1)
    density, count = first_density(x, image, continues)
    reduced_before, best_before, since, history = True, value, 0, np.zeros(num_steps)
    record = {"points": [x], "eta": [], "best": [value], "reasons": []}
    for i in range(num_steps):
        record["eta"].append(eta)
        if norm == "l1":
            x = project(x + sparse_step(gradient, density, eta), image, norm, epsilon)
        else:
            step = np.sign(gradient) if norm == "linf" else gradient / np.linalg.norm(gradient)
            middle = project(x + eta * step, image, norm, epsilon)
            share = 1.0 if i == 0 else 0.75
            after = x + share * (middle - x) + (1 - share) * (x - previous)
            x, previous = project(after, image, norm, epsilon), x
        value, gradient, wrong = evaluate(x)
        record["points"].append(x)
        if wrong:
            adversarial, broken = x, True
        history[i] = value
        if value > best["loss"]:
            best = {"point": x, "gradient": gradient, "loss": value}
        since += 1
        if since == period:
            since = 0
            if norm == "l1":
                now = changed_entries(best["point"], image)
                restart = count > 0 and Fraction(now, count) < Fraction(95, 100)
                density, count = Fraction(2 * now, 3 * PIXELS), now
                eta = epsilon if restart else max(eta / 1.5, epsilon / 10)
                record["reasons"].append("sparser" if restart else "same")
            else:
                rises = sum(history[i - j] > history[i - j - 1] for j in range(period))
                rarely, stuck = rises <= rho * period, best_before >= best["loss"]
                restart = rarely or (stuck and not reduced_before)
                record["reasons"].append("rarely" if rarely else "stuck" if restart else "")
                reduced_before, best_before = restart, best["loss"]
                eta = eta / 2 if restart else eta
                period = max(period - max(int(0.03 * num_steps), 1), max(int(0.06 * num_steps), 1))
            if restart:
                x, gradient = best["point"], best["gradient"]
        record["best"].append(best["loss"])
    record["final"] = best["point"]
    return {**record, "adversarial": adversarial, "broken": bool(broken)}


def first_density(start, image, continues):
    """Share of pixels of the first l1 step, and the count that the first check compares with."""
    changed = changed_entries(start, image)
    if continues and changed:
        return Fraction(2 * changed, 3 * PIXELS), changed
    return Fraction(1, 5), PIXELS


def changed_entries(point, image):
    """Entries that differ, but for rounding of the projection."""
    return np.count_nonzero(np.abs(point - image) > 1e-9)


def sparse_step(gradient, density, eta):
    """The l1 step: equal parts in the entries of the largest gradient."""
    rank = min(max(int((1 - density) * gradient.size), 0), gradient.size - 1)
    threshold = np.sort(np.abs(gradient), axis=None)[rank]
    signs = np.where(np.abs(gradient) >= threshold, np.sign(gradient), 0.0)
    return eta * signs / (np.abs(signs).sum() + 1e-10)


def trace(attack, model, inputs, start):
    """Runs the attack's own step one by one; returns what `apgd` records, for all examples."""
    victim = Victim(model)
    (rule,) = attack.rules

    images, labels, *others = inputs
    inputs = images, Goal(labels), *others
    states = [attack.initial_state(rule, images, tf.convert_to_tensor(start))]
    for index in range(rule.num_steps + 1):
        states.append(attack.step(victim, rule, tf.constant(index), states[-1], inputs))
    return {
        "points": np.stack([state.point.numpy() for state in states[:-1]]),
        "eta": np.stack([state.step_size.numpy() for state in states[1:-1]]),
        "best": np.stack([state.best.strength.numpy() for state in states[1:]]),
        "final": states[-1].best.point[0].numpy(),
        "adversarial": states[-1].adversarial.numpy(),
        "broken": states[-1].broken.numpy(),
        "memory": [state.memory for state in states[2:]],
    }
