"""Snow, frost, fog, brightness and spatter against their definitions."""

import colorsys

import numpy as np
import PIL.Image
import pytest
import scipy.ndimage
from blur_references import assert_levels_close, draws_for, motion_by_shifts, zoomed_by_scipy
from corruption_images import grey, random_images

from he_keras.data import corruptions
from he_keras.data.corruptions import drops, edges, fields, frost_textures
from he_keras.data.corruptions.registry import ENTRIES

# Fog


def plasma_by_points(noise, size, decay):
    """Diamond-square one point at a time, on a torus; the noise in the order of the grids."""
    noise = iter(noise)
    next(noise)
    cloud = np.zeros((size, size))
    step, wibble = size, 100.0
    while step >= 2:
        half = step // 2
        amplitude = wibble**2

        def mean(*points, cloud=cloud):
            return sum(cloud[y % size, x % size] for y, x in points) / 4

        corners = [(y, x) for y in range(0, size, step) for x in range(0, size, step)]
        for y, x in corners:
            around = ((y, x), (y + step, x), (y, x + step), (y + step, x + step))
            cloud[y + half, x + half] = mean(*around) + amplitude * next(noise)
        for down, right in ((0, half), (half, 0)):
            for y, x in corners:
                y, x = y + down, x + right
                around = ((y - half, x), (y + half, x), (y, x - half), (y, x + half))
                cloud[y, x] = mean(*around) + amplitude * next(noise)
        step, wibble = half, wibble / decay
    cloud -= cloud.min()
    return cloud / cloud.max()


@pytest.mark.parametrize(("side", "size", "decay"), [(32, 32, 3), (9, 16, 1.75), (8, 8, 2)])
def test_plasma_is_diamond_square(side, size, decay):
    clouds = fields.plasma(draws_for(3), side, decay)
    assert clouds.shape == (3, size, size)
    noise = draws_for(3).uniform((size * size,), -1.0, 1.0)
    for cloud, each in zip(clouds, noise, strict=True):
        np.testing.assert_allclose(cloud, plasma_by_points(each, size, decay), atol=1e-12)
        assert (cloud.min(), cloud.max()) == (0.0, 1.0)


def test_plasma_is_rougher_with_a_smaller_decay():
    def roughness(decay):
        clouds = fields.plasma(draws_for(20), 64, decay)
        return np.abs(np.diff(clouds, axis=2)).mean()

    assert roughness(1.4) > 1.5 * roughness(2) > 1.6 * roughness(3)


@pytest.mark.parametrize("severity", [1, 5])
def test_fog_adds_a_cloud_and_rescales(severity):
    images = random_images(3, 20, 40) // np.array([3, 2, 4], np.uint8)
    amount, decay = ENTRIES["fog"].small[severity - 1]
    clouds = fields.plasma(draws_for(3, "fog", severity), 40, decay)[:, :20, :40]
    corrupted = corruptions.corrupt(images, "fog", severity)
    for image, cloud, result in zip(images, clouds, corrupted, strict=True):
        largest = image.max() / 255
        expected = (image / 255 + amount * cloud[..., None]) * largest / (largest + amount)
        assert_levels_close(result, (expected * 255).astype(np.uint8))
    assert (corruptions.corrupt(grey(0), "fog", severity) == 0).all()


# Snow


@pytest.mark.parametrize(("side", "severity"), [(32, 1), (32, 3), (32, 5), (90, 4)])
def test_snow_whitens_and_falls_twice(side, severity):
    images = random_images(2, side)
    entry = ENTRIES["snow"]
    level = (entry.small if side == 32 else entry.large)[severity - 1]
    mean, deviation, zoom, threshold, radius, sigma, mix = level
    draws = draws_for(2, "snow", severity)
    layers = draws.normal((side, side), mean, deviation)
    angles = draws.uniform((1,), -135, -45)[:, 0]
    corrupted = corruptions.corrupt(images, "snow", severity)
    for image, layer, angle, result in zip(images, layers, angles, corrupted, strict=True):
        flakes = zoomed_by_scipy(layer, zoom)
        flakes = (np.clip(np.where(flakes < threshold, 0, flakes), 0, 1) * 255).astype(np.uint8)
        flakes = motion_by_shifts(flakes[..., None], radius, sigma, angle) / 255
        values = image / 255
        white = values @ [0.299, 0.587, 0.114] * 1.5 + 0.5
        values = mix * values + (1 - mix) * np.maximum(values, white[..., None])
        values = values + flakes + np.rot90(flakes, 2)
        assert_levels_close(result, (np.clip(values, 0, 1) * 255).astype(np.uint8), share=0.01)


# Frost


