"""Adversarial training of linear models in NumPy, with every gradient derived by hand.

The input of a head is the image itself. Softmax residuals, the Jacobian of the cosine and the slope
of arccos replace automatic differentiation; everything is float64.
"""

import numpy as np
import tensorflow as tf

SHAPE = (2, 3, 1)
PIXELS = 6
CLASSES = 4
EPSILON = 0.1
STEP_SIZE = 0.04
NUM_STEPS = 4
LEARNING_RATE = 0.05
BATCH_SIZE = 4
SEED = 3


class LinearHead:
    """`o = z W + b`."""

    margin = 0.0
    scale = 1.0

    def __init__(self, weights):
        self.weights = weights

    def logits(self, z):
        kernel, bias = self.weights
        return z @ kernel + bias

    def with_margin(self, logits, labels):
        return logits

    def backward(self, z, upstream):
        """Returns the gradients of the weights and of z, given the gradient of the logits."""
        return [z.T @ upstream, upstream.sum(axis=0)], upstream @ self.weights[0].T


class CosineHead(LinearHead):
    """`o = s cos`, `cos_k = <w_k, z> / (|w_k| |z|)`."""

    margin = 0.2
    scale = 5.0

    def _directions(self, z):
        (kernel,) = self.weights
        z_length = np.linalg.norm(z, axis=1, keepdims=True)
        kernel_length = np.linalg.norm(kernel, axis=0, keepdims=True)
        return z / z_length, z_length, kernel / kernel_length, kernel_length

    def logits(self, z):
        unit_z, _, unit_kernel, _ = self._directions(z)
        return self.scale * unit_z @ unit_kernel

    def with_margin(self, logits, labels):
        return logits - self.scale * self.margin * np.eye(CLASSES)[labels]

    def backward(self, z, upstream):
        unit_z, z_length, unit_kernel, kernel_length = self._directions(z)
        by_cosine = upstream * self.slope(unit_z @ unit_kernel)
        by_unit_z = by_cosine @ unit_kernel.T
        by_unit_kernel = unit_z.T @ by_cosine
        radial_z = unit_z * np.sum(unit_z * by_unit_z, axis=1, keepdims=True)
        radial_kernel = unit_kernel * np.sum(unit_kernel * by_unit_kernel, axis=0, keepdims=True)
        return [(by_unit_kernel - radial_kernel) / kernel_length], (by_unit_z - radial_z) / z_length

    def slope(self, cosines):
        """d logit / d cosine."""
        return self.scale


class ArcHead(CosineHead):
    """`o = -s arccos(cos)`."""

    margin = 0.1

    def logits(self, z):
        unit_z, _, unit_kernel, _ = self._directions(z)
        return -self.scale * np.arccos(unit_z @ unit_kernel)

    def slope(self, cosines):
        return self.scale / np.sqrt(1.0 - cosines**2)


def log_softmax(logits):
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def cross_entropy(logits, labels):
    """Losses, and their gradient by the logits: the softmax residual."""
    log_p = log_softmax(logits)
    return -log_p[np.arange(len(labels)), labels], np.exp(log_p) - np.eye(CLASSES)[labels]


def kl_divergence(clean, adversarial):
    """Losses, and their gradients by the clean and by the adversarial logits."""
    log_q, log_p = log_softmax(clean), log_softmax(adversarial)
    q = np.exp(log_q)
    losses = np.sum(q * (log_q - log_p), axis=1)
    return losses, q * (log_q - log_p - losses[:, None]), np.exp(log_p) - q


def soft_cross_entropy(clean, adversarial):
    log_q, log_p = log_softmax(clean), log_softmax(adversarial)
    q = np.exp(log_q)
    losses = -np.sum(q * log_p, axis=1)
    return losses, q * (-log_p - losses[:, None]), np.exp(log_p) - q


def project(x_adv, x):
    return np.clip(x + np.clip(x_adv - x, -EPSILON, EPSILON), 0.0, 1.0)


def project_l2(x_adv, x):
    length = np.linalg.norm(x_adv - x, axis=1, keepdims=True)
    shrink = np.minimum(1.0, EPSILON / np.maximum(length, 1e-12))
    return np.clip(x + (x_adv - x) * shrink, 0.0, 1.0)


def ascend(head, x, labels, start, num_steps=NUM_STEPS, step_size=STEP_SIZE):
    """Sign steps on the cross-entropy of the logits without margin."""
    x_adv = start
    for _ in range(num_steps):
        _, residual = cross_entropy(head.logits(x_adv), labels)
        x_adv = project(x_adv + step_size * np.sign(head.backward(x_adv, residual)[1]), x)
    return x_adv


def ascend_l2(head, x, labels, start):
    x_adv = start
    for _ in range(NUM_STEPS):
        _, residual = cross_entropy(head.logits(x_adv), labels)
        gradient = head.backward(x_adv, residual)[1]
        gradient = gradient / np.linalg.norm(gradient, axis=1, keepdims=True)
        x_adv = project_l2(x_adv + STEP_SIZE * gradient, x)
    return x_adv


def ascend_kl(head, x, labels, start):
    clean = head.logits(x)
    x_adv = start
    for _ in range(NUM_STEPS):
        _, _, residual = kl_divergence(clean, head.logits(x_adv))
        x_adv = project(x_adv + STEP_SIZE * np.sign(head.backward(x_adv, residual)[1]), x)
    return x_adv


