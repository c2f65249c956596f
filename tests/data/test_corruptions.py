"""What holds for every corruption: kinds, range, determinism, mistakes. The statistics of noise.

`corrupt` is the front end; the definitions of the single corruptions have their own files.
"""

import zlib

import numpy as np
import pytest
from corruption_images import grey, random_images
from forked_programs import Program

from he_keras.data import corruptions
from he_keras.data.corruptions import random_draws, registry

SEVERITIES = (1, 2, 3, 4, 5)
SMALL_SIGMAS = (0.04, 0.06, 0.08, 0.09, 0.10)
LARGE_SIGMAS = (0.08, 0.12, 0.18, 0.26, 0.38)


def smooth_images(count, side, seed=0):
    """Images with structure of many pixels, which every corruption changes."""
    rows, columns = np.mgrid[:side, :side] / side
    phase = np.random.RandomState(seed).uniform(0, 6, (count, 1, 1, 3))
    waves = np.sin(9 * rows[..., None] + phase) + np.cos(7 * columns[..., None] - phase)
    return ((waves + 2.5) * 50).astype(np.uint8)


def test_names_are_those_of_the_benchmarks():
    assert len(corruptions.CORRUPTIONS) == 15
    assert len(corruptions.EXTRA_CORRUPTIONS) == 4
    assert corruptions.names() == (*corruptions.CORRUPTIONS, *corruptions.EXTRA_CORRUPTIONS)
    assert set(registry.ENTRIES) == set(corruptions.names())


@pytest.mark.parametrize("severity", SEVERITIES)
@pytest.mark.parametrize("name", corruptions.names())
@pytest.mark.parametrize(
    ("side", "width"), [(32, 32), pytest.param(224, 224, marks=pytest.mark.slow), (33, 47)]
)
def test_shape_kind_and_change(name, severity, side, width):
    images = smooth_images(2, max(side, width))[:, :side, :width]
    before = images.copy()
    corrupted = corruptions.corrupt(images, name, severity)
    np.testing.assert_array_equal(images, before)
    assert corrupted.dtype == np.uint8
    assert corrupted.shape == images.shape
    assert not np.array_equal(corrupted, images)
    # Something of the image is left; a cloud as large as the image may outweigh it.
    likeness = np.corrcoef(corrupted.ravel(), images.ravel())[0, 1]
    assert likeness > (0.15 if name != "fog" else -0.5)


@pytest.mark.parametrize("name", corruptions.names())
def test_extreme_images_stay_in_range(name):
    for images in (grey(0), grey(255), random_images(1, side=8)):
        for severity in SEVERITIES:
            values = corruptions.corrupt(images / np.float32(255), name, severity)
            assert values.dtype == np.float32
            assert 0.0 <= values.min() <= values.max() <= 1.0


@pytest.mark.parametrize("name", corruptions.names())
@pytest.mark.parametrize("side", [32, 100])
def test_batch_size_and_order_change_nothing(name, side, monkeypatch):
    images = smooth_images(7, side)
    for severity in (1, 5):
        together = corruptions.corrupt(images, name, severity, seed=3)
        ids = np.array([5, 0, 6])
        some = corruptions.corrupt(images[ids], name, severity, seed=3, example_ids=ids)
        np.testing.assert_array_equal(some, together[ids])
        alone = corruptions.corrupt(images[4:5], name, severity, seed=3, example_ids=[4])
        np.testing.assert_array_equal(alone, together[4:5])
    monkeypatch.setattr(registry, "_VALUES_AT_ONCE", 2 * images[0].size)
    in_pieces = corruptions.corrupt(images, name, 5, seed=3)
    np.testing.assert_array_equal(in_pieces, together)


RANDOM = [
    name
    for name in corruptions.names()
    if name
    not in (
        *("defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression"),
        *("gaussian_blur", "saturate"),
    )
]


@pytest.mark.parametrize("name", corruptions.names())
def test_seed_and_number_matter_where_chance_does(name):
    images = np.repeat(smooth_images(1, 32), 3, axis=0)
    first = corruptions.corrupt(images, name, 5)
    assert np.array_equal(first, corruptions.corrupt(images, name, 5))
    other_seed = corruptions.corrupt(images, name, 5, seed=1)
    is_random = name in RANDOM
    assert np.array_equal(first, other_seed) != is_random
    assert np.array_equal(first[0], first[1]) != is_random