@pytest.mark.parametrize("side", [32, 224])
def test_procedural_frost_is_bright_and_blue_grey(side):
    textures = frost_textures.load(None, side == 32, side, side)
    assert len(textures) == 5
    for texture in textures:
        assert texture.dtype == np.uint8
        red, green, blue = texture.mean(axis=(0, 1))
        assert 90 < red < green < blue < 180
        # In every part that an image may get there is ice.
        parts = texture[: len(texture) // side * side, : len(texture) // side * side]
        means = parts.reshape(-1, side, len(texture) // side, side, 3).mean(axis=(1, 3, 4))
        assert means.min() > 75
        assert texture.std() > 30


@pytest.mark.parametrize("severity", [1, 5])
def test_frost_is_a_weighted_sum_with_some_part_of_a_texture(severity):
    corrupted = corruptions.corrupt(grey(0, 3), "frost", severity)
    share = ENTRIES["frost"].small[severity - 1]
    textures = frost_textures.load(None, True, 32, 32)
    for result in corrupted:
        assert any(
            np.array_equal(result, (share[1] * part).astype(np.uint8))
            for texture in textures
            for part in windows(texture, result, share[1])
        )
    light = corruptions.corrupt(grey(100, 3), "frost", severity)
    expected = np.minimum(corrupted + share[0] * 100, 255)
    assert np.abs(light - expected).max() <= 1


def windows(texture, result, share):
    """The parts of a texture whose first pixel fits."""
    first = (share * texture).astype(np.uint8)[:-32, :-32]
    for top, left in np.argwhere((first == result[0, 0]).all(axis=-1)):
        yield texture[top : top + 32, left : left + 32]


def test_procedural_frost_covers_images_of_any_size():
    corrupted = corruptions.corrupt(np.zeros((3, 40, 450, 3), np.uint8), "frost", 5)
    assert corrupted.reshape(3, 40, 9, 50, 3).mean(axis=(1, 3, 4)).min() > 0.45 * 60


def save_frost(folder, count=6, height=200, width=180):
    folder.mkdir(exist_ok=True)
    for number in range(1, count + 1):
        picture = np.full((height, width, 3), (10 * number, 0, 200), np.uint8)
        PIL.Image.fromarray(picture).save(folder / f"frost{number}.png")
    return folder


def test_frost_pictures_from_a_folder(tmp_path):
    folder = save_frost(tmp_path / "ice")
    (folder / "notes.txt").write_text("not a picture")
    images = grey(0, 200)
    corrupted = corruptions.corrupt(images, "frost", 1, frost_dir=folder)
    # The sixth is never drawn; share 0.2 of (10 n, 0, 200).
    assert {tuple(each[0, 0]) for each in corrupted} == {(2 * n, 0, 40) for n in range(1, 6)}
    text = corruptions.describe_frost(folder)
    assert text == "frost pictures frost1.png, frost2.png, frost3.png, frost4.png, frost5.png"
    assert "procedural" in corruptions.describe_frost(None)


def test_small_frost_is_every_fifth_pixel(tmp_path):
    """OpenCV's default shrinking by 0.2 reads the middle pixel of every five."""
    picture = random_images(1, 165, 170)[0]
    PIL.Image.fromarray(picture).save(tmp_path / "only.png")
    textures = frost_textures.load(tmp_path, True, 32, 32)
    np.testing.assert_array_equal(textures[0], picture[2::5, 2::5])
    assert textures[0].shape == (33, 34, 3)
    np.testing.assert_array_equal(frost_textures.load(tmp_path, False, 90, 90)[0], picture)


def test_mistakes_with_frost_pictures(tmp_path):
    with pytest.raises(ValueError, match="No frost pictures; expected a folder"):
        corruptions.describe_frost(tmp_path)
    folder = save_frost(tmp_path / "small", count=1, height=160)
    with pytest.raises(ValueError, match="expected more than 160 x 160 pixels.*frost1.png"):
        corruptions.corrupt(grey(0), "frost", 1, frost_dir=folder)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "a.png").write_bytes(b"no picture")
    with pytest.raises(ValueError, match="cannot be read.*a.png"):
        corruptions.corrupt(grey(0), "frost", 1, frost_dir=tmp_path / "bad")


# Brightness


@pytest.mark.parametrize(("side", "shifts"), [(32, (0.05, 0.1, 0.15, 0.2, 0.3)), (90, (0.1, 0.5))])
def test_brightness_adds_to_the_value(side, shifts):
    images = random_images(1, 32 if side == 32 else 90)
    images[0, 0, :4] = [[0, 0, 0], [255, 255, 255], [255, 0, 9], [7, 7, 7]]
    for severity, shift in zip((1, 2, 3, 4, 5) if side == 32 else (1, 5), shifts, strict=True):
        corrupted = corruptions.corrupt(images, "brightness", severity)
        for pixel, result in zip(images[0, 0], corrupted[0, 0], strict=True):
            hue, saturation, value = colorsys.rgb_to_hsv(*(pixel / 255))
            expected = colorsys.hsv_to_rgb(hue, saturation, min(value + shift, 1.0))
            assert np.abs(result - np.array(expected) * 255).max() < 1.0 + 1e-6


# Spatter


def test_edges_of_a_square():
    image = np.zeros((1, 20, 20), np.uint8)
    image[0, 5:15, 5:15] = 200
    found = edges.canny(image, 50, 150)[0]
    # Sobel is equally large on both sides of a step; the first one counts.
    expected = np.zeros((20, 20), bool)
    expected[[4, 14], 6:14] = True
    expected[6:14, [4, 14]] = True
    np.testing.assert_array_equal(found[6:14], expected[6:14])
    np.testing.assert_array_equal(found[:, 6:14], expected[:, 6:14])
    assert not edges.canny(np.full((2, 9, 9), 90, np.uint8), 50, 150).any()


def test_weak_edges_need_a_strong_one_in_the_same_map():
    ramp = np.zeros((3, 16, 16), np.uint8)
    ramp[0, :, 8:] = 30  # weak alone: 4 * 30 = 120
    ramp[1, :, 8:] = np.linspace(30, 60, 16, dtype=np.uint8)[:, None]
    ramp[2, :, 8:] = 10  # below weak
    found = edges.canny(ramp, 50, 150)
    assert not found[0].any() and not found[2].any()
    assert found[1].sum() >= 14


def canny_by_loops(image, weak, strong):
    """Non-maximum suppression along one of four directions, then growth from the strong pixels."""
    padded = np.pad(image.astype(float), 1, mode="edge")
    across = scipy.ndimage.correlate(padded, [[-1, 0, 1], [-2, 0, 2], [-1, 0, 1]])[1:-1, 1:-1]
    down = scipy.ndimage.correlate(padded, [[-1, -2, -1], [0, 0, 0], [1, 2, 1]])[1:-1, 1:-1]
    size = np.pad(abs(across) + abs(down), 1)
    peaks = set()
    for y, x in np.ndindex(image.shape):
        angle = np.degrees(np.arctan2(down[y, x], across[y, x])) % 180
        step = [(0, 1), (1, 1), (1, 0), (1, -1)][int((angle + 22.5) // 45) % 4]
        before = size[1 + y - step[0], 1 + x - step[1]]
        after = size[1 + y + step[0], 1 + x + step[1]]
        here = size[1 + y, 1 + x]
        # Of two equal ones the left or upper counts, on diagonals neither does.
        is_straight = 0 in step
        if here > weak and here > before and (here >= after if is_straight else here > after):
            peaks.add((y, x))
    grown = [(y, x) for y, x in peaks if size[1 + y, 1 + x] > strong]
    for y, x in grown:
        near = {(y + dy, x + dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)}
        grown += sorted((near & peaks) - set(grown))
    edge = np.zeros(image.shape, bool)
    edge[tuple(np.transpose(grown))] = True
    return edge


@pytest.mark.parametrize("sigma", [0.7, 1.5, 3.0])
def test_canny_in_single_steps(sigma):
    noise = np.random.RandomState(0).normal(size=(3, 24, 31))
    maps = scipy.ndimage.gaussian_filter(noise, (0, sigma, sigma))
    maps = (255 * (maps - maps.min()) / np.ptp(maps)).astype(np.uint8)
    weak, strong = np.percentile(np.abs(np.gradient(maps.astype(float), axis=1)) * 8, [50, 90])
    found = edges.canny(maps, int(weak), int(strong))
    for each, image in zip(found, maps, strict=True):
        np.testing.assert_array_equal(each, canny_by_loops(image, int(weak), int(strong)))
    assert 0.02 < found.mean() < 0.5


def distance_by_relaxation(is_edge):
    """Shortest paths with steps of 1, 1.4 and 2.1969, shortened until nothing changes."""
    distance = np.where(is_edge, 0.0, 1e6)
    height, width = distance.shape
    costs = {(0, 1): 1.0, (1, 1): 1.4, (1, 2): 2.1969}
    moves = [
        (down, right, costs[tuple(sorted((abs(down), abs(right))))])
        for down in range(-2, 3)
        for right in range(-2, 3)
        if tuple(sorted((abs(down), abs(right)))) in costs
    ]
    before = None
    while before is None or not np.array_equal(before, distance):
        before = distance.copy()
        padded = np.pad(distance, 2, constant_values=1e6)
        for down, right, cost in moves:
            there = padded[2 + down : 2 + down + height, 2 + right : 2 + right + width]
            distance = np.minimum(distance, there + cost)
    return distance


def test_chamfer_distance():
    is_edge = np.random.RandomState(0).random_sample((3, 17, 25)) < 0.02
    is_edge[:, 8, 12] = True
    found = edges.chamfer_distance(is_edge)
    for each, points in zip(found, is_edge, strict=True):
        np.testing.assert_allclose(each, distance_by_relaxation(points))
        exact = scipy.ndimage.distance_transform_edt(~points)
        np.testing.assert_allclose(each, exact, rtol=0.025)
    assert np.isinf(edges.chamfer_distance(np.zeros((1, 4, 4), bool))).all()


def test_equalised_histogram():
    maps = np.zeros((2, 4, 5), np.uint8)
    maps[0] = np.repeat([[3], [3], [9], [20]], 5, axis=1)
    maps[1] = 7
    result = drops.equalised(maps)
    np.testing.assert_array_equal(result[0], np.repeat([[0], [0], [128], [255]], 5, axis=1))
    assert (result[1] == 7).all()


@pytest.mark.parametrize("severity", [4, 5])
def test_mud_is_brown_where_it_is(severity):
    corrupted = corruptions.corrupt(grey(255, 20), "spatter", severity)
    mean, deviation, sigma, threshold, strength, _ = ENTRIES["spatter"].small[severity - 1]
    liquid = draws_for(20, "spatter", severity).normal((32, 32), mean, deviation)
    for result, layer in zip(corrupted, liquid, strict=True):
        wet = scipy.ndimage.gaussian_filter(layer, sigma, mode="nearest") > threshold
        mud = scipy.ndimage.gaussian_filter(wet.astype(float), strength, mode="nearest")
        mud = np.where(mud < 0.8, 0, mud)[..., None]
        expected = (1 - mud) + mud * np.array([63, 42, 20]) / 255
        assert_levels_close(result, (expected * 255 + 1e-9).astype(np.uint8), share=0.2)
        assert (result < 255).any() and (result == 255).any()


def around(field):
    """The nine values in and around each pixel, mirrored at the border, from the upper left on."""
    padded = np.pad(field, 1, mode="reflect")
    height, width = field.shape
    return [padded[y : y + height, x : x + width] for y in range(3) for x in range(3)]


def water_by_steps(levels):
    """How much water shows on drops of these thicknesses, step by step for one map."""
    distance = edges.chamfer_distance(edges.canny(levels[None], 50, 150))[0]
    distance = np.where(distance > 20, 20, distance)
    relief = np.floor(sum(around(distance)) / 9 + 1e-9).astype(int)
    counts = np.bincount(relief.ravel())
    counts[relief.min()] = 0
    relief = np.rint(255 * np.cumsum(counts) / counts.sum())[relief]
    lit = zip((-2, -1, 0, -1, 1, 1, 0, 1, 2), around(relief), strict=True)
    relief = np.clip(sum(weight * part for weight, part in lit), 0, 255)
    shine = levels * np.rint(sum(around(relief)) / 9)
    return shine / shine.max()


@pytest.mark.parametrize(("side", "severity"), [(32, 1), (32, 3), (128, 1), (128, 3)])
def test_water_in_single_steps(side, severity):
    corrupted = corruptions.corrupt(grey(30, 3, side), "spatter", severity)
    entry = ENTRIES["spatter"]
    level = (entry.small if side == 32 else entry.large)[severity - 1]
    mean, deviation, sigma, threshold, strength, _ = level
    layers = draws_for(3, "spatter", severity).normal((side, side), mean, deviation)
    for result, layer in zip(corrupted, layers, strict=True):
        liquid = scipy.ndimage.gaussian_filter(layer, sigma, mode="nearest")
        liquid = np.where(liquid < threshold, 0, np.minimum(liquid, 1))
        water = water_by_steps((liquid * 255).astype(np.uint8))[..., None]
        expected = 30 / 255 + strength * water * np.array([175, 238, 238]) / 255
        assert_levels_close(
            result, (np.clip(expected, 0, 1) * 255 + 1e-9).astype(np.uint8), share=0.02
        )
        assert (result != 30).any()


@pytest.mark.parametrize("severity", [1, 2, 3])
def test_water_is_turquoise_and_as_strong_as_the_level_says(severity):
    corrupted = corruptions.corrupt(grey(0, 20), "spatter", severity)
    for result in corrupted:
        # The strongest water of each image: half of (175, 238, 238).
        assert tuple(result.max(axis=(0, 1))) == (87, 119, 119)
        assert 0.001 < (result[..., 0] > 0).mean() < 0.5
    dry = random_images(1)
    water = corruptions.corrupt(dry, "spatter", severity)
    assert (water.astype(int) >= dry.astype(int) - 1).all()
    np.testing.assert_array_equal(
        np.minimum(corrupted[0].astype(int) + dry[0], 255) - water[0] >= -1, True
    )
