"""Converts JSON values to arrays and back, by the rules of TensorFlow Serving's REST API."""

import base64
import binascii
from itertools import chain

import numpy as np
import tensorflow as tf

from he_keras.serving.request_error import RequestError, shown

_NUMBERS = {int, float}


def is_bytes_object(value) -> bool:
    """Returns whether a JSON value stands for bytes: `{"b64": "..."}`.

    Example:
        >>> is_bytes_object({"b64": "aGk="}), is_bytes_object({"b64": 1})
        (True, False)
    """
    return isinstance(value, dict) and len(value) == 1 and isinstance(value.get("b64"), str)


def to_array(value, spec: tf.TensorSpec) -> np.ndarray:
    """Converts nested lists to an array of the type and shape that a signature expects.

    Args:
        value: a JSON value. Its lists have the same depth everywhere, and the same length at each
            level.
        spec: the input of the signature.

    Raises:
        RequestError: 400 if the lists are ragged, or if the type or the shape is another one.

    Example:
        >>> to_array([[1, 2], [3, 4.5]], tf.TensorSpec([None, 2], tf.float32, "x"))
        array([[1. , 2. ], [3. , 4.5]], dtype=float32)
    """
    leaves, shape = _flatten(value, spec.name)
    if not spec.shape.is_compatible_with(shape):
        raise RequestError(
            400, f"Shape of input {spec.name}: expected {spec.shape}; received {shown(list(shape))}"
        )
    return _convert(leaves, spec).reshape(shape)


def _flatten(value, name: str) -> tuple[list, tuple[int, ...]]:
    """Unpacks one level after another, each by a few calls that loop in C.

    A small image has 3,072 numbers already, so a loop in Python would take too long.
    """
    level, shape = [value], list[int]()
    while level and type(level[0]) is list:
        sizes = set(map(len, level)) if set(map(type, level)) == {list} else set()
        if len(sizes) != 1:
            raise RequestError(400, f"Ragged list at level {len(shape)} of input {name}")
        shape.append(sizes.pop())
        level = list(chain.from_iterable(level))
    return level, tuple(shape)


def _convert(leaves: list, spec: tf.TensorSpec) -> np.ndarray:
    kinds = set(map(type, leaves))
    dtype = spec.dtype
    if dtype == tf.string:
        return _strings(leaves, spec)
    if dtype == tf.bool and kinds <= {bool}:
        return np.array(leaves, bool)
    if dtype.is_integer and kinds <= {int}:
        return _integers(leaves, spec)
    if dtype.is_floating and kinds <= _NUMBERS:
        return _floats(leaves, kinds, spec)
    wrong = next((each for each in leaves if not _is_of(dtype, type(each))), None)
    raise RequestError(
        400, f"JSON value {shown(wrong)} of input {spec.name} is not of expected type: {dtype.name}"
    )


def _is_of(dtype: tf.DType, kind: type) -> bool:
    if dtype.is_floating:
        return kind in _NUMBERS
    return kind is (int if dtype.is_integer else bool)


def _integers(leaves: list, spec: tf.TensorSpec) -> np.ndarray:
    wide = np.uint64 if spec.dtype == tf.uint64 else np.int64
    try:
        array = np.fromiter(leaves, wide, len(leaves))
    except OverflowError:
        array = None
    low, high = spec.dtype.min, spec.dtype.max
    if array is None or (array.size and not low <= array.min() <= array.max() <= high):
        raise RequestError(
            400, f"Integer of input {spec.name} outside the range of {spec.dtype.name}"
        )
    return array.astype(spec.dtype.as_numpy_dtype)


def _floats(leaves: list, kinds: set, spec: tf.TensorSpec) -> np.ndarray:
    """Refuses whole numbers that the type cannot hold and accepts NaN, as TensorFlow Serving."""
    exact = 2**53 if spec.dtype == tf.float64 else 2**24
    try:
        array = np.fromiter(leaves, np.float64, len(leaves))
    except OverflowError as error:
        raise _not_exact(spec) from error
    # One pass without a copy: the extremes tell whether any number has to be looked at.
    largest = max(array.max(initial=0.0), -array.min(initial=0.0))
    lossy = int in kinds and not largest < exact
    if lossy and any(type(each) is int and abs(each) >= exact for each in leaves):
        raise _not_exact(spec)
    if not largest <= spec.dtype.max:
        finite = array[np.isfinite(array)]
        if finite.size and np.abs(finite).max() > spec.dtype.max:
            raise RequestError(400, f"Number of input {spec.name} outside {spec.dtype.name}")
    return array.astype(spec.dtype.as_numpy_dtype)


def _not_exact(spec: tf.TensorSpec) -> RequestError:
    return RequestError(400, f"Whole number of input {spec.name} not exact as {spec.dtype.name}")


def _strings(leaves: list, spec: tf.TensorSpec) -> np.ndarray:
    array = np.empty(len(leaves), object)
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, str):
            # Half of a surrogate pair cannot be encoded.
            array[index] = leaf.encode("utf-8", "replace")
        elif is_bytes_object(leaf):
            array[index] = _decode_base64(leaf["b64"], spec.name)
        else:
            raise RequestError(
                400, f"JSON value {shown(leaf)} of input {spec.name} is neither string nor b64"
            )
    return array


def _decode_base64(text: str, name: str) -> bytes:
    """Decodes as TensorFlow Serving does: the padding at the end may be missing."""
    text = text.rstrip("=")
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(400, f"Unable to base64 decode input {name}") from error


def to_json_values(name: str, array: np.ndarray):
    """Converts an output to an array of numbers or to nested lists, which can be written as JSON.

    Strings become text, or `{"b64": ...}` if the name of the output ends in `_bytes`.

    Example:
        >>> to_json_values("labels", np.array([b"cat", b"dog"], object))
        ['cat', 'dog']
    """
    if array.dtype != object:
        return np.ascontiguousarray(array) if array.ndim else array[()]
    if name.endswith("_bytes"):
        encode = lambda each: {"b64": base64.b64encode(each).decode("ascii")}  # noqa: E731
    else:
        encode = lambda each: each.decode("utf-8", "replace")  # noqa: E731
    values = np.empty(array.shape, object)
    values.ravel()[:] = [encode(each) for each in array.ravel()]
    return values.tolist()
