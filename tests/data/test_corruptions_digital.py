"""Contrast, saturation, elastic transform, pixelation and JPEG against their definitions."""

import colorsys
import io

import numpy as np
import PIL.Image
import pytest
import scipy.ndimage
from blur_references import assert_levels_close, draws_for
from corruption_images import grey, random_images

from he_keras.data import corruptions
from he_keras.data.corruptions import digital, filters
from he_keras.data.corruptions.registry import ENTRIES, Setting


@pytest.mark.parametrize(
    ("side", "levels"), [(32, (0.75, 0.5, 0.4, 0.3, 0.15)), (90, (0.4, 0.3, 0.2, 0.1, 0.05))]
)
def test_contrast_pulls_each_channel_to_its_own_mean(side, levels):
    images = random_images(2, side) // np.array([1, 2, 3], np.uint8)
    for severity, level in enumerate(levels, 1):
        values = images / 255.0
        means = values.mean(axis=(1, 2), keepdims=True)
        expected = ((values - means) * level + means) * 255
        assert_levels_close(
            corruptions.corrupt(images, "contrast", severity), expected.astype(np.uint8)
        )


@pytest.mark.parametrize("side", [32, 90])
@pytest.mark.parametrize("severity", [1, 2, 3, 4, 5])
def test_saturate_scales_the_saturation(side, severity):
    entry = ENTRIES["saturate"]
    factor, offset = (entry.small if side == 32 else entry.large)[severity - 1]
    images = random_images(1, side)
    images[0, 0, :4] = [[0, 0, 0], [255, 255, 255], [255, 0, 9], [90, 90, 90]]
    corrupted = corruptions.corrupt(images, "saturate", severity)
    for pixel, result in zip(images[0, 0], corrupted[0, 0], strict=True):
        hue, saturation, value = colorsys.rgb_to_hsv(*(pixel / 255))
        target = min(saturation * factor + offset, 1.0)
        expected = np.array(colorsys.hsv_to_rgb(hue, target, value)) * 255
        assert np.abs(result - expected).max() < 1.0 + 1e-6


def test_saturate_makes_grey_red_where_it_adds():
    assert (corruptions.corrupt(grey(90), "saturate", 3) == 90).all()
    assert corruptions.corrupt(grey(100), "saturate", 5)[0, 0, 0].tolist() == [100, 80, 80]


# Elastic transform


def elastic(images, level, count=None):
    setting = Setting(level, True, draws_for(count or len(images), "elastic_transform", 2))
    return ENTRIES["elastic_transform"].function(images, setting)


def test_elastic_without_amplitude_and_jitter_is_the_identity():
    images = random_images(2, 21, 34)
    np.testing.assert_allclose(elastic(images, (0, 0, 0)), images / 255, atol=1e-6)
    np.testing.assert_allclose(elastic(images, (1e-9, 2, 0)), images / 255, atol=1e-6)


def test_elastic_levels():
    entry = ENTRIES["elastic_transform"]
    np.testing.assert_allclose(entry.small[0], (0, 0, 2.56))
    np.testing.assert_allclose(entry.small[1], (1.6, 6.4, 2.24))
    np.testing.assert_allclose(entry.small[4], (3.2, 0.96, 0.96))
    np.testing.assert_allclose(entry.large[0], (488, 170.8, 24.4))
    np.testing.assert_allclose(entry.large[4], (29.28, 2.44, 4.88))


def test_anchor_points_are_a_third_around_the_middle():
    expected = [[26, 26], [26, 6], [6, 6]]
    np.testing.assert_array_equal(digital.anchor_points(32, 32), expected)
    np.testing.assert_array_equal(digital.anchor_points(20, 41), [[26, 16], [26, 4], [14, 4]])


def test_the_affine_map_takes_the_anchors_where_they_belong():
    corners = digital.anchor_points(32, 32)
    moved = corners + np.random.RandomState(0).randint(-3, 4, (5, 3, 2))
    rows, columns = digital.affine_places(corners, moved, 32, 32)
    for number in range(5):
        for (x, y), (new_x, new_y) in zip(corners, moved[number].astype(int), strict=True):
            assert columns[number, new_y, new_x] == pytest.approx(x)
            assert rows[number, new_y, new_x] == pytest.approx(y)
        # Affine: second differences vanish.
        assert np.abs(np.diff(rows[number], 2, axis=0)).max() < 1e-9
        assert np.abs(np.diff(columns[number], 2, axis=1)).max() < 1e-9


