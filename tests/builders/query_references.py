"""Square attack and RayS once more, in NumPy, one example at a time, as plain loops.

Images are channel-first here, `(channels, height, width)`, as in the papers' code. Also: a small
network that both versions can attack.
"""

import math

import numpy as np
import tensorflow as tf

from he_keras.attacks.square import Draws

CLASSES = 4


def windows_of(attack, images):
    """The windows of a Square attack on such images."""
    return attack._windows(tf.constant(images))


def random_draws(attack, images, random):
    """Numbers from [0, 1) for a Square attack: for its start, and for its queries."""
    windows = windows_of(attack, images)
    queries = attack.num_queries, windows.numbers_per_query
    shapes = windows.start_shape, queries
    return Draws(
        *(random.uniform(size=(len(images), *shape)).astype("float32") for shape in shapes)
    )


def margin(logits, label):
    """True logit minus the largest other one."""
    others = np.delete(logits, label)
    return logits[label] - others.max()


def negative_cross_entropy(logits, label):
    shifted = logits - logits.max()
    return shifted[label] - math.log(np.exp(shifted).sum())


def covered_fraction(query, initial_fraction):
    """Share of the image that the window of this query covers."""
    table = (
        (10, 1),
        (50, 2),
        (200, 4),
        (500, 8),
        (1000, 16),
        (2000, 32),
        (4000, 64),
        (6000, 128),
        (8000, 256),
    )
    for last, divisor in table:
        if query <= last:
            return initial_fraction / divisor
    return initial_fraction / 512


def signs(uniform):
    return np.where(np.asarray(uniform) < 0.5, -1.0, 1.0)


def square(image, label, classify, norm, epsilon, start, queries, loss=margin, fraction=0.8):
    """One run with given random numbers; returns the best point and what happened per query.

    Args:
        image: `(channels, height, width)`.
        classify: function from one image to its logits.
        start: random numbers of the start, as `Draws.start` has them for one example.
        queries: random numbers of the queries, `(num_queries, k)`.
    """
    begin, change = (linf_start, linf_change) if norm == "linf" else (mass_start, mass_change)
    best = begin(image, epsilon, start, norm)
    logits = classify(best)
    best_loss, best_margin, history = loss(logits, label), margin(logits, label), []
    for query, numbers in enumerate(queries):
        if best_margin <= 0:
            break
        area = covered_fraction(query, fraction) * image.shape[1] * image.shape[2]
        candidate = change(image, best, epsilon, area, numbers, norm)
        logits = classify(candidate)
        new_loss, new_margin = loss(logits, label), margin(logits, label)
        accepted = new_loss < best_loss or new_margin <= 0
        best_loss = min(best_loss, new_loss)
        if accepted:
            best, best_margin = candidate, new_margin
        history.append(accepted)
    return best, history


def linf_start(image, epsilon, start, _norm):
    # (1, width, channels) to (channels, 1, width): one sign for each column.
    stripes = signs(start).transpose(2, 0, 1)
    return np.clip(image + epsilon * stripes, 0, 1)


def linf_change(image, best, epsilon, area, numbers, _norm):
    _, height, width = image.shape
    side = min(max(round(math.sqrt(area)), 1), height, width)
    row = int(numbers[0] * (height - side))
    column = int(numbers[1] * (width - side))
    candidate = best.copy()
    for channel, sign in enumerate(signs(numbers[2:])):
        candidate[channel, row : row + side, column : column + side] += 2 * epsilon * sign
    candidate = np.minimum(np.maximum(candidate, image - epsilon), image + epsilon)
    return np.clip(candidate, 0, 1)


def length(array, norm, axis=None):
    if norm == "l2":
        return np.sqrt(np.sum(array**2, axis=axis, keepdims=axis is not None))
    return np.sum(np.abs(array), axis=axis, keepdims=axis is not None)


def bump(height, width, norm):
    """Squares of side 1, 3, 5, ... around the middle, each lighter than the one before."""
    out = np.zeros((height, width))
    row, column = height // 2, width // 2
    for ring in range(max(row + 1, column + 1)):
        top, left = max(row - ring, 0), max(column - ring, 0)
        out[top : row + ring + 1, left : column + ring + 1] += 1 / (ring + 1) ** (
            2 if norm == "l2" else 4
        )
    return out / length(out, norm)


def two_bumps(side, transpose_number, norm):
    out = np.zeros((side, side))
    half = side // 2
    if half:
        out[:half] = bump(half, side, norm)
    out[half:] = -bump(side - half, side, norm)
    out /= length(out, norm)
    return out.T if transpose_number > 0.5 else out


