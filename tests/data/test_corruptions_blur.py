"""Defocus, glass, motion, zoom and Gaussian blur against their definitions, pixel by pixel."""

import math

import numpy as np
import pytest
import scipy.ndimage
from blur_references import assert_levels_close, draws_for, motion_by_shifts, zoomed_by_scipy
from corruption_images import random_images

from he_keras.data import corruptions
from he_keras.data.corruptions import blur, filters
from he_keras.data.corruptions.registry import ENTRIES

# Gaussian


@pytest.mark.parametrize(("side", "sigmas"), [(32, (0.4, 0.6, 0.7, 0.8, 1)), (96, (1, 2, 3, 4, 6))])
def test_gaussian_blur(side, sigmas):
    images = random_images(2, side)
    for severity, sigma in enumerate(sigmas, 1):
        reach = int(4 * sigma + 0.5)
        taps = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
        taps /= taps.sum()
        values = np.pad(images / 255.0, ((0, 0), (reach, reach), (reach, reach), (0, 0)), "edge")
        values = sum(t * values[:, i : i + side] for i, t in enumerate(taps))
        values = sum(t * values[:, :, i : i + side] for i, t in enumerate(taps))
        expected = (values * 255).astype(np.uint8)
        assert_levels_close(corruptions.corrupt(images, "gaussian_blur", severity), expected)


# Defocus


@pytest.mark.parametrize("level", ENTRIES["defocus_blur"].small + ENTRIES["defocus_blur"].large)
def test_the_disk_is_a_symmetric_average(level):
    kernel = blur.disk(*level)
    # Two disks touch their grid, and what the softening mirrors there makes them heavier.
    assert kernel.sum() == pytest.approx({8: 1.012975, 10: 1.010786}.get(level[0], 1.0))
    assert kernel.min() >= 0
    for same in (kernel.T, kernel[::-1], kernel[:, ::-1]):
        np.testing.assert_allclose(kernel, same, atol=1e-15)
    radius = level[0]
    middle = len(kernel) // 2
    steps = np.arange(-middle, middle + 1)
    distance = np.hypot(steps[:, None], steps)
    flat = 1 / (np.hypot(*np.mgrid[-30:31, -30:31]) <= radius).sum()
    np.testing.assert_allclose(kernel[distance < radius - 3], flat)
    assert (kernel[distance > radius + 3] == 0).all()


@pytest.mark.parametrize(("radius", "sigma"), [(0.3, 0.4), (0.4, 0.5), (0.5, 0.6)])
def test_a_disk_below_one_pixel_is_a_small_gaussian(radius, sigma):
    side = math.exp(-0.5 / sigma**2)
    taps = np.array([side, 1, side]) / (1 + 2 * side)
    np.testing.assert_allclose(blur.disk(radius, sigma), np.outer(taps, taps))


@pytest.mark.parametrize(("side", "severity"), [(32, 1), (32, 4), (32, 5), (90, 2), (90, 5)])
def test_defocus_blur_mirrors_the_border(side, severity):
    images = random_images(2, side)
    entry = ENTRIES["defocus_blur"]
    kernel = blur.disk(*(entry.small if side == 32 else entry.large)[severity - 1])
    reach = len(kernel) // 2
    edges = ((0, 0), (reach, reach), (reach, reach), (0, 0))
    padded = np.pad(images / 255.0, edges, mode="reflect")
    values = sum(
        kernel[row, column] * padded[:, row : row + side, column : column + side]
        for row in range(len(kernel))
        for column in range(len(kernel))
    )
    assert_levels_close(
        corruptions.corrupt(images, "defocus_blur", severity), (values * 255).astype(np.uint8)
    )


def test_the_largest_disk_touches_its_grid_and_is_mirrored_there():
    kernel = blur.disk(8, 0.5)
    assert kernel.shape == (17, 17)
    side = math.exp(-2.0)
    taps = np.array([side, 1, side]) / (1 + 2 * side)
    # The outermost pixel of the middle row, with the row beyond equal to the one before.
    plain = np.hypot(*np.mgrid[-8:9, -8:9]) <= 8
    column = taps @ np.stack([plain[7:10, 1], plain[7:10, 0], plain[7:10, 1]]) @ taps
    assert kernel[8, 0] == pytest.approx(column / plain.sum())


# Glass


def glass_by_loops(image, reach, offsets):
    """The published loop: a swap of two views, from the last row and column to the first."""
    image = image.copy()
    height, width = image.shape[:2]
    for h in range(height - reach, reach, -1):
        for w in range(width - reach, reach, -1):
            dx, dy = offsets[h - reach - 1, w - reach - 1]
            there_h, there_w = h + dy, w + dx
            image[h, w], image[there_h, there_w] = image[there_h, there_w], image[h, w]
    return image


@pytest.mark.parametrize(("reach", "height", "width"), [(1, 9, 9), (1, 32, 32), (4, 20, 33)])
def test_glass_copies_as_the_loop_does(reach, height, width):
    images = random_images(3, height, width)
    shape = (height - 2 * reach, width - 2 * reach, 2)
    offsets = draws_for(3).integers(shape, -reach, reach)
    assert (offsets.min(), offsets.max()) == (-reach, reach - 1)
    copied = blur.copy_neighbours(images, reach, draws_for(3))
    for number in range(3):
        expected = glass_by_loops(images[number], reach, offsets[number])
        np.testing.assert_array_equal(copied[number], expected)
    assert not np.array_equal(copied, images)


