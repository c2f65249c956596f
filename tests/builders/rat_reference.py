"""RAT's soft labels and Taylor terms in NumPy, for any number of classes."""

import numpy as np
import numpy_training as closed_form
from numpy_training import log_softmax


def soft_label_matrix(values, share):
    """T of the reference: row c holds the soft label of class c, by a loop over the rows."""
    shifted = values - values.min()
    matrix = np.zeros((len(values), len(values)))
    for row in range(len(values)):
        others = [k for k in range(len(values)) if k != row]
        total = sum(shifted[k] for k in others)
        for k in others:
            fraction = shifted[k] / total if total > 0 else 1.0 / len(others)
            matrix[row, k] = share * fraction
        matrix[row, row] = 1.0 - share
    return matrix


def divergence(soft_labels, logits):
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = np.where(soft_labels > 0, soft_labels * np.log(soft_labels), 0.0)
    return np.sum(entropy - soft_labels * log_softmax(logits), axis=1)


def taylor_terms(a, b, clean, adversarial, labels, share, mode):
    """F1 and F2 of each example, and the soft labels (adversarial, clean) of both."""
    first = np.abs(a) - np.abs(b), np.abs(b) - np.abs(a)
    second = a**2 - b**2, b**2 - a**2
    if mode == "released":
        second = second[1], second[1]
    terms, chosen = [], []
    for gaps in (first, second):
        on_adversarial, on_clean = (soft_label_matrix(gap, share)[labels] for gap in gaps)
        terms.append(0.5 * (divergence(on_adversarial, adversarial) + divergence(on_clean, clean)))
        chosen.append((on_adversarial, on_clean))
    return terms, chosen


def row_sums(head, z, residual):
    """Derivatives by the kernel (of a cosine head: by its unit columns), summed over inputs."""
    gradient = head.backward(z, residual)[0][0]
    if isinstance(head, closed_form.CosineHead):
        gradient = gradient * np.linalg.norm(head.weights[0], axis=0)
    return gradient.sum(axis=0)


class RATTerms:
    """What RAT adds to the losses of a trainer of `numpy_training`, and their derivatives."""

    mode = "released"
    alpha, ratio, share = 0.2, 0.5, 0.5  # share: 1 - 2 / 4

    def terms(self, x, labels, x_adv):
        losses, parts = super().terms(x, labels, x_adv)
        clean, adversarial = self.head.logits(x), self.head.logits(x_adv)
        by_clean = self.margin_cross_entropy(x, labels)
        by_adversarial = self.margin_cross_entropy(x_adv, labels)
        a = row_sums(self.head, x, by_clean[1])
        b = row_sums(self.head, x_adv, by_adversarial[1])
        (first, second), soft = taylor_terms(
            a, b, clean, adversarial, labels, self.share, self.mode
        )
        plain, residual = by_clean if self.learns_from_clean else by_adversarial
        source = x if self.learns_from_clean else x_adv
        losses = losses + self.alpha * (first + self.ratio * second - plain)
        parts = [*parts, (source, -self.alpha * residual)]
        for weight, (on_adversarial, on_clean) in zip((1.0, self.ratio), soft, strict=True):
            factor = 0.5 * self.alpha * weight
            parts.append((x_adv, factor * (np.exp(log_softmax(adversarial)) - on_adversarial)))
            parts.append((x, factor * (np.exp(log_softmax(clean)) - on_clean)))
        return losses, parts


class TRADES(RATTerms, closed_form.TRADES):
    learns_from_clean = True


class SymmetricTRADES(TRADES):
    mode = "symmetric"
    alpha, ratio, share = 0.4, 0.8, 0.9


class PGDAT(RATTerms, closed_form.PGDATGaussian):
    learns_from_clean = False