def mass_start(image, epsilon, start, norm):
    _, height, width = image.shape
    tile = min(height, width) // 5
    down, across, _ = start.shape
    delta = np.zeros_like(image)
    top = (height - down * tile) // 2
    for tile_row in range(down):
        left = (width - across * tile) // 2
        for tile_column in range(across):
            numbers = start[tile_row, tile_column]
            patch = two_bumps(tile, numbers[0], norm) * signs(numbers[1:])[:, None, None]
            delta[:, top : top + tile, left : left + tile] += patch
            left += tile
        top += tile
    return np.clip(image + epsilon * delta / length(delta, norm), 0, 1)


def mass_change(image, best, epsilon, area, numbers, norm):
    channels, height, width = image.shape
    side = max(round(math.sqrt(area)), 3)
    side = min(side if side % 2 else side + 1, height, width)
    row, row2 = (int(number * (height - side)) for number in (numbers[0], numbers[2]))
    column, column2 = (int(number * (width - side)) for number in (numbers[1], numbers[3]))
    target = np.s_[:, row : row + side, column : column + side]
    source = np.s_[:, row2 : row2 + side, column2 : column2 + side]
    delta = best - image
    union = np.zeros_like(delta)
    union[target] = 1
    union[source] = 1
    mass = length(delta * union, norm, (1, 2))
    whole = length(delta, norm)
    new = two_bumps(side, numbers[4], norm) * signs(numbers[5:])[:, None, None]
    new = new + delta[target] / (1e-12 + length(delta[target], norm, (1, 2)))
    if norm == "l2":
        wanted = np.sqrt(max(epsilon**2 - whole**2, 0) / channels + mass**2)
    else:
        wanted = (max(epsilon - whole, 0) / channels + mass) * channels
    new = new / (1e-12 + length(new, norm, (1, 2))) * wanted
    delta[source] = 0
    delta[target] = new
    if norm == "l2":
        return np.clip(image + epsilon * delta / length(delta, norm), 0, 1)
    return image + l1_projection(image, delta, epsilon * (1 - 1e-6))


def l1_projection(image, delta, radius):
    """Nearest point of the l1 ball and the box, by bisection in float64."""
    room = np.where(delta > 0, 1 - image, image)
    low, high = 0.0, np.abs(delta).max()

    def moved(shift):
        return np.clip(np.abs(delta) - shift, 0, room)

    if moved(0).sum() <= radius:
        return np.sign(delta) * moved(0)
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if moved(middle).sum() > radius else (low, middle)
    return np.sign(delta) * moved(high)


def rays(image, label, predict, num_queries, tolerance=1e-3):
    """One RayS run; returns signs, length and queries.

    Args:
        image: `(channels, height, width)`, or a vector.
        predict: function from one image to its predicted label.
    """
    pixels = image.ravel()
    root = math.sqrt(pixels.size)
    best_signs, best, queries, level, block = np.ones(pixels.size), math.inf, 0, 0, 0

    def is_wrong(candidate, distance):
        nonlocal queries
        queries += 1
        point = np.clip(pixels + distance * candidate / root, 0, 1)
        return predict(point.reshape(image.shape)) != label

    while queries < num_queries:
        size = math.ceil(pixels.size / 2**level)
        first, last = block * size, min((block + 1) * size, pixels.size)
        candidate = best_signs.copy()
        candidate[first:last] *= -1
        if is_wrong(candidate, best):
            low, high = 0.0, min(best, root)
            while True:
                middle = (low + high) / 2
                if is_wrong(candidate, middle):
                    high = middle
                else:
                    low = middle
                if high - low <= tolerance:
                    break
            if high < best:
                best, best_signs = high, candidate
        block += 1
        if block == 2**level or last == pixels.size:
            level, block = level + 1, 0
    return best_signs, best, queries


class Network:
    """A small network in float64, for TensorFlow and for NumPy (channel-first)."""

    def __init__(self, height, width, channels, gain=1.0):
        random = np.random.default_rng(3)
        self.pixels = height * width * channels
        self.first = random.normal(size=(self.pixels, 20)) / np.sqrt(self.pixels)
        self.second = gain * random.normal(size=(20, CLASSES))

    def __call__(self, images):
        flat = tf.reshape(images, [-1, self.pixels])
        hidden = tf.tanh(4.0 * tf.linalg.matmul(flat, tf.cast(self.first, flat.dtype)))
        return tf.linalg.matmul(hidden, tf.cast(self.second, flat.dtype))

    def of_one(self, image):
        flat = image.transpose(1, 2, 0).reshape(-1)
        return np.tanh(4.0 * flat @ self.first) @ self.second


def problem(shape, count=6, gain=1.0):
    images = np.random.default_rng(5).uniform(size=(count, *shape))
    images[:, : shape[0] // 2] = np.round(images[:, : shape[0] // 2])
    network = Network(*shape, gain=gain)
    return network, images, network(tf.constant(images)).numpy().argmax(axis=1)
