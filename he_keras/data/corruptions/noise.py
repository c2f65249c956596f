"""Noise: Gaussian, shot, impulse, and (extra) speckle."""

import numpy as np

from he_keras.data.corruptions.registry import Setting, register


@register(
    "gaussian_noise", small=(0.04, 0.06, 0.08, 0.09, 0.10), large=(0.08, 0.12, 0.18, 0.26, 0.38)
)
def gaussian_noise(images: np.ndarray, setting: Setting) -> np.ndarray:
    """Adds Gaussian noise of the given standard deviation to every channel value."""
    return images / 255.0 + setting.draws.normal(images.shape[1:], deviation=setting.level)


@register("shot_noise", small=(500, 250, 100, 75, 50), large=(60, 25, 12, 5, 3))
def shot_noise(images: np.ndarray, setting: Setting) -> np.ndarray:
    """Counts photons: a Poisson count whose mean is the value times the given exposure."""
    return setting.draws.poisson(images / 255.0 * setting.level) / setting.level


@register(
    "impulse_noise", small=(0.01, 0.02, 0.03, 0.05, 0.07), large=(0.03, 0.06, 0.09, 0.17, 0.27)
)
def impulse_noise(images: np.ndarray, setting: Setting) -> np.ndarray:
    """Sets the given share of all channel values to black or white, half each."""
    chance = setting.draws.uniform(images.shape[1:])
    noisy = np.where(chance < setting.level, np.uint8(0), images)
    noisy[chance < setting.level / 2] = 255
    return noisy


@register("speckle_noise", small=(0.06, 0.1, 0.12, 0.16, 0.2), large=(0.15, 0.2, 0.35, 0.45, 0.6))
def speckle_noise(images: np.ndarray, setting: Setting) -> np.ndarray:
    """Adds Gaussian noise in proportion to the value."""
    values = images / 255.0
    return values + values * setting.draws.normal(images.shape[1:], deviation=setting.level)
