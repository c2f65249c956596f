"""One loaded version of a model, whose signatures run on arrays."""

import contextlib
import math
import pathlib
import threading

import numpy as np
import tensorflow as tf

from he_keras.serving.image_size import is_image_input
from he_keras.serving.request_error import RequestError, shown


class Signature:
    """A signature of a SavedModel.

    Attributes:
        inputs: the specification of each input, by name.
        is_batched: whether requests may share a run. Then every input and output has a first
            dimension of any length.
    """

    def __init__(self, function) -> None:
        self._function = function
        self.inputs: dict[str, tf.TensorSpec] = {
            name: tf.TensorSpec(spec.shape, spec.dtype, name)
            for name, spec in function.structured_input_signature[1].items()
        }
        specs = [*self.inputs.values(), *function.structured_outputs.values()]
        self.is_batched = bool(self.inputs) and all(
            spec.shape.rank is not None and spec.shape.rank > 0 and spec.shape[0] is None
            for spec in specs
        )

    def run(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns the outputs for a batch. Types that NumPy does not have become float32."""
        tensors = {
            name: tf.constant(array, self.inputs[name].dtype) for name, array in arrays.items()
        }
        outputs = self._function(**tensors)
        return {name: _native(output).numpy() for name, output in sorted(outputs.items())}

    def num_values(self, max_rows: int) -> int | None:
        """Returns how many JSON values `max_rows` rows have, or None if that is not fixed."""
        total = 0
        for spec in self.inputs.values():
            shape = [None] if spec.shape.rank is None else spec.shape.as_list()
            sizes = [max_rows, *shape[1:]] if shape[:1] == [None] else shape
            is_text = spec.dtype == tf.string and not is_image_input(spec)
            if is_text or spec.shape.rank is None or None in sizes:
                return None
            total += math.prod(sizes) + max_rows
        return total

    def example(self, num_rows: int) -> dict[str, np.ndarray] | None:
        """Returns an input to warm up with.

        Returns None if a shape is not fixed, or if nobody knows what a string means.

        Args:
            num_rows: the length of each first dimension.
        """
        arrays = {}
        for name, spec in self.inputs.items():
            if not self.is_batched or None in spec.shape[1:]:
                return None
            shape = [num_rows, *spec.shape[1:]]
            if is_image_input(spec):
                png = tf.io.encode_png(tf.zeros([8, 8, 3], tf.uint8)).numpy()
                arrays[name] = np.full(shape, png, object)
            elif spec.dtype == tf.string:
                return None
            else:
                arrays[name] = np.zeros(shape, spec.dtype.as_numpy_dtype)
        return arrays


def _native(tensor: tf.Tensor) -> tf.Tensor:
    known = tensor.dtype in (tf.float32, tf.float64, tf.bool, tf.string) or tensor.dtype.is_integer
    return tensor if known else tf.cast(tensor, tf.float32)


class Servable:
    """A version of a model that is in memory.

    Attributes:
        name: the name of the model.
        version: the number of the version.
        signatures: the signatures by name.
        signature_definitions: the signatures as the SavedModel's file describes them, as plain
            data.
    """

    def __init__(self, name: str, version: int, folder: pathlib.Path):
        """Loads a SavedModel.

        Raises:
            ValueError: The SavedModel has no signature.
        """
        self.name, self.version = name, version
        # This keeps the variables alive. The functions of the signatures do not.
        self._loaded = tf.saved_model.load(str(folder))
        self.signatures = {
            key: Signature(function) for key, function in self._loaded.signatures.items()
        }
        if not self.signatures:
            raise ValueError(
                f"Nothing to serve; expected a SavedModel with signatures; received {folder}"
            )
        self.signature_definitions = _read_definitions(folder)
        self._users = 0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def in_use(self):
        """Counts a request, which the unloading of the version waits for."""
        with self._lock:
            self._users += 1
        try:
            yield self
        finally:
            with self._lock:
                self._users -= 1

    @property
    def num_users(self) -> int:
        """How many requests use this version now."""
        return self._users

    def most_values(self, max_rows: int) -> int | None:
        """Returns the most JSON values that a request of `max_rows` rows can have.

        Returns None if a signature sets no limit.
        """
        numbers = [each.num_values(max_rows) for each in self.signatures.values()]
        known = [each for each in numbers if each is not None]
        return max(known) if len(known) == len(numbers) else None

    def signature(self, name: str) -> Signature:
        """Returns a signature that takes inputs.

        Raises:
            RequestError: 400 if there is no such signature.
        """
        signature = self.signatures.get(name)
        if signature is None:
            raise RequestError(
                400, f"Serving signature name: {shown(name)} not found in signature def"
            )
        if not signature.inputs:
            raise RequestError(400, f"Failed to get input map for signature: {shown(name)}")
        return signature

    def warm_up(self, max_batch_size: int) -> None:
        """Runs every signature with the smallest and the largest batch.

        The first run takes longer, and no client should wait for it.

        Raises:
            Exception: Any error of the model.
        """
        for signature in self.signatures.values():
            for num_rows in (1, max_batch_size):
                arrays = signature.example(num_rows)
                if arrays:
                    signature.run(arrays)


def _read_definitions(folder: pathlib.Path) -> dict:
    from google.protobuf import json_format
    from tensorflow.core.protobuf import saved_model_pb2

    content = saved_model_pb2.SavedModel.FromString((folder / "saved_model.pb").read_bytes())
    return {
        name: json_format.MessageToDict(
            definition, always_print_fields_with_no_presence=True, preserving_proto_field_name=True
        )
        for name, definition in sorted(content.meta_graphs[0].signature_def.items())
    }
