"""Classifiers from files, ready to be attacked: run folders, `.keras` files and SavedModels.

A `.keras` file is read in Keras's safe mode: it runs no code of its own. A SavedModel is a program
for TensorFlow, which may read and write files: load those of people you trust.
"""

import functools
import json
import pathlib
import warnings
import zipfile
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from he_keras.arguments import reason_of
from he_keras.files import beside, check_model_exists
from he_keras.threat import UNIT_BOUNDS, ThreatModel

_RUN_MODEL = "model.keras"
_SAVED_MODEL_FILES = ("saved_model.pb", "saved_model.pbtxt")
_DEFAULT_SIGNATURE = "serving_default"
_CALL = "__call__"
_LOGITS = "logits"
_MODEL_CARD = "assets.extra/model_card.json"


def load_classifier(path, signature: str | None = None, output: str | None = None):
    """Loads a classifier that attacks and `evaluate_robustness` accept.

    Args:
        path: a run folder (its `model.keras`), a `.keras` file, or a SavedModel folder. Of numbered
            SavedModels, as `export_saved_model` writes them, the highest number counts.
        signature: SavedModels only: the signature to call. Default: "serving_default", else the
            only signature, else the saved object's `__call__`.
        output: SavedModels only: the output that holds the logits. Default: "logits", else the only
            output.

    Returns:
        The uncompiled `keras.Model`, or a `SavedClassifier`.

    Example:
        >>> from he_keras.model_files import load_classifier
        >>> # model = load_classifier("serving/cifar10")
    """
    path = pathlib.Path(path)
    check_model_exists(path)
    run_model = path / _RUN_MODEL
    folder = None if run_model.is_file() else _saved_model_folder(path)
    if folder is not None:
        return _load_saved_model(folder, signature, output)
    if path.is_dir() and not run_model.is_file():
        raise ValueError(
            f"No model in this folder; expected {_RUN_MODEL} (a finished run) or a SavedModel; "
            f"received {path}"
        )
    for name, value in (("signature", signature), ("output", output)):
        if value is not None:
            raise ValueError(
                f"Only SavedModels have a choice of {name}; expected {name}=None; "
                f"received {name}={value!r} for {path}"
            )
    return load_keras_file(run_model if path.is_dir() else path, compile=False)


def load_keras_file(path, compile: bool = True):
    """Loads a `.keras` file, with one clear error for a missing or unreadable file.

    Args:
        path: the file.
        compile: restore the optimizer and metrics too.
    """
    path = pathlib.Path(path)
    if not path.is_file() or path.suffix != ".keras":
        raise ValueError(
            f"No model; expected an existing .keras file; received {path}{beside(path)}"
        )
    if not zipfile.is_zipfile(path):
        fault = f"damaged, or of another kind: {path.stat().st_size} bytes that are no zip archive"
        raise _unreadable(path, "a .keras file", ValueError(fault))
    try:
        with warnings.catch_warnings():
            if not compile:
                # Some models bring an optimizer all the same, whose state is not wanted.
                warnings.filterwarnings("ignore", "Skipping variable loading for optimizer")
            return keras.saving.load_model(path, compile=compile)
    # The file may be anything, and so may be what goes wrong in reading it.
    except Exception as error:
        raise _unreadable(path, "a .keras file", error) from error


class SavedClassifier:
    """A SavedModel as a callable from images to logits, in inference mode.

    Args:
        loaded: what `tf.saved_model.load` returned; it keeps the variables alive.
        endpoint: the function to call.
        output: the output that holds the logits, None where there is one output without a name.
        threat: what the model was trained against, where its model card says so.
        bounds: of the images that it takes, where its model card says so.
    """

    def __init__(
        self,
        loaded,
        endpoint: "_Endpoint",
        output: str | None,
        threat: ThreatModel | None = None,
        bounds: tuple[float, float] | None = None,
    ) -> None:
        self._loaded = loaded
        self.threat = threat
        self.bounds = bounds
        self._endpoint = endpoint
        self.signature = endpoint.name
        self.output = output

    def __call__(self, images):
        """Returns the logits of a batch of images."""
        expected = self._endpoint.images
        if not expected.shape.is_compatible_with(images.shape):
            raise ValueError(
                f"Images do not fit the SavedModel; expected shape {expected.shape}; "
                f"received shape {tuple(images.shape)}"
            )
        outputs = self._endpoint.function(tf.cast(images, expected.dtype))
        return outputs if self.output is None else outputs[self.output]


class _Endpoint(NamedTuple):
    """A function of a SavedModel: what it takes, and the names of what it returns."""

    name: str
    function: Callable
    images: Any
    outputs: Any


def _saved_model_folder(path: pathlib.Path) -> pathlib.Path | None:
    """The folder of the SavedModel at this path, or that of its newest version."""
    if not path.is_dir():
        return None
    versions = [each for each in path.iterdir() if each.name.isdecimal()]
    newest_first = sorted(versions, key=lambda version: int(version.name), reverse=True)
    for folder in (path, *newest_first):
        if any((folder / name).is_file() for name in _SAVED_MODEL_FILES):
            return folder
    return None


