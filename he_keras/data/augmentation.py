"""Image augmentation as pure functions, whose random numbers come from stateless seeds.

* Crop and flip (CIFAR): 4 pixels of zeros are added on each side. The original size is cut out at a
  random place. The image is mirrored with probability 1/2. It works on whole uint8 batches.
* Random resized crop (ImageNet), as torchvision defines it: up to ten boxes are drawn. Each has an
  area of 0.08 to 1 of the image's and a log-uniform aspect ratio in [3/4, 4/3]. The first box that
  fits is cut out; if none fits, the largest centre crop within those ratios. It is resized
  bilinearly with antialiasing.
* Test images (ImageNet): the shorter side is resized to 256, and the centre of 224x224 is cut out.

Deviation: for PIL images, torchvision rounds to uint8 after each of the two passes of a resize.
TensorFlow rounds after both, which differs by a grey level or two.
"""

from __future__ import annotations

import tensorflow as tf

from he_keras.data import randomness

AUGMENTATIONS = ("none", "flip", "crop-flip", "resized-crop-flip")
#: The usual ones: CIFAR's crop, and ImageNet's crop of a random area and shape.
CROP_PADDING = 4

AREA_RANGE = (0.08, 1.0)
RATIO_RANGE = (3.0 / 4.0, 4.0 / 3.0)
MAX_TRIES = 10

# The shorter side of a test image relative to the crop: 256 for 224.
TEST_RESIZE = 256.0 / 224.0


def to_unit_float(images: tf.Tensor) -> tf.Tensor:
    """Returns float32 images in [0, 1]. It divides uint8 by 255 and keeps floating values."""
    if images.dtype == tf.uint8:
        return tf.cast(images, tf.float32) / 255.0
    return tf.cast(images, tf.float32)


def draw_crop_flip(
    num_examples: int, seed: tf.Tensor, padding: int = CROP_PADDING
) -> tuple[tf.Tensor, tf.Tensor]:
    """Draws one crop and one flip for each example of an epoch.

    Args:
        num_examples: Number of examples.
        seed: Stateless seed of shape (2,).
        padding: Pixels of padding on each side; 0 for no crop.

    Returns:
        (offsets, flips): int32 of shape (num_examples, 2), rows and columns in 0..2*padding, and
        bool of shape (num_examples,).
    """
    offsets = tf.random.stateless_uniform(
        (num_examples, 2),
        randomness.fold_in(seed, 0),
        minval=0,
        maxval=2 * padding + 1,
        dtype=tf.int32,
        alg=randomness.ALGORITHM,
    )
    flips = tf.random.stateless_uniform(
        (num_examples,), randomness.fold_in(seed, 1), alg=randomness.ALGORITHM
    )
    return offsets, flips < 0.5


