"""Requests that TensorFlow Serving answers once before it accepts clients.

Its first answer takes seconds, because kernels are chosen and memory is reserved. Serving looks for
a TFRecord file of `tensorflow.serving.PredictionLog` messages. The package `tensorflow-serving-api`
defines them, but every installation would depend on it for six field numbers. So the numbers are
written here, and a test reads the file back.

Definitions: `prediction_log.proto`, `predict.proto` and `model.proto` of TensorFlow Serving.
"""

import functools
import pathlib
from typing import Any

import numpy as np
import tensorflow as tf

#: The name that Serving expects, in the folder `assets.extra`.
FILE_NAME = "tf_serving_warmup_requests"
_PACKAGE = "tensorflow.serving"
_INPUT = "images"
# For each message, its fields as (name, number, type). A TensorProto, which TensorFlow itself
# serialises, is encoded like bytes. A map is encoded like repeated entries.
_MESSAGES: dict[str, tuple[tuple[str, int, str], ...]] = {
    "ModelSpec": (("name", 1, "string"), ("signature_name", 3, "string")),
    "Input": (("key", 1, "string"), ("value", 2, "bytes")),
    "PredictRequest": (("model_spec", 1, "ModelSpec"), ("inputs", 2, "Input")),
    "PredictLog": (("request", 1, "PredictRequest"),),
    "PredictionLog": (("predict_log", 6, "PredictLog"),),
}
_REPEATED = ("inputs",)


def write_warm_up(path: pathlib.Path, model_name: str, requests: dict[str, np.ndarray]) -> None:
    """Writes one request for each signature.

    Args:
        path: the file.
        model_name: the name under which the model is served.
        requests: a batch of images, as numbers or encoded, for each signature.
    """
    with tf.io.TFRecordWriter(str(path)) as writer:
        for signature, images in requests.items():
            writer.write(_prediction_log(model_name, signature, images))


def _prediction_log(model_name: str, signature: str, images: np.ndarray) -> bytes:
    log = _message_classes()["PredictionLog"]()
    request = log.predict_log.request
    request.model_spec.name = model_name
    request.model_spec.signature_name = signature
    request.inputs.add(key=_INPUT, value=tf.make_tensor_proto(images).SerializeToString())
    return log.SerializeToString()


@functools.cache
def _message_classes() -> dict[str, Any]:
    """The messages as classes, from a pool of their own, because Serving's may be loaded too."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(
        name="he_keras/warm_up.proto", package=_PACKAGE, syntax="proto3"
    )
    kinds = descriptor_pb2.FieldDescriptorProto
    scalars = {"string": kinds.TYPE_STRING, "bytes": kinds.TYPE_BYTES}
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, number, kind in fields:
            many = field in _REPEATED
            described = message.field.add(
                name=field,
                number=number,
                type=scalars.get(kind, kinds.TYPE_MESSAGE),
                label=kinds.LABEL_REPEATED if many else kinds.LABEL_OPTIONAL,
            )
            if kind not in scalars:
                described.type_name = f".{_PACKAGE}.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in _MESSAGES
    }
