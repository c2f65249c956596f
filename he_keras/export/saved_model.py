"""A SavedModel for serving: it returns the logits that were trained and attacked, and more.

It is written to `<directory>/<version>/`, as TensorFlow Serving expects. The signature
`serving_default` takes float images within the model's bounds, `serve_uint8` takes bytes 0..255,
and `serve_bytes` takes PNG or JPEG files. All return `logits` (scale included), `probabilities`,
`classes`, and `scores` and `labels`, which are the classes in descending order of probability. With
a `CosineHead` they also return `cosines`. `docs/reference/exported_model.md` says more.
"""

import pathlib

import keras
import numpy as np
import tensorflow as tf

from he_keras.arguments import check_choice
from he_keras.export.calibration import Calibration
from he_keras.export.card_page import card_page
from he_keras.export.conversions import ConversionPlan, convert_and_score
from he_keras.export.image_files import RESIZES, can_decode, decode_images, usual_resize
from he_keras.export.model_card import Provenance, model_card
from he_keras.export.served_classifier import ServedClassifier
from he_keras.export.version_folders import write_version
from he_keras.export.warm_up import FILE_NAME, write_warm_up
from he_keras.files import write_json
from he_keras.threat import UNIT_BOUNDS, from_unit

_EXTRA = "assets.extra"
_FLOAT, _UINT8, _BYTES = "serving_default", "serve_uint8", "serve_bytes"
_MIDDLE_GREY = 128
_RESIZING = {
    "fit": "an image of the model's size stays as it is; of any other image, the largest centre "
    "part of the same shape is resized, bilinearly with antialiasing",
    "centre-crop": "as test images in training: the shorter side is resized to 256/224 of the "
    "model's size, bilinearly with antialiasing, and the centre is cut out",
}


def export_saved_model(
    model: keras.Model,
    directory,
    class_names=None,
    *,
    resize: str | None = None,
    top_k: int | None = None,
    calibration: Calibration | None = None,
    conversions: ConversionPlan | None = None,
    provenance: Provenance | None = None,
    bounds: tuple[float, float] | None = None,
) -> pathlib.Path:
    """Writes a new version of a SavedModel, completely or not at all, and returns its folder.

    Args:
        model: a built classifier that returns logits.
        directory: the model's folder; versions are numbered 1, 2, ...
        class_names: names of the classes, in order; default: their numbers.
        resize: how `serve_bytes` brings images to the model's size: "fit" (training images of one
            size) or "centre-crop" (photographs); default: as `he_keras.data` does at this size.
        top_k: how many classes `scores` and `labels` hold; default: all.
        calibration: what `he_keras.export.calibrate` returned, for the probabilities.
        conversions: which other formats to add; each is scored, as is the original.
        provenance: what the model card says about data, settings and evaluation.
        bounds: the bounds of the model's images; default: those of its training, otherwise [0, 1].

    Example:
        >>> import he_keras as he
        >>> # he.export_saved_model(model, "serving/digits", class_names=list("0123456789"))
    """
    temperature = 1.0 if calibration is None else calibration.temperature
    served = ServedClassifier(model, class_names, temperature, top_k, bounds)
    resize = usual_resize(served.image_shape) if resize is None else resize
    check_choice("resize", resize, RESIZES)
    provenance = provenance or Provenance()
    name = pathlib.Path(directory).resolve().name

    def write(folder: pathlib.Path) -> None:
        signatures = _write(served, resize, folder)
        extra = folder / _EXTRA
        extra.mkdir()
        _write_text(extra / "labels.txt", "\n".join(served.class_names) + "\n")
        write_warm_up(extra / FILE_NAME, name, _warm_up_requests(served, signatures))
        made = convert_and_score(served, conversions, extra) if conversions else None
        steps = _preprocessing(signatures, resize, served.bounds)
        card = model_card(served, name, signatures, steps, provenance, calibration, made)
        write_json(extra / "model_card.json", card)
        _write_text(extra / "model_card.md", card_page(card))

    return write_version(directory, write)


def _write_text(path: pathlib.Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _write(served: ServedClassifier, resize: str, folder: pathlib.Path) -> dict:
    """Writes the SavedModel; returns inputs and outputs of its signatures, as plain data."""
    # The archive finds the variables of its endpoints. If it tracked the model, it would write
    # them twice.
    archive = keras.export.ExportArchive()
    shape = [None, *served.image_shape]
    archive.add_endpoint(_FLOAT, served, [tf.TensorSpec(shape, tf.float32, name="images")])
    archive.add_endpoint(
        _UINT8,
        served.of_bytes,
        [tf.TensorSpec(shape, tf.uint8, name="images")],
    )
    described = {_FLOAT: ("float32", shape), _UINT8: ("uint8", shape)}
    if can_decode(served.image_shape):
        archive.add_endpoint(
            _BYTES,
            lambda files: served.of_bytes(decode_images(files, served.image_shape, resize)),
            [tf.TensorSpec([None], tf.string, name="images")],
        )
        described[_BYTES] = ("string", [None])
    archive.write_out(str(folder), verbose=False)
    outputs = ["logits", "probabilities", "classes", "scores", "labels"]
    outputs += ["cosines"] if served.has_cosines else []
    return {
        name: {"input": {"name": "images", "dtype": dtype, "shape": shape}, "outputs": outputs}
        for name, (dtype, shape) in described.items()
    }


def _warm_up_requests(served: ServedClassifier, signatures: dict) -> dict[str, np.ndarray]:
    """One grey image for each signature: time and memory do not depend on what it shows."""
    sides = [side or 32 for side in served.image_shape]
    grey = np.full((1, *sides), _MIDDLE_GREY, np.uint8)
    floats = from_unit(grey.astype(np.float32) / np.float32(255.0), served.bounds)
    requests = {_FLOAT: floats, _UINT8: grey}
    if _BYTES in signatures:
        requests[_BYTES] = np.array([tf.io.encode_png(grey[0]).numpy()], object)
    return requests


def _preprocessing(signatures: dict, resize: str, bounds) -> dict[str, str]:
    low, high = bounds
    scaling = "divided by 255" if bounds == UNIT_BOUNDS else f"brought to {low:g} to {high:g}"
    steps = {
        _FLOAT: f"values in [{low:g}, {high:g}]; any normalisation is inside the model",
        _UINT8: f"values 0..255, {scaling}",
        _BYTES: f"PNG or JPEG; {_RESIZING[resize]}; then as {_UINT8}",
    }
    if _BYTES not in signatures:
        steps[_BYTES] = (
            "not offered: the model does not take images of one size with one or three channels"
        )
    return steps