def crop_flip(
    images: tf.Tensor, offsets: tf.Tensor, flips: tf.Tensor, padding: int = CROP_PADDING
) -> tf.Tensor:
    """Pads a batch with zeros, crops each image at its offset and mirrors those that flip.

    Args:
        images: (batch, height, width, channels) of any dtype.
        offsets: int32 (batch, 2), row and column of the crop in the padded image.
        flips: bool (batch,).
        padding: Pixels of zeros on each side.

    Returns:
        Images of the same shape and dtype.
    """
    height, width, channels = images.shape[1:]
    padded_height, padded_width = height + 2 * padding, width + 2 * padding
    padded = tf.pad(images, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    rows = offsets[:, :1] + tf.range(height)
    columns = tf.where(flips[:, None], tf.range(width - 1, -1, -1), tf.range(width))
    columns += offsets[:, 1:]
    first_pixels = tf.range(tf.shape(images)[0]) * (padded_height * padded_width)
    # One gather of whole pixels is faster than one of rows followed by one of columns.
    pixels = first_pixels[:, None, None] + rows[:, :, None] * padded_width + columns[:, None, :]
    return tf.gather(tf.reshape(padded, (-1, channels)), pixels)


def resized_crop_box(
    height: tf.Tensor, width: tf.Tensor, seed: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
    """Draws torchvision's random-resized-crop box for one image.

    Args:
        height: Scalar int32 tensor.
        width: Scalar int32 tensor.
        seed: Stateless seed of shape (2,).

    Returns:
        int32 scalars (top, left, box_height, box_width).
    """
    full_height, full_width = tf.cast(height, tf.float32), tf.cast(width, tf.float32)
    draws = tf.random.stateless_uniform(
        (2, MAX_TRIES), randomness.fold_in(seed, 0), alg=randomness.ALGORITHM
    )
    least, most = AREA_RANGE
    areas = full_height * full_width * (least + (most - least) * draws[0])
    narrow, wide = tf.math.log(RATIO_RANGE[0]), tf.math.log(RATIO_RANGE[1])
    ratios = tf.exp(narrow + (wide - narrow) * draws[1])
    widths, heights = tf.round(tf.sqrt(areas * ratios)), tf.round(tf.sqrt(areas / ratios))
    fits = (widths > 0) & (heights > 0) & (widths <= full_width) & (heights <= full_height)
    first = tf.argmax(tf.cast(fits, tf.int32))

    fallback_width = tf.minimum(full_width, tf.round(full_height * RATIO_RANGE[1]))
    fallback_height = tf.minimum(full_height, tf.round(full_width / RATIO_RANGE[0]))
    found = tf.reduce_any(fits)
    box_height = tf.cast(tf.where(found, heights[first], fallback_height), tf.int32)
    box_width = tf.cast(tf.where(found, widths[first], fallback_width), tf.int32)

    place = tf.random.stateless_uniform((2,), randomness.fold_in(seed, 1), alg=randomness.ALGORITHM)
    room = tf.stack((height - box_height, width - box_width))
    # Float32 rounding can carry place * (room + 1) up to room + 1 itself.
    drawn = tf.minimum(room, tf.cast(place * tf.cast(room + 1, tf.float32), tf.int32))
    top, left = tf.unstack(tf.where(found, drawn, room // 2))
    return top, left, box_height, box_width


def random_resized_crop_flip(image: tf.Tensor, size: tuple[int, int], seed: tf.Tensor) -> tf.Tensor:
    """Cuts a random box out of one image, resizes it, and mirrors it with probability 1/2.

    Args:
        image: (height, width, channels), uint8 or float32, of any size.
        size: (height, width) of the result.
        seed: Stateless seed of shape (2,).

    Returns:
        An image of the wanted size and the same dtype.
    """
    shape = tf.shape(image)
    top, left, box_height, box_width = resized_crop_box(
        shape[0], shape[1], randomness.fold_in(seed, 0)
    )
    box = image[top : top + box_height, left : left + box_width]
    return random_flip(_resize(box, size), randomness.fold_in(seed, 1))


def random_flip(image: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Mirrors one image left to right with probability 1/2."""
    draw = tf.random.stateless_uniform((), seed, alg=randomness.ALGORITHM)
    return tf.where(draw < 0.5, tf.reverse(image, (1,)), image)


def resize_and_centre_crop(image: tf.Tensor, size: tuple[int, int]) -> tf.Tensor:
    """Resizes the shorter side to 256/224 of the crop's, then cuts out the centre.

    Args:
        image: (height, width, channels), uint8 or float32, of any size.
        size: (height, width) of the result, (224, 224) for ImageNet.

    Returns:
        An image of the wanted size and the same dtype.
    """
    height, width = tf.shape(image)[0], tf.shape(image)[1]
    shorter = tf.minimum(height, width)
    target = round(max(size) * TEST_RESIZE)
    # The longer side is truncated, as torchvision does.
    resized = _resize(image, (target * height // shorter, target * width // shorter))
    room = tf.cast(tf.shape(resized)[:2] - tf.constant(size), tf.float32)
    top, left = tf.unstack(tf.cast(tf.round(room / 2.0), tf.int32))
    crop = resized[top : top + size[0], left : left + size[1]]
    crop.set_shape((*size, image.shape[-1]))
    return crop


def _resize(image: tf.Tensor, size: tuple[int | tf.Tensor, int | tf.Tensor]) -> tf.Tensor:
    """Resizes bilinearly with antialiasing and keeps the dtype. uint8 is rounded."""
    resized = tf.image.resize(image, size, method="bilinear", antialias=True)
    if image.dtype == tf.uint8:
        resized = tf.cast(tf.clip_by_value(tf.round(resized), 0.0, 255.0), tf.uint8)
    return resized