def test_streams_of_different_purposes_differ():
    ids = np.array([3])
    numbers = [
        random_draws.Draws(seed, name, severity, ids).uniform((4,)).tolist()
        for seed, name, severity in [(0, "fog", 1), (1, "fog", 1), (0, "fog", 2), (0, "snow", 1)]
    ]
    assert len({tuple(row[0]) for row in numbers}) == 4


def test_a_stream_is_philox_with_the_example_in_the_counter():
    key = np.array([7, zlib.crc32(b"gaussian_noise") * 16 + 2], np.uint64)
    philox = np.random.Philox(key=key, counter=np.array([0, 0, 0, 11], np.uint64))
    expected = 0.5 + 2.0 * np.random.Generator(philox).standard_normal((2, 3))
    draws = random_draws.Draws(7, "gaussian_noise", 2, np.array([11]))
    np.testing.assert_array_equal(draws.normal((2, 3), 0.5, 2.0)[0], expected)


def sums_of_corrupted_images():
    images = (np.arange(2 * 32 * 32 * 3).reshape(2, 32, 32, 3) % 256).astype(np.uint8)
    return [int(corruptions.corrupt(images, name, 3).sum()) for name in corruptions.names()]


def print_sums():
    print(sums_of_corrupted_images())


def test_another_process_makes_the_same_images():
    printed, errors = Program(print_sums).communicate()
    assert printed.strip() == str(sums_of_corrupted_images()), errors


def test_floats_are_rounded_to_eight_bits():
    images = random_images(2)
    as_float = images.astype(np.float32) / np.float32(255)
    expected = corruptions.corrupt(images, "contrast", 2)
    for shift in (0.0, 0.4, -0.4):
        near = np.clip(as_float + np.float32(shift / 255), 0, 1)
        values = corruptions.corrupt(near, "contrast", 2)
        np.testing.assert_array_equal(values, expected.astype(np.float32) / np.float32(255))


def test_the_table_is_the_nearest_in_ratio():
    assert [registry.uses_small_table(side, side) for side in (8, 32, 84, 85, 224)] == [
        *(True, True, True, False, False)
    ]
    assert registry.uses_small_table(500, 64)
    # Without chance, so that the level shows: c * v + (1 - c) * mean of black and white halves.
    for side, level in ((84, 0.75), (85, 0.4)):
        halves = grey(0, side=side)
        halves[:, :, : side // 2] = 255
        lowest = corruptions.corrupt(halves, "contrast", 1).min()
        assert lowest == int((1 - level) * halves.mean())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((grey(0), "hail", 1), "Unknown corruption; expected one of .*'hail'"),
        ((grey(0), "fog", 0), r"Invalid severity; expected one of \(1, 2, 3, 4, 5\).*severity=0"),
        ((grey(0), "fog", 6), "severity=6"),
        ((grey(0), "fog", 1.0), "severity=1.0"),
        ((grey(0), "fog", True), "severity=True"),
        ((grey(0)[..., :1], "fog", 1), "expected .n, height, width, 3.*repeat grey images"),
        ((grey(0, side=7), "fog", 1), "8 pixels a side or more"),
        ((grey(0)[0], "fog", 1), "wrong shape"),
        ((grey(0).astype(int), "fog", 1), "wrong dtype"),
        ((grey(0) + 2.0, "fog", 1), "outside"),
        ((np.full((1, 32, 32, 3), np.nan), "fog", 1), "NaN"),
        ((grey(0), "fog", 1, -1), "Invalid seed; expected an integer >= 0; received seed=-1"),
        ((grey(0), "fog", 1, 0, [0, 1]), "Invalid example_ids; expected 1 integers"),
        ((grey(0), "fog", 1, 0, [-1]), "Invalid example_ids"),
        ((grey(0), "fog", 1, 0, [0.0]), "Invalid example_ids"),
        ((grey(0), "fog", 1, 0, None, "/nowhere"), "No frost pictures; expected a folder"),
    ],
)
def test_mistakes(arguments, message):
    with pytest.raises(ValueError, match=message):
        corruptions.corrupt(*arguments)


