"""Derivatives by central differences."""

import numpy as np


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