def _load_saved_model(folder: pathlib.Path, signature, output) -> SavedClassifier:
    try:
        loaded = tf.saved_model.load(str(folder))
    except Exception as error:
        raise _unreadable(folder, "a SavedModel", error) from error
    endpoint = _choose_endpoint(loaded, folder, signature)
    _check_images(endpoint, folder)
    output = _choose_output(endpoint, folder, output)
    return SavedClassifier(loaded, endpoint, output, *_trained_with(folder))


def _trained_with(folder: pathlib.Path) -> tuple:
    """The threat model and the bounds that the model card of an export names; None where none."""
    path = folder / _MODEL_CARD
    if not path.is_file():
        return None, None
    try:
        card = json.loads(path.read_text(encoding="utf-8"))
        bounds = tuple(card["model"].get("bounds") or UNIT_BOUNDS)
        threat = card.get("threat")
        return ThreatModel(**{"bounds": bounds, **threat}) if threat else None, bounds
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise _unreadable(path, "the model card of an export", error) from error


def _choose_endpoint(loaded, folder: pathlib.Path, signature: str | None) -> _Endpoint:
    signatures = getattr(loaded, "signatures", {})
    call = _call_endpoint(loaded)
    names = [*sorted(signatures), *([_CALL] if call else [])]
    if signature is None:
        # In addition to a single signature there may be the `__call__` that it was made of.
        likely = [_DEFAULT_SIGNATURE, *(signatures if len(signatures) == 1 else []), _CALL]
        signature = next((name for name in likely if name in names), None)
    if signature is None or signature not in names:
        raise ValueError(
            "The SavedModel does not say which of its functions is the classifier; expected "
            f"load_classifier(path, signature=...) with one of {names}; received {folder} and "
            f"signature={signature!r}"
        )
    if call is not None and signature == _CALL:
        return call
    return _signature_endpoint(signatures[signature], signature, folder)


def _signature_endpoint(signature, name: str, folder: pathlib.Path) -> _Endpoint:
    inputs = signature.structured_input_signature[1]
    if len(inputs) != 1:
        raise ValueError(
            "The SavedModel does not take images alone; expected a signature of one input; "
            f"received {folder} with signature {name!r} of inputs {sorted(inputs)}"
        )
    ((argument, images),) = inputs.items()
    return _Endpoint(
        name,
        lambda batch: signature(**{argument: batch}),
        images,
        signature.structured_outputs,
    )


def _call_endpoint(loaded) -> _Endpoint | None:
    """The saved object's `__call__`, if it takes images and does not have to be in training."""
    function = getattr(loaded, _CALL, None)
    for concrete in getattr(function, "concrete_functions", ()):
        arguments, options = concrete.structured_input_signature
        values = [*arguments, *options.values()]
        tensors = [value for value in values if isinstance(value, tf.TensorSpec)]
        is_training = any(value is True for value in values)
        if len(tensors) == 1 and tensors[0] is arguments[0] and not is_training:
            call = functools.partial(_call_with, loaded, arguments[1:], options)
            return _Endpoint(_CALL, call, tensors[0], concrete.structured_outputs)
    return None


def _call_with(loaded, arguments, options, images):
    return loaded(images, *arguments, **options)


def _check_images(endpoint: _Endpoint, folder: pathlib.Path) -> None:
    """Raises a ValueError unless the function takes floats, and batches of any size."""
    spec = endpoint.images
    received = f"received {folder} whose {endpoint.name!r} takes {spec.dtype.name} {spec.shape}"
    if not spec.dtype.is_floating:
        raise ValueError(
            "The SavedModel does not take floating-point images; expected those, since pixels "
            f"rounded to integers have no gradient (or choose another signature=...); {received}"
        )
    if spec.shape.rank is not None and (spec.shape.rank < 2 or spec.shape[0] is not None):
        raise ValueError(
            "The SavedModel does not take batches of any size; expected a first dimension None; "
            f"{received}"
        )


def _choose_output(endpoint: _Endpoint, folder: pathlib.Path, output: str | None) -> str | None:
    """The name of the output that holds the logits; None for an only output without a name."""
    outputs = endpoint.outputs if isinstance(endpoint.outputs, dict) else {None: endpoint.outputs}
    # Without a name given, "logits" or the only one.
    likely = [output] if output is not None else [_LOGITS, *(outputs if len(outputs) == 1 else ())]
    found = [name for name in likely if name in outputs]
    if not found:
        raise ValueError(
            "The SavedModel does not say which of its outputs holds the logits; expected "
            f"load_classifier(path, output=...) with one of {sorted(outputs, key=str)}; "
            f"received {folder} and output={output!r}"
        )
    logits = outputs[found[0]]
    shape = getattr(logits, "shape", None)
    if shape is None or shape.rank not in (None, 2):
        raise ValueError(
            "The SavedModel does not return logits; expected one tensor of shape (n, classes); "
            f"received {folder} whose {endpoint.name!r} returns {logits}"
        )
    return found[0]


def _unreadable(path: pathlib.Path, expected: str, error: Exception) -> ValueError:
    # Keras wraps the cause, at the end of a message that is longer than any line.
    *_, cause = str(error).split("Exception encountered: ")
    cause = cause.partition("Full object config:")[0]
    remedy = ""
    if "Could not locate" in cause:
        remedy = "; a class of one's own must be imported and registered before (--import=MODULE)"
    return ValueError(
        f"Cannot load the model; expected {expected}; received {path}: "
        f"{reason_of(ValueError(cause))}{remedy}"
    )
