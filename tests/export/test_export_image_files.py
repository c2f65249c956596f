"""Decoding in the graph: channels and sizes as in training, and nothing but PNG and JPEG."""

import numpy as np
import pytest
import tensorflow as tf

from he_keras.data.augmentation import resize_and_centre_crop
from he_keras.export.image_files import can_decode, decode_images, fit, usual_resize


def image(height, width, channels=3, seed=0):
    values = np.random.RandomState(seed).randint(0, 256, (height, width, channels))
    return values.astype(np.uint8)


def files(*images):
    return tf.constant([tf.io.encode_png(each).numpy() for each in images])


def decoded(encoded, shape, resize="fit"):
    return decode_images(encoded, shape, resize).numpy()


def test_images_of_the_right_size_stay_as_they_are():
    images = [image(8, 8, seed=seed) for seed in range(3)]
    np.testing.assert_array_equal(decoded(files(*images), (8, 8, 3)), images)


def test_jpeg_is_decoded_as_in_training():
    from he_keras.data.records import decode

    encoded = tf.io.encode_jpeg(image(8, 8))
    expected = decode(encoded, 3)
    np.testing.assert_array_equal(decoded(encoded[None], (8, 8, 3))[0], expected)


def test_batch_of_several_sizes():
    encoded = files(image(8, 8), image(20, 9), image(5, 31))
    assert decoded(encoded, (8, 8, 3)).shape == (3, 8, 8, 3)


def test_channels():
    grey, colour, alpha = image(8, 8, 1), image(8, 8, 3), image(8, 8, 4)
    as_colour = decoded(files(grey, alpha), (8, 8, 3))
    np.testing.assert_array_equal(as_colour[0], np.repeat(grey, 3, axis=2))
    np.testing.assert_array_equal(as_colour[1], alpha[..., :3])
    np.testing.assert_array_equal(decoded(files(grey), (8, 8, 1))[0], grey)
    assert decoded(files(colour), (8, 8, 1)).shape == (1, 8, 8, 1)


@pytest.mark.parametrize(
    ("height", "width", "rows", "columns"),
    [
        (16, 32, slice(0, 16), slice(8, 24)),
        (32, 16, slice(8, 24), slice(0, 16)),
        (16, 16, slice(0, 16), slice(0, 16)),
    ],
)
def test_fit_halves_the_largest_centre_square(height, width, rows, columns):
    picture = image(height, width)
    centre = tf.constant(picture[rows, columns])
    expected = tf.image.resize(centre, (8, 8), antialias=True).numpy()
    np.testing.assert_allclose(fit(tf.constant(picture), (8, 8)), expected, atol=0.5)


def test_fit_keeps_the_wanted_shape():
    """4:1 out of a square: a strip across the middle."""
    picture = np.zeros((40, 40, 1), np.uint8)
    picture[15:25] = 200
    np.testing.assert_array_equal(fit(tf.constant(picture), (2, 8)).numpy(), 200)


def test_fit_of_a_single_row():
    assert fit(tf.constant(image(1, 90)), (8, 8)).shape == (8, 8, 3)


def test_centre_crop_is_the_pipeline_of_test_images():
    picture = image(60, 90)
    expected = resize_and_centre_crop(tf.constant(picture), (16, 16))
    got = decoded(files(picture), (16, 16, 3), "centre-crop")[0]
    np.testing.assert_array_equal(got, expected)
    # The crop leaves a margin out, also of an image that has the right size already.
    same = image(16, 16)
    assert (decoded(files(same), (16, 16, 3), "centre-crop")[0] != same).any()


@pytest.mark.parametrize(
    "content",
    [b"", b"\x89PNG", b"hello", tf.io.encode_png(image(8, 8)).numpy()[:60], b"\xff\xd8\xff\xe0"],
    ids=["empty", "begins", "text", "truncated-png", "truncated-jpeg"],
)
def test_what_is_no_image_is_refused(content):
    with pytest.raises(tf.errors.InvalidArgumentError):
        decode_images(tf.constant([content]), (8, 8, 3), "fit")


def test_other_formats_are_refused():
    # TensorFlow's decoder would take a GIF.
    gif = b"GIF89a\x01\x00\x01\x00\x80\x00\x00\x00\x00\x00\xff\xff\xff!\xf9\x04\x00\x00\x00\x00\x00"
    gif += b",\x00\x00\x00\x00\x01\x00\x01\x00\x00\x02\x02D\x01\x00;"
    assert tf.io.decode_image(gif, expand_animations=False).shape == (1, 1, 3)
    with pytest.raises(tf.errors.InvalidArgumentError, match="expected a PNG or JPEG"):
        decode_images(tf.constant([gif]), (8, 8, 3), "fit")


@pytest.mark.parametrize("resize", ["fit", "centre-crop"])
def test_strips_are_refused(resize):
    with pytest.raises(tf.errors.InvalidArgumentError, match="Image too long.*1 to 100"):
        decode_images(files(image(1, 101)), (8, 8, 3), resize)


@pytest.mark.parametrize(
    ("shape", "answer"),
    [
        ((8, 8, 3), True),
        ((8, 8, 1), True),
        ((8, 8, 4), False),
        ((None, None, 3), False),
        ((4,), False),
    ],
)
def test_which_models_take_files(shape, answer):
    assert can_decode(shape) is answer


def test_usual_resize_follows_the_data():
    assert usual_resize((64, 64, 3)) == "fit"
    assert usual_resize((64, 65, 3)) == usual_resize((224, 224, 3)) == "centre-crop"
    assert usual_resize((None, None, 3)) == "fit"