def test_registering():
    with pytest.raises(ValueError, match="registered twice.*'fog'"):
        corruptions.register("fog", small=(1,) * 5, large=(1,) * 5)(lambda images, setting: images)
    with pytest.raises(ValueError, match=r"Incomplete table.*len\(large\)=4"):
        corruptions.register("hail", small=(1,) * 5, large=(1,) * 4)
    assert "hail" not in corruptions.names()


# Noise


def changes(name, severity, level, side):
    """The changes, on [0, 1], of every channel value of grey images."""
    count = 40 if side == 32 else 2
    corrupted = corruptions.corrupt(grey(level, count, side), name, severity)
    # Truncation lowers a value by half a level on average.
    return (corrupted.astype(float) + 0.5 - level) / 255.0


@pytest.mark.parametrize("severity", SEVERITIES)
@pytest.mark.parametrize(("side", "sigmas"), [(32, SMALL_SIGMAS), (224, LARGE_SIGMAS)])
def test_gaussian_noise(severity, side, sigmas):
    sigma = sigmas[severity - 1]
    change = changes("gaussian_noise", severity, 128, side)
    inside = np.abs(change) < 0.4
    # Of a Gaussian cut at 0.4, as the border of the range does with the largest sigma.
    wide = np.random.RandomState(0).normal(0, sigma, 400_000)
    expected = wide[np.abs(wide) < 0.4].std()
    assert change[inside].std() == pytest.approx(expected, rel=0.02)
    assert change[inside].mean() == pytest.approx(0.0, abs=0.004)


@pytest.mark.parametrize("severity", SEVERITIES)
@pytest.mark.parametrize(
    ("side", "sigmas"), [(32, (0.06, 0.1, 0.12, 0.16, 0.2)), (224, (0.15, 0.2, 0.35, 0.45, 0.6))]
)
def test_speckle_noise_grows_with_the_value(severity, side, sigmas):
    for level in (40, 80):
        change = changes("speckle_noise", severity, level, side)
        # At least 1.6 deviations to black and more to white: compare the middle of the law.
        spread = np.subtract(*np.percentile(change, [75, 25])) / 1.349
        assert spread == pytest.approx(sigmas[severity - 1] * level / 255, rel=0.04, abs=0.003)


@pytest.mark.parametrize("severity", SEVERITIES)
@pytest.mark.parametrize(
    ("side", "exposures"), [(32, (500, 250, 100, 75, 50)), (224, (60, 25, 12, 5, 3))]
)
def test_shot_noise_counts_photons(severity, side, exposures):
    exposure = exposures[severity - 1]
    corrupted = corruptions.corrupt(grey(51, 40 if side == 32 else 2, side), "shot_noise", severity)
    counts = np.arange(exposure + 1)
    logs = counts * np.log(exposure * 0.2) - exposure * 0.2
    logs -= np.cumsum(np.log(np.maximum(counts, 1)))
    chances = np.exp(logs)
    chances[-1] += 1 - chances.sum()
    levels = np.clip(counts / exposure, 0, 1) * 255
    mean = (chances * np.floor(levels)).sum()
    deviation = np.sqrt((chances * (np.floor(levels) - mean) ** 2).sum())
    assert corrupted.mean() == pytest.approx(mean, abs=0.5)
    assert corrupted.std() == pytest.approx(deviation, rel=0.02)
    assert set(np.unique(corrupted)) <= set(levels.astype(np.uint8))
    assert (corruptions.corrupt(grey(0), "shot_noise", severity) == 0).all()


@pytest.mark.parametrize("severity", SEVERITIES)
@pytest.mark.parametrize(
    ("side", "amounts"),
    [(32, (0.01, 0.02, 0.03, 0.05, 0.07)), (224, (0.03, 0.06, 0.09, 0.17, 0.27))],
)
def test_impulse_noise_hits_single_channels(severity, side, amounts):
    images = grey(100, 100 if side == 32 else 2, side)
    corrupted = corruptions.corrupt(images, "impulse_noise", severity)
    amount = amounts[severity - 1]
    assert set(np.unique(corrupted)) == {0, 100, 255}
    for value in (0, 255):
        assert (corrupted == value).mean() == pytest.approx(amount / 2, rel=0.06)
    hit = corrupted != 100
    # Channels are hit independently of each other.
    both = hit[..., 0] & hit[..., 1]
    assert both.mean() == pytest.approx(amount**2, abs=4 * amount / np.sqrt(both.size))
