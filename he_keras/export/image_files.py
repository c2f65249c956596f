"""Decodes PNG and JPEG files in the graph, and brings them to the model's size.

Files are decoded as in training, by `he_keras.data.records`: alpha is dropped, and grey is repeated
if the model takes three channels. There are two ways to the right size:

* "fit": for models that were trained on images of one size, such as CIFAR's. An image of that size
  stays as it is, bit for bit. Of any other image, the largest centre part of the right shape is
  resized.
* "centre-crop": for models that were trained on photographs, such as ImageNet's. As in the pipeline
  of their test images, the shorter side is resized to 256/224 of the crop, and the centre is cut.
"""

import tensorflow as tf

from he_keras.data.augmentation import resize_and_centre_crop
from he_keras.data.records import decode
from he_keras.data.sources import LARGEST_SIDE_IN_MEMORY

RESIZES = ("fit", "centre-crop")
CHANNELS = (1, 3)
# If the shorter side of a picture of one row were resized, the longer one would be huge.
MAX_ASPECT = 100
_MAGIC_NUMBERS = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff")


def usual_resize(image_shape) -> str:
    """Returns how `he_keras.data` treats images of this size: it crops large ones only.

    Example:
        >>> from he_keras.export.image_files import usual_resize
        >>> usual_resize((32, 32, 3)), usual_resize((224, 224, 3))
        ('fit', 'centre-crop')
    """
    sides = [side for side in image_shape[:2] if side is not None]
    return "centre-crop" if max(sides, default=0) > LARGEST_SIDE_IN_MEMORY else "fit"


def can_decode(image_shape) -> bool:
    """Whether files can be decoded to a batch of images of this shape."""
    return len(image_shape) == 3 and None not in image_shape and image_shape[-1] in CHANNELS


def decode_images(files, image_shape, resize: str):
    """Decodes a batch of PNG and JPEG files into uint8 images of one shape.

    Args:
        files: string tensor (batch,).
        image_shape: (height, width, channels), one or three channels.
        resize: "fit" or "centre-crop"; see the module.

    Example:
        >>> import tensorflow as tf
        >>> from he_keras.export.image_files import decode_images
        >>> file = tf.io.encode_png(tf.zeros([20, 10, 3], tf.uint8))
        >>> decode_images(file[None], (8, 8, 3), "fit").shape.as_list()
        [1, 8, 8, 3]
    """
    height, width, channels = image_shape

    def decode_one(file):
        tf.debugging.Assert(_is_png_or_jpeg(file), ["Not an image; expected a PNG or JPEG file"])
        image = decode(file, channels)
        sides = tf.shape(image)[:2]
        tf.debugging.Assert(
            tf.reduce_max(sides) <= MAX_ASPECT * tf.reduce_min(sides),
            [f"Image too long; expected sides of at most 1 to {MAX_ASPECT}; received", sides],
        )
        if resize == "centre-crop":
            return resize_and_centre_crop(image, (height, width))
        return fit(image, (height, width))

    return tf.map_fn(decode_one, files, fn_output_signature=tf.TensorSpec(image_shape, tf.uint8))


def fit(image, size: tuple[int, int]):
    """Cuts the largest centre part of the right shape out of a uint8 image, and resizes it."""
    shape, wanted = tf.shape(image)[:2], tf.constant(size)
    scale = tf.reduce_min(tf.cast(shape, tf.float64) / tf.cast(wanted, tf.float64))
    part = tf.maximum(1, tf.cast(tf.round(tf.cast(wanted, tf.float64) * scale), tf.int32))
    top, left = tf.unstack((shape - part) // 2)
    centre = image[top : top + part[0], left : left + part[1]]
    resized = tf.image.resize(centre, size, method="bilinear", antialias=True)
    return tf.cast(tf.clip_by_value(tf.round(resized), 0.0, 255.0), tf.uint8)


def _is_png_or_jpeg(file):
    starts = [tf.equal(tf.strings.substr(file, 0, len(magic)), magic) for magic in _MAGIC_NUMBERS]
    return tf.reduce_any(tf.stack(starts))
