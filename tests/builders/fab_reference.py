"""FAB on linear classifiers in plain NumPy, one example at a time, and projections by bisection."""

import golden_models
import numpy as np
import tensorflow as tf

ORDERS = {"linf": np.inf, "l2": 2, "l1": 1}
DUAL_ORDERS = {"linf": 1, "l2": 2, "l1": np.inf}
BISECTIONS = 200


def rooms(point, normal, excess, bounds):
    """How far each coordinate may go towards the hyperplane, and in which direction."""
    direction = -np.sign(normal) * np.sign(excess)
    return direction, np.where(direction > 0, bounds[1] - point, point - bounds[0])


def step(point, normal, excess, norm, bounds=(0.0, 1.0)):
    """The smallest step onto the hyperplane, else as close as the bounds allow; float64."""
    point, normal = np.asarray(point, np.float64), np.asarray(normal, np.float64)
    direction, room = rooms(point, normal, excess, bounds)
    size = np.abs(normal)
    room = np.where(size > 0, room, 0.0)
    if size @ room <= abs(excess):
        return direction * room
    if norm == "l1":
        return direction * _greedy(size, room, abs(excess))
    speed = np.ones_like(size) if norm == "linf" else size
    late = (room[size > 0] / speed[size > 0]).max()
    low, high = 0.0, late
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        reached = size @ np.minimum(middle * speed, room) >= abs(excess)
        low, high = (low, middle) if reached else (middle, high)
    return direction * np.minimum(high * speed, room)


def _greedy(size, room, way):
    lengths = np.zeros_like(size)
    for coordinate in np.argsort(-size, kind="stable"):
        if size[coordinate] == 0 or way <= 0:
            break
        lengths[coordinate] = min(room[coordinate], way / size[coordinate])
        way -= lengths[coordinate] * size[coordinate]
    return lengths


class LinearFAB:
    """The published loop for `logits = x @ weights + bias`; settings as the attack's."""

    def __init__(self, weights, bias, norm, num_steps, alpha_max=0.1, eta=1.05, beta=0.9):
        self.weights, self.bias, self.norm = weights, bias, norm
        self.num_steps, self.alpha_max, self.eta, self.beta = num_steps, alpha_max, eta, beta

    def logits(self, point):
        return point @ self.weights + self.bias

    def length(self, perturbation):
        return np.linalg.norm(perturbation, ORDERS[self.norm])

    def boundary(self, point, label, target):
        """Normal and gap of the nearest boundary, or of the target's."""
        logits, nearest = self.logits(point), (np.inf, None, None)
        classes = range(len(self.bias)) if target is None else [target]
        for other in classes:
            if other == label:
                continue
            normal = self.weights[:, other] - self.weights[:, label]
            gap = logits[other] - logits[label]
            distance = abs(gap) / np.linalg.norm(normal, DUAL_ORDERS[self.norm])
            if distance < nearest[0]:
                nearest = distance, normal, gap
        return nearest[1:]

    def run(self, image, label, target=None):
        """Returns the points after each iteration, the nearest adversarial one, its distance."""
        point, best, best_distance, points = image, image, np.inf, []
        for _ in range(self.num_steps):
            normal, gap = self.boundary(point, label, target)
            first = step(point, normal, gap, self.norm)
            second = step(image, normal, gap + normal @ (image - point), self.norm)
            one, other = (max(self.length(each), 1e-8) for each in (first, second))
            alpha = min(one / (one + other), self.alpha_max)
            ours, clean = point + self.eta * first, image + self.eta * second
            point = np.clip((1 - alpha) * ours + alpha * clean, 0.0, 1.0)
            points.append(point)
            if self.logits(point).argmax() != label:
                distance = self.length(point - image)
                if distance < best_distance:
                    best, best_distance = point, distance
                point = image + self.beta * (point - image)
        return points, best, best_distance


def smallest_distance(image, label, weights, bias, norm):
    """Distance from an image to the nearest other class of a linear model, inside the box [0, 1].

    Infinite where no point of the box is on the other side of any boundary.
    """
    logits, distances = image @ weights + bias, []
    for other in range(len(bias)):
        if other == label:
            continue
        normal = weights[:, other] - weights[:, label]
        gap = logits[other] - logits[label]
        move = step(image, normal, gap, norm)
        reaches = abs(normal @ move + gap) < 1e-9
        distances.append(np.linalg.norm(move, ORDERS[norm]) if reaches else np.inf)
    return min(distances)


def float64_classifier(head):
    """The golden classifier in float64 TensorFlow: `images -> logits`."""
    weights = {
        name: tf.constant(array, tf.float64)
        for name, array in golden_models.arrays(f"model_{head}").items()
        if array.dtype == np.float32
    }

    def logits(batch):
        hidden = batch
        for name in ("conv1", "conv2"):
            hidden = tf.pad(hidden, [[0, 0], [1, 1], [1, 1], [0, 0]])
            hidden = tf.nn.conv2d(hidden, weights[f"{name}_kernel"], 2, "VALID")
            hidden = tf.nn.relu(hidden + weights[f"{name}_bias"])
        hidden = tf.reshape(hidden, [tf.shape(batch)[0], -1])
        hidden = tf.nn.relu(hidden @ weights["dense1_kernel"] + weights["dense1_bias"])
        if head == "linear":
            return hidden @ weights["head_kernel"] + weights["head_bias"]
        cosines = tf.linalg.normalize(hidden, axis=1)[0]
        return golden_models.SCALE * (
            cosines @ tf.linalg.normalize(weights["head_kernel"], axis=0)[0]
        )

    return logits
