"""Images for the tests of corruptions."""

import numpy as np


def random_images(count, side=32, width=None, seed=0):
    shape = (count, side, width or side, 3)
    return np.random.RandomState(seed).randint(0, 256, shape, dtype=np.uint8)


def grey(level, count=1, side=32):
    return np.full((count, side, side, 3), level, np.uint8)
