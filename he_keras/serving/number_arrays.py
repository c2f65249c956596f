"""Arrays of numbers straight from the text of a request, without a Python object for each number.

An image in JSON is thousands of numbers. To make Python lists of them takes several times as long
as to run the model. Here a parser in C++ fills an array, and a second pass over the text, also in
C, checks that the brackets form that array. Unusual requests and mistakes are left to the general
parser, which also writes the error messages.
"""

import functools
import math
from typing import Any

import numpy as np
import tensorflow as tf

# The characters of numbers and of the space between them.
_NUMBER_CHARACTERS = b"0123456789+-.eE \t\r\n"


def parse_plain_numbers(body: bytes, inputs_of):
    """Parses a request for a signature with one input of numbers, in a known shape.

    Args:
        body: JSON.
        inputs_of: a function from the name of a signature, or "", to its inputs.

    Returns:
        The name of the signature, the input as an array and whether it came in rows. None if the
        request is not of that kind or has any mistake.

    Example:
        >>> inputs = {"x": tf.TensorSpec([None, 2], tf.float32, "x")}
        >>> parse_plain_numbers(b'{"inputs": [[1, 2], [3, 4.5]]}', lambda name: inputs)[1]["x"]
        array([[1. , 2. ],
               [3. , 4.5]], dtype=float32)
        >>> parse_plain_numbers(b'{"inputs": [[1, 2, 3], [4]]}', lambda name: inputs)
    """
    import simdjson

    try:
        document: Any = simdjson.Parser().parse(body)
        keys = set(document) if isinstance(document, simdjson.Object) else set()
        key = "instances" if "instances" in keys else "inputs"
        signature_name = document["signature_name"] if "signature_name" in keys else ""
        if len(keys & {"instances", "inputs"}) != 1 or not isinstance(signature_name, str):
            return None
        ((name, spec),) = inputs_of(signature_name).items()
        array = _filled(document[key], spec, body)
    # The client's mistakes raise many kinds of errors. The general parser says what is wrong.
    except Exception:
        return None
    return None if array is None else (signature_name, {name: array}, key == "instances")


def _filled(values, spec: tf.TensorSpec, body: bytes) -> np.ndarray | None:
    shape = spec.shape.as_list()
    if shape[0] is not None or None in shape[1:]:
        return None
    if spec.dtype.is_floating:
        array = np.frombuffer(values.as_buffer(of_type="d"), np.float64)
        # The type may not hold larger whole numbers exactly, and here they look like decimals.
        limits = (1 - 2.0**24, 2.0**24 - 1)
    elif spec.dtype.is_integer and spec.dtype != tf.uint64:
        array = np.frombuffer(values.as_buffer(of_type="i"), np.int64)
        limits = (spec.dtype.min, spec.dtype.max)
    else:
        return None
    row = math.prod(shape[1:])
    if not array.size or array.size % row or not _is_within(array, limits):
        return None
    num_rows = array.size // row
    expected = b"[" + b",".join([_brackets(tuple(shape[1:]))] * num_rows) + b"]"
    brackets = body.translate(None, _NUMBER_CHARACTERS)
    # The count tells the array from the same array inside further brackets.
    if expected not in brackets or brackets.count(b"[") != expected.count(b"["):
        return None
    return array.reshape(num_rows, *shape[1:]).astype(spec.dtype.as_numpy_dtype)


def _is_within(array: np.ndarray, limits) -> bool:
    return bool(limits[0] <= array.min() and array.max() <= limits[1])


@functools.lru_cache(maxsize=32)
def _brackets(shape: tuple[int, ...]) -> bytes:
    """Returns what is left of an array in JSON without its numbers, such as b"[[,],[,]]"."""
    text = b""
    for size in reversed(shape):
        text = b"[" + b",".join([text] * size) + b"]"
    return text
