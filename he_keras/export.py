"""SavedModel for serving: the logits that were trained and attacked, and their softmax.

Layout `<directory>/<version>/`, as TensorFlow Serving expects it; the folder appears complete or
not at all (Serving polls). Two signatures: `serving_default` takes float images within [0, 1],
`serve_uint8` takes bytes 0..255 and scales them inside the graph. Both return `logits` (scale
included), `probabilities` and `classes`.
"""

import os
import pathlib
import shutil

import keras
import tensorflow as tf


def export_saved_model(model: keras.Model, directory, class_names=None) -> pathlib.Path:
    """Writes a new version of a SavedModel and returns its folder.

    Args:
        model: a built classifier that returns logits.
        directory: the model's folder; versions are numbered 1, 2, ...
        class_names: names of the classes, in order; written to `assets.extra/labels.txt`.
    """
    directory = pathlib.Path(directory)
    version = 1 + max((int(each.name) for each in directory.glob("[0-9]*")), default=0)
    temporary = directory / f".partial-{version}"
    shutil.rmtree(temporary, ignore_errors=True)
    shape = model.network.input_shape if hasattr(model, "network") else model.input_shape
    archive = keras.export.ExportArchive()
    archive.track(model)
    archive.add_endpoint(
        "serve",
        lambda images: _outputs(model(images, training=False)),
        [tf.TensorSpec([None, *shape[1:]], tf.float32, name="images")],
    )
    archive.add_endpoint(
        "serve_uint8",
        lambda images: _outputs(model(tf.cast(images, tf.float32) / 255.0, training=False)),
        [tf.TensorSpec([None, *shape[1:]], tf.uint8, name="images")],
    )
    archive.write_out(str(temporary), verbose=False)
    if class_names:
        extra = temporary / "assets.extra"
        extra.mkdir(exist_ok=True)
        (extra / "labels.txt").write_text("\n".join(map(str, class_names)) + "\n")
    target = directory / str(version)
    os.replace(temporary, target)
    return target


def _outputs(logits) -> dict:
    logits = tf.cast(logits, tf.float32)
    return {
        "logits": logits,
        "probabilities": tf.nn.softmax(logits),
        "classes": tf.argmax(logits, axis=-1),
    }
