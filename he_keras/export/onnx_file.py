"""ONNX files, written by tf2onnx. They need `pip install 'he_keras[onnx]'`.

The input is `images` (float32, batches of any size), the outputs are `logits` and `probabilities`.
"""

import functools
import importlib.util
import logging

import numpy as np
import tensorflow as tf

from he_keras import cpu
from he_keras.export.litert import named_outputs
from he_keras.export.served_classifier import ServedClassifier

#: The newest set of operations that tf2onnx 1.17 supports well.
OPSET = 17
_MODULES = ("onnx", "tf2onnx", "onnxruntime")


def check_onnx_is_installed() -> None:
    """Raises a ValueError with the remedy if a library for ONNX is missing."""
    missing = [name for name in _MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            "ONNX files need more libraries; expected pip install 'he_keras[onnx]'; received no "
            f"{', '.join(missing)}"
        )


def convert_to_onnx(served: ServedClassifier) -> bytes:
    """Returns the content of an ONNX file."""
    import tf2onnx

    logging.getLogger("tf2onnx").setLevel(logging.ERROR)
    signature = [tf.TensorSpec([None, *served.image_shape], tf.float32, name="images")]
    function = tf.function(
        lambda images: named_outputs(served, served.model(images, training=False)),
        input_signature=signature,
    )
    convert = functools.partial(tf2onnx.convert.from_function, opset=OPSET)
    model, _ = cpu.plainly(convert, function, signature)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    return model.SerializeToString()


class OnnxClassifier:
    """The content of an ONNX file as a function from float32 images to logits.

    Args:
        content: the file's bytes.
    """

    def __init__(self, content: bytes) -> None:
        import onnxruntime

        self._session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])

    def __call__(self, images: np.ndarray) -> np.ndarray:
        """Returns the logits of a batch."""
        return self._session.run(["logits"], {"images": images})[0]
