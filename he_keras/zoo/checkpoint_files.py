"""Reads checkpoint files of PyTorch, safetensors and JAX, without these libraries.

Nothing in a file is ever run, see `restricted_pickle`. A file is refused with one sentence if it is
damaged or asks for more than tensors and plain values. So is one that states sizes that it does not
have. Reading needs at most three times the memory of the file's size.
"""

import io
import json
import pathlib
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from he_keras.zoo import tensors
from he_keras.zoo.numpy_pickle import NUMPY_CONSTRUCTORS, PickledArray, read_object_array
from he_keras.zoo.restricted_pickle import UnsafePickleError, read_pickle
from he_keras.zoo.tensors import Storage, StoredTensor

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001
#: The largest published network has about 700 tensors.
_MAX_MEMBERS = 20_000
_MAX_DEPTH = 16
_SAFETENSORS_KINDS = {
    **{"F64": "DoubleStorage", "F32": "FloatStorage", "F16": "HalfStorage"},
    **{"BF16": "BFloat16Storage", "I64": "LongStorage", "I32": "IntStorage"},
    **{"I16": "ShortStorage", "I8": "CharStorage", "U8": "ByteStorage", "BOOL": "BoolStorage"},
}

#: The errors that Python's readers of zip files and headers raise for damaged files.
_UNREADABLE = (
    *(ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError),
    *(zipfile.BadZipFile, EOFError, RuntimeError, struct.error),
)


def read_checkpoint(path: str | pathlib.Path) -> dict[str, Any]:
    """Returns the content of a checkpoint file: nested dictionaries of arrays and plain values.

    Args:
        path: a `.pt` or `.pth` file in PyTorch's zip or older format, a `.safetensors` file, or an
            `.npy` file of JAX parameters and state.

    Example:
        >>> import json, pathlib, tempfile
        >>> import numpy as np
        >>> from he_keras.zoo.checkpoint_files import read_checkpoint
        >>> header = {"weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
        >>> text = json.dumps(header).encode()
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "model.safetensors"
        >>> content = len(text).to_bytes(8, "little") + text + np.array([1, 2], "<f4").tobytes()
        >>> _ = file.write_bytes(content)
        >>> read_checkpoint(file)["weight"].tolist()
        [1.0, 2.0]
    """
    path = pathlib.Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"Cannot read the checkpoint; expected a file; received {path} ({error.strerror})"
        ) from error
    try:
        return _reader(content)(content)
    except _UNREADABLE as error:
        raise ValueError(
            "Not a checkpoint that can be read safely; expected tensors and plain values in "
            f"PyTorch's, safetensors' or NumPy's format; received {path}: {error!s:.160}"
        ) from error


def _reader(content: bytes) -> Callable[[bytes], dict]:
    if content[:4] == b"PK\x03\x04":
        return _read_zip
    if content[:6] == b"\x93NUMPY":
        return _read_jax
    if content[8:9] == b"{":
        return _read_safetensors
    return _read_legacy


