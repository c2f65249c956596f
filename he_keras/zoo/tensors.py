"""Tensors as PyTorch stores them: views of a flat storage, with offset, shape and strides."""

import math
from typing import NamedTuple

import numpy as np

from he_keras.zoo.restricted_pickle import UnsafePickleError

#: NumPy's type of each kind of storage. NumPy has no bfloat16, so its bits are read.
STORAGE_DTYPES: dict[str, np.dtype] = {
    "DoubleStorage": np.dtype("<f8"),
    "FloatStorage": np.dtype("<f4"),
    "HalfStorage": np.dtype("<f2"),
    "BFloat16Storage": np.dtype("<u2"),
    "LongStorage": np.dtype("<i8"),
    "IntStorage": np.dtype("<i4"),
    "ShortStorage": np.dtype("<i2"),
    "CharStorage": np.dtype("i1"),
    "ByteStorage": np.dtype("u1"),
    "BoolStorage": np.dtype("?"),
}
_MAX_RANK = 8


class Storage(NamedTuple):
    """A flat array in another part of the file.

    Attributes:
        key: its name in the file.
        kind: a key of `STORAGE_DTYPES`.
        size: the number of its elements.
    """

    key: str
    kind: str
    size: int

    @property
    def num_bytes(self) -> int:
        """The length of the storage in the file."""
        return self.size * STORAGE_DTYPES[self.kind].itemsize


class StoredTensor(NamedTuple):
    """A tensor whose numbers have not been read yet."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def read(self, flat: np.ndarray) -> np.ndarray:
        """Returns the tensor as a view of the numbers of its storage."""
        return np.lib.stride_tricks.as_strided(
            flat[self.offset :],
            self.shape,
            [stride * flat.itemsize for stride in self.strides],
            writeable=False,
        )


def numbers(source: Storage, content: bytes | memoryview) -> np.ndarray:
    """Returns the numbers of a storage as a view of its bytes; bfloat16 becomes a float32 copy.

    The copy is made once for a storage, however many tensors are views of it.
    """
    if len(content) != source.num_bytes:
        raise UnsafePickleError("a storage of another size than its tensors say")
    flat = np.frombuffer(content, STORAGE_DTYPES[source.kind])
    if source.kind == "BFloat16Storage":
        bits = flat.astype("<u4")
        bits <<= 16
        return bits.view("<f4")
    return flat


def storage(marker, kind, key, _location, size, view=None) -> Storage:
    """Returns the storage that a persistent id names, or refuses the id."""
    if marker != "storage" or not isinstance(kind, StorageKind) or not isinstance(key, str):
        raise UnsafePickleError("a persistent id that is no storage")
    if view is not None:
        raise UnsafePickleError("a view of a storage as a storage")
    if not _is_count(size):
        raise UnsafePickleError(f"a storage of {size!r:.20} elements")
    return Storage(key, kind.name, size)


class StorageKind(NamedTuple):
    """The class of a storage, which a pickle names but never calls."""

    name: str


def stored_tensor(source, offset, shape, strides, *_) -> StoredTensor:
    """Returns a tensor from the arguments of `_rebuild_tensor_v2`, if its storage contains it."""
    if not isinstance(source, Storage) or not _is_count(offset):
        raise UnsafePickleError("a tensor without a storage")
    sizes = tuple(shape), tuple(strides)
    if len(sizes[0]) != len(sizes[1]) or len(sizes[0]) > _MAX_RANK:
        raise UnsafePickleError("a tensor whose strides do not fit its shape")
    if not all(_is_count(each) for each in (*sizes[0], *sizes[1])):
        raise UnsafePickleError("a tensor of no possible shape")
    count = math.prod(sizes[0])
    last = sum((length - 1) * stride for length, stride in zip(*sizes, strict=True))
    if count > source.size or (count and offset + last >= source.size):
        raise UnsafePickleError("a tensor larger than its storage")
    return StoredTensor(source, offset, *sizes)


def _is_count(value) -> bool:
    return type(value) is int and 0 <= value < 2**48
