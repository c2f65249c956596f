"""Size of an encoded image from its header: decompression bombs are refused before decoding."""

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


def check_images(arrays: dict[str, np.ndarray], inputs: dict, max_pixels: int) -> None:
    """Refuses what is no PNG or JPEG, or has more pixels than allowed.

    Args:
        arrays: the inputs of a request.
        inputs: their specifications by name.
        max_pixels: the most pixels of one image.

    Raises:
        RequestError: 400.

    Example:
        >>> inputs = {"images": tf.TensorSpec([None], tf.string, "images")}
        >>> image = tf.io.encode_png(tf.zeros([2, 3, 3], tf.uint8)).numpy()
        >>> check_images({"images": np.array([image], object)}, inputs, max_pixels=6)
    """
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


def _size(data: bytes, index: int, name: str) -> tuple[int, int]:
    # A PNG has its size at a fixed place, a JPEG after segments that Pillow knows to skip.
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