@pytest.mark.parametrize(
    ("fold", "mode"), [(filters.mirrored, "mirror"), (filters.reflected, "reflect")]
)
def test_sampling_is_linear_and_folds_at_the_border(fold, mode):
    random = np.random.RandomState(0)
    images = random.random_sample((2, 12, 17, 3))
    rows, columns = random.uniform(-30, 45, (2, 2, 12, 17))
    sampled = filters.sample(images, rows, columns, fold)
    for number in range(2):
        for channel in range(3):
            expected = scipy.ndimage.map_coordinates(
                images[number, ..., channel], [rows[number], columns[number]], order=1, mode=mode
            )
            np.testing.assert_allclose(sampled[number, ..., channel], expected, atol=1e-12)


def test_elastic_transform_in_single_steps():
    images = random_images(2)
    amplitude, sigma, jitter = ENTRIES["elastic_transform"].small[1]
    draws = draws_for(2, "elastic_transform", 2)
    corners = digital.anchor_points(32, 32)
    moves = draws.uniform((3, 2), -jitter, jitter)
    shifts = draws.uniform((2, 32, 32), -1, 1)
    corrupted = corruptions.corrupt(images, "elastic_transform", 2)
    for number, image in enumerate(images):
        # From the source to the target, as a matrix; then the other way round.
        ones = np.ones((3, 1))
        forward = np.linalg.solve(np.hstack([corners, ones]), corners + moves[number]).T
        inverse = np.linalg.inv(np.vstack([forward, [0, 0, 1]]))
        y, x = np.mgrid[:32, :32]
        places = np.einsum("ij,jyx->iyx", inverse, np.stack([x, y, np.ones_like(x)]))
        smooth = [
            scipy.ndimage.gaussian_filter(each, sigma, mode="reflect", truncate=3) * amplitude
            for each in shifts[number]
        ]
        result = np.empty((32, 32, 3))
        for channel in range(3):
            plane = image[..., channel] / 255
            plane = scipy.ndimage.map_coordinates(plane, places[1::-1], order=1, mode="mirror")
            plane = scipy.ndimage.map_coordinates(
                plane, [y + smooth[1], x + smooth[0]], order=1, mode="reflect"
            )
            result[..., channel] = plane
        assert_levels_close(corrupted[number], (result * 255).astype(np.uint8))


# Pixelation and JPEG


@pytest.mark.parametrize(
    ("side", "sizes"), [(32, (30, 28, 27, 24, 20)), (224, (134, 112, 89, 67, 56))]
)
def test_pixelate_averages_over_boxes(side, sizes):
    images = random_images(1, side)
    box = PIL.Image.Resampling.BOX
    for severity, size in enumerate(sizes, 1):
        picture = PIL.Image.fromarray(images[0]).resize((size, size), box)
        expected = np.asarray(picture.resize((side, side), box))
        corrupted = corruptions.corrupt(images, "pixelate", severity)[0]
        np.testing.assert_array_equal(corrupted, expected)
    # 224 / 56 = 4: blocks of one colour, the mean of what was there, rounded twice.
    if side == 224:
        blocks = images[0].reshape(56, 4, 56, 4, 3).mean(axis=(1, 3))
        assert np.abs(corrupted[::4, ::4] - blocks).max() <= 1
        np.testing.assert_array_equal(corrupted[::4, ::4], corrupted[3::4, 3::4])


@pytest.mark.parametrize(
    ("side", "qualities"), [(32, (80, 65, 58, 50, 40)), (90, (25, 18, 15, 10, 7))]
)
def test_jpeg_is_pillows(side, qualities):
    images = random_images(2, side)
    for severity, quality in enumerate(qualities, 1):
        stream = io.BytesIO()
        PIL.Image.fromarray(images[1]).save(stream, "JPEG", quality=quality)
        expected = np.asarray(PIL.Image.open(stream))
        corrupted = corruptions.corrupt(images, "jpeg_compression", severity)[1]
        np.testing.assert_array_equal(corrupted, expected)


@pytest.mark.parametrize(
    "name",
    ["gaussian_noise", "impulse_noise", "defocus_blur", "brightness", "contrast", "pixelate"],
)
def test_damage_grows_with_severity(name):
    for side in (32, 224):
        images = random_images(3, side) // 2 + 40
        damage = [
            np.abs(corruptions.corrupt(images, name, severity).astype(int) - images).mean()
            for severity in (1, 2, 3, 4, 5)
        ]
        assert damage == sorted(damage)
