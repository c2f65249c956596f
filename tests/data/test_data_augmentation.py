"""Augmentation against NumPy, torchvision's formula and Pillow."""

import numpy as np
import pytest
import tensorflow as tf
from prepared_data import numbered_dataset

from he_keras.data import augmentation, randomness


@pytest.mark.parametrize("padding", [0, 2, 4])
def test_crop_flip_against_numpy(padding):
    dataset = numbered_dataset(20, height=7, width=9)
    random = np.random.RandomState(1)
    offsets = random.randint(0, 2 * padding + 1, (20, 2)).astype(np.int32)
    flips = random.rand(20) < 0.5
    result = augmentation.crop_flip(tf.constant(dataset.images), offsets, flips, padding)
    for image, (row, column), flip, got in zip(dataset.images, offsets, flips, result, strict=True):
        padded = np.pad(image, ((padding, padding), (padding, padding), (0, 0)))
        crop = padded[row : row + 7, column : column + 9]
        np.testing.assert_array_equal(got, crop[:, ::-1] if flip else crop)


def test_crop_flip_draws_are_uniform():
    offsets, flips = augmentation.draw_crop_flip(81 * 2 * 200, tf.constant([5, 6], tf.int64))
    cells = (offsets.numpy() * [18, 2]).sum(axis=1) + flips.numpy()
    counts = np.bincount(cells, minlength=162)
    assert len(counts) == 162
    # Chi-square with 161 degrees of freedom: mean 161, standard deviation 18.
    assert 80 < ((counts - 200.0) ** 2 / 200.0).sum() < 260


def torchvision_box(height, width, draws, place):
    """torchvision's RandomResizedCrop.get_params on given draws; also whether a try fitted."""
    for area_draw, ratio_draw in draws.T:
        area = height * width * (0.08 + 0.92 * area_draw)
        ratio = np.exp(np.log(3 / 4) + (np.log(4 / 3) - np.log(3 / 4)) * ratio_draw)
        box_width, box_height = round(np.sqrt(area * ratio)), round(np.sqrt(area / ratio))
        if 0 < box_width <= width and 0 < box_height <= height:
            top = int(place[0] * (height - box_height + 1))
            left = int(place[1] * (width - box_width + 1))
            return (top, left, box_height, box_width), True
    if width / height < 3 / 4:
        box_width, box_height = width, round(width / (3 / 4))
    elif width / height > 4 / 3:
        box_height, box_width = height, round(height * (4 / 3))
    else:
        box_width, box_height = width, height
    return ((height - box_height) // 2, (width - box_width) // 2, box_height, box_width), False


@pytest.mark.fast_cases("size0", "size3")
@pytest.mark.parametrize("size", [(300, 400), (64, 64), (500, 130), (20, 400), (400, 13)])
def test_resized_crop_boxes_are_torchvisions(size):
    fitted = []
    draw_box = tf.function(augmentation.resized_crop_box)
    for number in range(40):
        seed = tf.constant([3, number], tf.int64)
        box = draw_box(tf.constant(size[0]), tf.constant(size[1]), seed)
        draws, place = (
            tf.random.stateless_uniform(
                shape, randomness.fold_in(seed, which), alg="philox"
            ).numpy()
            for which, shape in enumerate([(2, 10), (2,)])
        )
        expected, fits = torchvision_box(*size, draws.astype(np.float64), place.astype(np.float64))
        assert tuple(int(value) for value in box) == expected
        fitted.append(fits)
    assert any(fitted) == (min(size) > 20)


def test_resized_crop_reaches_the_whole_range_of_areas():
    seeds = [tf.constant([8, number], tf.int64) for number in range(300)]
    size = tf.constant(256)
    draw_box = tf.function(augmentation.resized_crop_box)
    boxes = np.array([draw_box(size, size, seed) for seed in seeds])
    areas = boxes[:, 2] * boxes[:, 3] / 256.0**2
    assert 0.075 < areas.min() < 0.12 and 0.9 < areas.max() <= 1.0
    ratios = boxes[:, 3] / boxes[:, 2]
    assert 0.73 < ratios.min() < 0.8 and 1.25 < ratios.max() < 1.37


@pytest.mark.parametrize("size", [(300, 401), (500, 281), (224, 224)])
def test_test_images_against_pillow(size):
    from PIL import Image

    coarse = np.random.RandomState(0).randint(0, 256, (12, 12, 3), dtype=np.uint8)
    pillow = Image.fromarray(coarse).resize(size[::-1], Image.Resampling.BICUBIC)
    image = np.asarray(pillow)
    height, width = size
    short = min(size)
    resized = pillow.resize(
        (256 * width // short, 256 * height // short), Image.Resampling.BILINEAR
    )
    top, left = round((resized.height - 224) / 2), round((resized.width - 224) / 2)
    expected = np.asarray(resized)[top : top + 224, left : left + 224]
    got = augmentation.resize_and_centre_crop(tf.constant(image), (224, 224)).numpy()
    assert got.shape == (224, 224, 3) and got.dtype == np.uint8
    assert np.abs(got.astype(int) - expected.astype(int)).max() <= 2
