"""The size of an encoded image, read from its header before anything is decoded.

So a decompression bomb is refused before it can fill the memory.
"""

import io
import struct

import numpy as np
import tensorflow as tf

from he_keras.serving.request_error import RequestError

_PNG_START = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR"
_PNG_SIZE = struct.Struct(">II")


def is_image_input(spec: tf.TensorSpec) -> bool:
    """Says whether an input takes encoded images: strings under a name that begins with "image".

    Example:
        >>> is_image_input(tf.TensorSpec([None], tf.string, "images"))
        True
    """
    return spec.dtype == tf.string and spec.name.startswith("image")


def checked_pixels(
    arrays: dict[str, np.ndarray], inputs: dict, max_pixels: int, max_together: int
) -> int:
    """Returns how many pixels all images have, if they are PNG or JPEG files of allowed size.

    Args:
        arrays: the inputs of a request.
        inputs: their specifications by name.
        max_pixels: the most pixels of one image.
        max_together: the most pixels of all images of the request.

    Raises:
        RequestError: 400 if one image is of another kind or too large, 413 if all together are.

    Example:
        >>> inputs = {"images": tf.TensorSpec([None], tf.string, "images")}
        >>> image = tf.io.encode_png(tf.zeros([2, 3, 3], tf.uint8)).numpy()
        >>> checked_pixels({"images": np.array([image, image], object)}, inputs, 6, 12)
        12
    """
    together = 0
    for name, spec in inputs.items():
        if not is_image_input(spec):
            continue
        for index, data in enumerate(arrays[name].ravel()):
            width, height = _size(data, index, name)
            if not 0 < width * height <= max_pixels:
                raise RequestError(
                    400,
                    f"Image {index} of input {name} has {width} x {height} pixels; "
                    f"expected at most {max_pixels}",
                )
            together += width * height
            if together > max_together:
                raise RequestError(
                    413,
                    f"The first {index + 1} images of input {name} have {together} pixels; "
                    f"expected at most {max_together} in one request: send fewer at once",
                )
    return together


def _size(data: bytes, index: int, name: str) -> tuple[int, int]:
    # A PNG has its size at a fixed place. A JPEG has it after segments that Pillow can skip.
    if data.startswith(_PNG_START) and len(data) >= 24:
        return _PNG_SIZE.unpack_from(data, 16)
    from PIL import Image

    try:
        return Image.open(io.BytesIO(data), formats=["JPEG"]).size
    # Pillow's readers fail in many ways on broken headers.
    except Exception as error:
        raise RequestError(
            400, f"Value {index} of input {name} is neither a PNG nor a JPEG image"
        ) from error
