"""LiteRT files (formerly TensorFlow Lite) in three precisions.

* float32: the same values as the model's, up to rounding.
* float16: weights are stored in float16, and the computation is in float32.
* int8: weights and activations are 8-bit integers wherever LiteRT has integer kernels. It has them
  for all layers of our networks. The ranges of the integers come from training images. Inputs and
  outputs stay float32, and so do parts of the head's normalisation.

The input is `images`, the outputs are `logits` and `probabilities`. A batch may have any size, if
the input is resized.
"""

import functools
import tempfile
import warnings
from collections.abc import Iterable

import keras
import numpy as np
import tensorflow as tf

from he_keras import cpu
from he_keras.attacks import Victim
from he_keras.export.served_classifier import ServedClassifier

PRECISIONS = ("float32", "float16", "int8")
_SIGNATURE = "serving_default"


def convert_to_litert(
    served: ServedClassifier, precisions: Iterable[str], representative: np.ndarray
) -> dict[str, bytes]:
    """Returns the content of one file for each precision.

    Args:
        served: the model.
        precisions: some of `PRECISIONS`.
        representative: float32 training images, from which "int8" takes its ranges.
    """
    with tempfile.TemporaryDirectory() as folder:
        archive = keras.export.ExportArchive()
        # "int8" needs constant weights, and the converter makes them from a SavedModel only.
        archive.add_endpoint(
            _SIGNATURE,
            lambda images: named_outputs(served, _logits(served, images)),
            [tf.TensorSpec([None, *served.image_shape], tf.float32, name="images")],
        )
        archive.write_out(folder, verbose=False)
        return {each: _convert(folder, each, representative) for each in precisions}


def named_outputs(served: ServedClassifier, logits) -> dict:
    """The outputs of converted models."""
    logits = tf.cast(logits, tf.float32)
    return {"logits": logits, "probabilities": served.probabilities(logits)}


def _logits(served: ServedClassifier, images):
    """The model's logits, in operations that LiteRT has. It has no arccos."""
    head = Victim(served.model).head
    if not served.has_cosines or head.angle != "arc":
        return cpu.plainly(functools.partial(served.model, training=False), images)
    cosines = tf.clip_by_value(served(images)["cosines"], -1.0, 1.0)
    sines = tf.sqrt((1.0 - cosines) * (1.0 + cosines))
    return -head.scale * tf.atan2(sines, cosines)


def _convert(folder: str, precision: str, representative: np.ndarray) -> bytes:
    converter = tf.lite.TFLiteConverter.from_saved_model(folder, signature_keys=[_SIGNATURE])
    if precision != "float32":
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
    if precision == "float16":
        converter.target_spec.supported_types = [tf.float16]
    if precision == "int8":
        converter.representative_dataset = lambda: ([image[None]] for image in representative)
        # The second set is for operations without an integer kernel, such as the angle of a head.
        kinds = tf.lite.OpsSet
        converter.target_spec.supported_ops = [kinds.TFLITE_BUILTINS_INT8, kinds.TFLITE_BUILTINS]
    return converter.convert()


class LiteRTClassifier:
    """The content of a LiteRT file as a function from float32 images to logits.

    Args:
        content: the file's bytes.
    """

    def __init__(self, content: bytes) -> None:
        self._interpreter = _interpreter_class()(model_content=content)
        self._runner = self._interpreter.get_signature_runner(_SIGNATURE)

    def __call__(self, images: np.ndarray) -> np.ndarray:
        """Returns the logits of a batch."""
        return self._runner(images=images)["logits"]


def _interpreter_class():
    """The interpreter of LiteRT's own package if it is installed, otherwise TensorFlow's."""
    try:
        from ai_edge_litert.interpreter import Interpreter
    except ImportError:
        # TensorFlow warns at each use that its interpreter will move to that package.
        warnings.filterwarnings("ignore", message=r"\s*Warning: tf.lite.Interpreter is deprecated")
        return tf.lite.Interpreter
    return Interpreter