def _read_zip(content: bytes) -> dict:
    """Reads PyTorch's format since 1.6: a zip file of one pickle and one member per storage."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = _checked_members(archive, len(content))
        pickle_name = next((name for name in members if name.endswith("/data.pkl")), None)
        if pickle_name is None:
            raise UnsafePickleError("a zip file without data.pkl")
        folder = pickle_name.removesuffix("data.pkl")
        order = folder + "byteorder"
        if order in members and archive.read(order) != b"little":
            raise UnsafePickleError("a file of a big-endian machine")
        stream = io.BytesIO(content)
        stream.seek(_place(archive, pickle_name, content).start)
        root = _torch_pickle(stream)
        storages = _storages(root, len(content))
        view = memoryview(content)
        blocks = {key: view[_place(archive, f"{folder}data/{key}", content)] for key in storages}
    return _filled(root, blocks, storages)


def _place(archive: zipfile.ZipFile, name: str, content: bytes) -> slice:
    """Returns where a member stands in the file, which spares a copy of it."""
    member = archive.getinfo(name)
    name_length, extra_length = struct.unpack_from("<HH", content, member.header_offset + 26)
    start = member.header_offset + 30 + name_length + extra_length
    place = slice(start, start + member.file_size)
    if zlib.crc32(memoryview(content)[place]) != member.CRC:
        raise UnsafePickleError(f"a damaged member ({name!r:.60})")
    return place


def _checked_members(archive: zipfile.ZipFile, num_bytes: int) -> set[str]:
    members = archive.infolist()
    if len(members) > _MAX_MEMBERS:
        raise UnsafePickleError(f"{len(members)} members")
    for member in members:
        parts = pathlib.PurePosixPath(member.filename.replace("\\", "/")).parts
        if ".." in parts or member.filename.startswith(("/", "\\")):
            raise UnsafePickleError(f"a member outside the archive ({member.filename!r:.60})")
        if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
            raise UnsafePickleError("a compressed or encrypted member")
    if sum(member.file_size for member in members) > num_bytes:
        raise UnsafePickleError("members that are larger than the file")
    return {member.filename for member in members}


def _read_legacy(content: bytes) -> dict:
    """Reads the format of PyTorch before 1.6.

    The file has five pickles. Then each storage follows, after its number of elements.
    """
    stream = io.BytesIO(content)
    if read_pickle(stream, {}) != _LEGACY_MAGIC or read_pickle(stream, {}) != _LEGACY_PROTOCOL:
        raise UnsafePickleError("neither of PyTorch's formats")
    system = read_pickle(stream, {})
    if type(system) is not dict or system.get("little_endian") is not True:
        raise UnsafePickleError("a file of a big-endian machine")
    root = _torch_pickle(stream)
    storages = _storages(root, len(content))
    keys = read_pickle(stream, {})
    if type(keys) is not list or not set(storages) <= {key for key in keys if type(key) is str}:
        raise UnsafePickleError("a storage that is not in the file")
    blocks, position = {}, stream.tell()
    view = memoryview(content)
    for key in keys:
        if key not in storages:
            raise UnsafePickleError("a storage of unknown type")
        count = int.from_bytes(view[position : position + 8], "little")
        start, position = position + 8, position + 8 + storages[key].num_bytes
        if count != storages[key].size or position > len(content):
            raise UnsafePickleError("a storage of another size than the file says")
        blocks[key] = view[start:position]
    return _filled(root, blocks, storages)


def _read_safetensors(content: bytes) -> dict:
    """Reads eight bytes with the length of the header, the header in JSON, and the numbers."""
    length = int.from_bytes(content[:8], "little")
    if length > len(content) - 8:
        raise UnsafePickleError(f"a header of {length:,} bytes")
    try:
        header = json.loads(content[8 : 8 + length])
        entries = {name: each for name, each in header.items() if name != "__metadata__"}
        numbers = memoryview(content)[8 + length :]
        return {name: _safetensor(each, numbers) for name, each in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnsafePickleError(f"a damaged header ({error!s:.80})") from error


def _safetensor(entry: Mapping, numbers: memoryview) -> np.ndarray:
    start, end = entry["data_offsets"]
    shape = entry["shape"]
    kind = _SAFETENSORS_KINDS[entry["dtype"]]
    itemsize = tensors.STORAGE_DTYPES[kind].itemsize
    if not 0 <= start <= end <= len(numbers) or (end - start) % itemsize:
        raise UnsafePickleError("a tensor outside the file")
    source = Storage("", kind, (end - start) // itemsize)
    strides = [int(np.prod(shape[axis + 1 :], dtype=np.int64)) for axis in range(len(shape))]
    tensor = tensors.stored_tensor(source, 0, shape, strides)
    return tensor.read(tensors.numbers(source, numbers[start:end]))


def _read_jax(content: bytes) -> dict:
    """Reads one of DeepMind's JAX files: a pair of parameters and state."""
    pair = read_object_array(content)
    if len(pair) != 2:
        raise UnsafePickleError("no pair of parameters and state")
    return _map_leaves({"params": pair[0], "state": pair[1]}, _array_of)


def _array_of(value):
    return value.value if isinstance(value, PickledArray) else value


def _torch_pickle(stream: io.BytesIO) -> Any:
    constructors: dict[str, Callable[..., Any]] = {
        **NUMPY_CONSTRUCTORS,
        "collections OrderedDict": _ordered,
        "torch Size": tuple,
        "torch._utils _rebuild_tensor_v2": tensors.stored_tensor,
        "torch._utils _rebuild_parameter": lambda tensor, *_: tensor,
    }
    kinds = {f"torch {kind}": tensors.StorageKind(kind) for kind in tensors.STORAGE_DTYPES}
    root = read_pickle(stream, constructors, tensors.storage, kinds)
    if type(root) is not dict:
        raise UnsafePickleError(f"a {type(root).__name__} in place of named tensors")
    return root


def _ordered(pairs: Iterable = ()) -> dict:
    return dict(pairs)


def _storages(root, num_bytes: int) -> dict[str, Storage]:
    """Returns the storages that a structure needs, which must fit into the file."""
    found: dict[str, Storage] = {}

    def visit(value):
        if isinstance(value, StoredTensor):
            if found.setdefault(value.storage.key, value.storage) != value.storage:
                raise UnsafePickleError("a storage of two types or sizes")
        return value

    _map_leaves(root, visit)
    if sum(each.num_bytes for each in found.values()) > num_bytes:
        raise UnsafePickleError("tensors that are larger than the file")
    return found


def _filled(root, blocks: Mapping[str, Any], storages: Mapping[str, Storage]) -> dict:
    flat = {key: tensors.numbers(storages[key], block) for key, block in blocks.items()}

    def read(value):
        if isinstance(value, StoredTensor):
            return value.read(flat[value.storage.key])
        return _array_of(value)

    return _map_leaves(root, read)


def _map_leaves(root, function: Callable):
    """Applies a function to every value in nested dictionaries, lists and tuples.

    A container that occurs twice is mapped once. Otherwise a small file could name one container so
    often that its copies would fill the memory.
    """
    done: dict[int, Any] = {}

    def visit(value, depth: int):
        if type(value) not in (dict, list, tuple):
            return function(value)
        if depth > _MAX_DEPTH:
            raise UnsafePickleError(f"more than {_MAX_DEPTH} levels")
        if id(value) not in done:
            done[id(value)] = None
            if type(value) is dict:
                mapped = {key: visit(each, depth + 1) for key, each in value.items()}
            else:
                mapped = type(value)(visit(each, depth + 1) for each in value)
            done[id(value)] = mapped
        if done[id(value)] is None:
            raise UnsafePickleError("a container that contains itself")
        return done[id(value)]

    return visit(root, 0)
