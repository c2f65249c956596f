"""Stand-ins for the objects that NumPy and Haiku pickle: plain arrays, checked before use."""

import io
import math
import re
from typing import Any

import numpy as np

from he_keras.zoo.restricted_pickle import Constructor, UnsafePickleError, read_pickle

#: NumPy's own reader evaluates the header as Python. Checkpoints have only this one form.
_OBJECT_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00.."
    rb"\{'descr': '\|O', 'fortran_order': (?:True|False), 'shape': \([0-9]+,\), \} *\n",
    re.DOTALL,
)
_KINDS = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1")


class PickledDtype:
    """The type of an array's elements; `O8` stands for Python objects."""

    def __init__(self, code: str, *_) -> None:
        if code not in (*_KINDS, "O8"):
            raise UnsafePickleError(f"an array of {code!r:.20}")
        self.code = code
        self._order: Any = "<"

    def set_state(self, state) -> None:
        """Sets the byte order. Types with fields or metadata are refused."""
        if state[1] not in ("<", ">", "|", "=") or any(state[2:5]):
            raise UnsafePickleError("an array type with fields")
        self._order = state[1]

    def numpy(self) -> np.dtype:
        """Returns NumPy's type."""
        return np.dtype(self.code).newbyteorder(self._order)


class PickledArray:
    """An array whose content is the state of a pickled object."""

    def __init__(self, *_) -> None:
        self.value: Any = None

    def set_state(self, state) -> None:
        """Sets the content of the array, which must have as many bytes as the array."""
        _, shape, dtype, is_fortran, content = state
        if not isinstance(dtype, PickledDtype):
            raise UnsafePickleError("an array without a type")
        if dtype.code == "O8":
            if type(content) is not list or len(content) != math.prod(shape):
                raise UnsafePickleError("an array of objects of another size")
            self.value = content
            return
        flat = np.frombuffer(content, dtype.numpy())
        if len(flat) != math.prod(shape):
            raise UnsafePickleError("an array of another size than its content")
        self.value = flat.reshape(shape, order="F" if is_fortran else "C")


def _scalar(dtype: PickledDtype, content: bytes):
    value = np.frombuffer(content, dtype.numpy())
    if len(value) != 1:
        raise UnsafePickleError("a number of another size than its content")
    return value[0].item()


def _mapping(content: dict) -> dict:
    if type(content) is not dict:
        raise UnsafePickleError("a mapping that is no dictionary")
    return content


def _never(*_) -> None:
    raise UnsafePickleError("a class where a value belongs")


NUMPY_CONSTRUCTORS: dict[str, Constructor] = {
    "numpy ndarray": _never,
    "numpy dtype": PickledDtype,
    "haiku._src.data_structures FlatMapping": _mapping,
    "haiku._src.data_structures FlatMap": _mapping,
}
# NumPy 2 renamed its core module.
for _core in ("numpy.core.multiarray", "numpy._core.multiarray"):
    NUMPY_CONSTRUCTORS[f"{_core} _reconstruct"] = PickledArray
    NUMPY_CONSTRUCTORS[f"{_core} scalar"] = _scalar


def read_object_array(content: bytes) -> list:
    """Reads an .npy file that holds Python objects, as JAX code saves its parameters."""
    match = _OBJECT_HEADER.match(content)
    if match is None:
        raise UnsafePickleError("no .npy file of Python objects")
    stream = io.BytesIO(content)
    stream.seek(match.end())
    array = read_pickle(stream, NUMPY_CONSTRUCTORS)
    if not isinstance(array, PickledArray) or type(array.value) is not list:
        raise UnsafePickleError("no array of objects")
    return array.value