def test_glass_does_not_swap():
    """A swap would keep the set of pixels."""
    images = np.arange(900, dtype=np.uint16).reshape(1, 30, 30, 1)
    copied = blur.copy_neighbours(images, 1, draws_for(1))
    assert len(np.unique(copied)) < 700


@pytest.mark.parametrize("severity", [1, 3, 5])
def test_glass_blur_smooths_before_and_after(severity):
    images = random_images(2)
    sigma, reach, num_rounds = ENTRIES["glass_blur"].small[severity - 1]

    def gaussian(values):
        return np.stack(
            [
                scipy.ndimage.gaussian_filter(each, (sigma, sigma, 0), mode="nearest")
                for each in values
            ]
        )

    draws = draws_for(2, severity=severity)
    values = (gaussian(images / 255.0) * 255).astype(np.uint8)
    for _ in range(num_rounds):
        offsets = draws.integers((30, 30, 2), -reach, reach)
        values = np.stack(
            [glass_by_loops(*pair) for pair in zip(values, [reach] * 2, offsets, strict=True)]
        )
    expected = (np.clip(gaussian(values / 255.0), 0, 1) * 255).astype(np.uint8)
    np.testing.assert_array_equal(corruptions.corrupt(images, "glass_blur", severity), expected)


# Motion


@pytest.mark.parametrize(
    ("radius", "sigma", "angle"), [(6, 1, 0), (9, 2.5, 45), (8, 2, -30), (12, 6, -135), (20, 15, 7)]
)
def test_motion_is_a_sum_of_shifts(radius, sigma, angle):
    images = random_images(2, 24, 30)
    blurred = filters.motion(images, radius, sigma, np.array([angle, 90.0]))
    for image, result, turned in zip(images, blurred, (angle, 90.0), strict=True):
        difference = np.abs(result - motion_by_shifts(image, radius, sigma, turned))
        assert difference.max() <= 1
        assert (difference > 0).mean() < 0.001


def test_motion_keeps_a_constant_and_smears_to_one_side():
    assert (filters.motion(np.full((1, 16, 16, 3), 77), 9, 2.5, np.array([33.0])) == 77).all()
    dot = np.zeros((1, 40, 40, 1))
    dot[0, 20, 20] = 255.0
    smeared = filters.motion(dot, 9, 3.0, np.array([0.0]))[0, 20, :, 0]
    assert smeared[20] == smeared.max()
    assert (smeared[21:] == 0).all()
    assert (np.diff(smeared[12:21]) > 0).all()


def test_motion_blur_turns_within_45_degrees():
    draws = draws_for(400, "motion_blur", 2)
    angles = draws.uniform((1,), -45, 45)[:, 0]
    assert angles.min() < -43 and angles.max() > 43 and abs(angles.mean()) < 5
    images = random_images(3)
    corrupted = corruptions.corrupt(images, "motion_blur", 2)
    for image, result, angle in zip(images, corrupted, angles, strict=False):
        assert_levels_close(result, motion_by_shifts(image, 6, 1.5, angle))


# Zoom


def test_zoom_factors_are_the_published_ones():
    """Floating-point rounding makes two of the CIFAR rows and some of ImageNet include the stop."""
    entry = ENTRIES["zoom_blur"]
    assert [len(row) for row in entry.small] == [7, 12, 16, 21, 26]
    assert [len(row) for row in entry.large] == [12, 16, 11, 13, 11]
    assert all(row[0] == 1.0 for row in entry.small + entry.large)
    assert entry.small[0][-1] == pytest.approx(1.06)
    assert entry.large[4][-1] == pytest.approx(1.30)


@pytest.mark.parametrize("factor", [1.0, 1.01, 1.05, 1.06, 1.25, 1.75, 2.25, 3, 4.5])
@pytest.mark.parametrize("shape", [(32, 32, 3), (224, 90), (8, 13, 1)])
def test_clipped_zoom_is_scipys(factor, shape):
    image = np.random.RandomState(0).random_sample(shape)
    ours = filters.clipped_zoom(image, factor)
    assert ours.shape == shape
    np.testing.assert_allclose(ours, zoomed_by_scipy(image, factor), atol=1e-12)


@pytest.mark.parametrize(("severity", "stop"), [(1, 1.06), (3, 1.16), (5, 1.26)])
def test_zoom_blur_averages_the_image_and_its_enlargements(severity, stop):
    images = random_images(2)
    values = images / 255.0
    factors = np.arange(1, stop, 0.01)
    enlarged = [np.stack([zoomed_by_scipy(v, factor) for v in values]) for factor in factors]
    expected = (values + sum(enlarged)) / (len(factors) + 1)
    corrupted = corruptions.corrupt(images, "zoom_blur", severity)
    assert_levels_close(corrupted, (expected * 255).astype(np.uint8))
