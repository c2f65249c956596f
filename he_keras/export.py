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

    Example:
        >>> import he_keras as he
        >>> # he.export_saved_model(model, "serving/digits", class_names=list("0123456789"))
    """
    image_shape = _image_shape(model)
    if class_names is not None:
        class_names = _checked_names(model, image_shape, class_names)
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    versions = [int(each.name) for each in directory.iterdir() if each.name.isdecimal()]
    version = str(max(versions, default=0) + 1)
    temporary = directory / f".partial-{version}"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        _write(model, image_shape, temporary)
        if class_names:
            extra = temporary / "assets.extra"
            extra.mkdir(exist_ok=True)
            (extra / "labels.txt").write_text("\n".join(class_names) + "\n")
        os.replace(temporary, directory / version)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return directory / version


def _image_shape(model) -> tuple[int | None, ...]:
    if not isinstance(model, keras.Model) or not model.built:
        raise ValueError(
            f"Nothing to export; expected a built keras.Model; received {type(model).__name__}"
        )
    network = getattr(model, "network", model)
    return tuple(network.input_shape[1:])


def _checked_names(model, image_shape, class_names) -> list[str]:
    names = [str(name) for name in class_names]
    images = tf.TensorSpec([None, *image_shape], tf.float32)
    traced = tf.function(lambda images: model(images, training=False))
    num_classes = traced.get_concrete_function(images).structured_outputs.shape[-1]
    if len(names) != num_classes:
        raise ValueError(
            f"Class names do not match the classes; expected {num_classes} names; "
            f"received {len(names)}"
        )
    return names


def _write(model, image_shape, folder: pathlib.Path) -> None:
    archive = keras.export.ExportArchive()
    archive.track(model)
    archive.add_endpoint(
        "serve",
        lambda images: _outputs(model(images, training=False)),
        [tf.TensorSpec([None, *image_shape], tf.float32, name="images")],
    )
    archive.add_endpoint(
        "serve_uint8",
        lambda images: _outputs(model(tf.cast(images, tf.float32) / 255.0, training=False)),
        [tf.TensorSpec([None, *image_shape], tf.uint8, name="images")],
    )
    archive.write_out(str(folder), verbose=False)


def _outputs(logits) -> dict:
    logits = tf.cast(logits, tf.float32)
    return {
        "logits": logits,
        "probabilities": tf.nn.softmax(logits),
        "classes": tf.argmax(logits, axis=-1),
    }