def gaussian_start(x, step):
    """The released start, from the model's seed of this step."""
    noise = tf.random.stateless_normal([len(x), *SHAPE], [SEED, step]).numpy()
    return x + 0.001 * noise.reshape(len(x), -1).astype(np.float64)


def uniform_start(x, step):
    noise = tf.random.stateless_uniform([len(x), *SHAPE], [SEED, step], -1.0, 1.0).numpy()
    return np.clip(x + EPSILON * noise.reshape(len(x), -1).astype(np.float64), 0.0, 1.0)


class Trainer:
    """Plain gradient descent on one objective; the subclass says what to craft and the losses."""

    def __init__(self, head):
        self.head = head
        self.noise = np.zeros((BATCH_SIZE, PIXELS))

    def craft(self, x, labels, step):
        return x

    def terms(self, x, labels, x_adv):
        """Losses, and the parts of the gradient as (input of the head, gradient of its logits)."""
        losses, residual = self.margin_cross_entropy(x_adv, labels)
        return losses, [(x_adv, residual)]

    def margin_cross_entropy(self, x, labels):
        return cross_entropy(self.head.with_margin(self.head.logits(x), labels), labels)

    def step(self, x, labels, step):
        x_adv = self.craft(x, labels, step)
        losses, parts = self.terms(x, labels, x_adv)
        self.descend(len(x), parts)
        return losses

    def descend(self, count, parts):
        by_part = [self.head.backward(z, upstream)[0] for z, upstream in parts]
        gradients = [sum(each) / count for each in zip(*by_part, strict=True)]
        pairs = zip(self.head.weights, gradients, strict=True)
        self.head.weights = [weight - LEARNING_RATE * gradient for weight, gradient in pairs]


class Standard(Trainer):
    pass


class PGDAT(Trainer):
    def craft(self, x, labels, step):
        return ascend(self.head, x, labels, x)


class PGDATGaussian(Trainer):
    def craft(self, x, labels, step):
        return ascend(self.head, x, labels, gaussian_start(x, step))


class PGDATEuclidean(Trainer):
    def craft(self, x, labels, step):
        return ascend_l2(self.head, x, labels, x)


class ALP(PGDAT):
    beta, clean_weight = 0.7, 0.5

    def terms(self, x, labels, x_adv):
        clean_losses, clean_residual = self.margin_cross_entropy(x, labels)
        losses, residual = self.margin_cross_entropy(x_adv, labels)
        scale = self.pairing_scale()
        difference = (self.head.logits(x) - self.head.logits(x_adv)) / scale
        paired, by_difference = self.pair(difference)
        by_difference = self.beta * by_difference / scale
        mixed = self.clean_weight * clean_losses + (1 - self.clean_weight) * losses
        return mixed + self.beta * paired, [
            (x, self.clean_weight * clean_residual + by_difference),
            (x_adv, (1 - self.clean_weight) * residual - by_difference),
        ]

    def pairing_scale(self):
        return self.head.scale

    def pair(self, difference):
        return np.mean(difference**2, axis=1), 2.0 * difference / CLASSES


class ALPSquared(ALP):
    clean_weight = 0.25

    def pair(self, difference):
        return np.sum(difference**2, axis=1), 2.0 * difference


class ALPEuclidean(ALP):
    def pairing_scale(self):
        return 1.0

    def pair(self, difference):
        length = np.linalg.norm(difference, axis=1)
        return length, difference / length[:, None]


class TRADES(Trainer):
    beta = 6.0
    divergence = staticmethod(kl_divergence)

    def craft(self, x, labels, step):
        return ascend_kl(self.head, x, labels, gaussian_start(x, step))

    def terms(self, x, labels, x_adv):
        clean_losses, residual = self.margin_cross_entropy(x, labels)
        losses, by_clean, by_adversarial = self.divergence(
            self.head.logits(x), self.head.logits(x_adv)
        )
        return clean_losses + self.beta * losses, [
            (x, residual + self.beta * by_clean),
            (x_adv, self.beta * by_adversarial),
        ]


class TRADESCrossEntropy(TRADES):
    beta = 2.0
    divergence = staticmethod(soft_cross_entropy)


class FreeAT(Trainer):
    replays = 3

    def step(self, x, labels, step):
        losses = []
        for _ in range(self.replays):
            noise = self.noise[: len(x)]
            x_adv = np.clip(x + noise, 0.0, 1.0)
            replay_losses, parts = self.terms(x, labels, x_adv)
            gradient = self.head.backward(*parts[0])[1]
            unsaturated = (x + noise >= 0.0) & (x + noise <= 1.0)
            moved = noise + EPSILON * np.sign(gradient * unsaturated)
            self.descend(len(x), parts)
            self.noise[: len(x)] = np.clip(moved, -EPSILON, EPSILON)
            losses.append(replay_losses)
        return np.concatenate(losses)


class FastATRandom(Trainer):
    def craft(self, x, labels, step):
        return ascend(self.head, x, labels, self.start(x, step), 1, 1.25 * EPSILON)

    def start(self, x, step):
        return uniform_start(x, step)


class FastATZero(FastATRandom):
    def start(self, x, step):
        return x
