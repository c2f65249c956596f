"""Derivatives by central differences, and steps of training with them."""

import numpy as np
import numpy_training


def central_differences(function, weights, width=1e-5):
    gradients = [np.zeros_like(weight) for weight in weights]
    for weight, gradient in zip(weights, gradients, strict=True):
        for place in np.ndindex(weight.shape):
            kept = weight[place]
            weight[place] = kept + width
            above = function(weights)
            weight[place] = kept - width
            gradient[place] = (above - function(weights)) / (2 * width)
            weight[place] = kept
    return gradients


class SteppedByDifferences(numpy_training.FastATZero):
    """FastAT from the image, with a loss of its own: `losses(weights, x, labels, x_adv, step)`."""

    def step(self, x, labels, step):
        x_adv = self.craft(x, labels, step)
        # These are moved, unlike the head's.
        weights = [weight.copy() for weight in self.head.weights]
        gradients = central_differences(
            lambda moved: self.losses(moved, x, labels, x_adv, step).mean(), weights
        )
        losses = self.losses(weights, x, labels, x_adv, step)
        pairs = zip(weights, gradients, strict=True)
        rate = numpy_training.LEARNING_RATE
        self.head.weights = [weight - rate * gradient for weight, gradient in pairs]
        return losses
