"""Whether chance explains that an imported model is not as accurate as the published one."""

import numpy as np
import pytest

import he_keras as he
from he_keras.zoo.clean_check import CleanCheck


@pytest.mark.parametrize(
    "num_correct, looks_right",
    [(0, False), (149, False), (150, True), (170, True), (187, True), (188, False), (200, False)],
)
def test_both_sides_of_the_binomial_distribution(num_correct, looks_right):
    """Of 200 at 85 %: 149 or fewer, and 188 or more, happen less than once in ten thousand."""
    assert CleanCheck(num_correct, 200, 85.0).looks_right is looks_right
    assert CleanCheck(num_correct, 200, None).looks_right


def test_only_the_first_images_are_asked_about():
    images = np.zeros((300, 4, 4, 1), "uint8")
    labels = np.r_[np.zeros(200, int), np.ones(100, int)]
    test = he.data.load((images, labels), "all")
    check = he.zoo.check_clean(lambda batch: np.tile([1.0, 0.0], (len(batch), 1)), test, 100.0)
    assert (check.num_correct, check.num_examples, check.looks_right) == (200, 200, True)
    assert check.summary() == (
        "Clean accuracy on the first 200 test images: 100.0%; published on all: 100.00 %."
    )
