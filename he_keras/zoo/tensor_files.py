"""Writes tensors in the formats of PyTorch and safetensors, without these libraries.

The same tensors always give the same bytes.
"""

import json
import pathlib
import zipfile
from collections.abc import Mapping

import numpy as np

from he_keras.files import replacing
from he_keras.zoo.tensors import STORAGE_DTYPES

_STORAGES = {np.dtype(dtype): kind for kind, dtype in STORAGE_DTYPES.items() if dtype.kind != "u"}
_SAFETENSORS_TYPES: dict[np.dtype, str] = {
    **{np.dtype("<f8"): "F64", np.dtype("<f4"): "F32", np.dtype("<f2"): "F16"},
    **{np.dtype("<i8"): "I64", np.dtype("<i4"): "I32", np.dtype("?"): "BOOL"},
}
#: The earliest moment that a zip file can state.
_NO_DATE = (1980, 1, 1, 0, 0, 0)
_HEADER_ALIGNMENT = 8

Tensors = Mapping[str, np.ndarray]


def write_torch(path: str | pathlib.Path, content: Mapping[str, Tensors | np.ndarray]) -> None:
    """Writes a `.pt` file in PyTorch's zip format, which `torch.load(weights_only=True)` reads.

    Args:
        path: the file.
        content: tensors by their names, or dictionaries of such, as in `{"state_dict": tensors}`.

    Example:
        >>> import pathlib, tempfile
        >>> import numpy as np
        >>> from he_keras.zoo.checkpoint_files import read_checkpoint
        >>> from he_keras.zoo.tensor_files import write_torch
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "model.pt"
        >>> write_torch(file, {"weight": np.array([1, 2], "float32")})
        >>> read_checkpoint(file)["weight"].tolist()
        [1.0, 2.0]
    """
    path = pathlib.Path(path)
    pickle = _Pickle()
    pickle.dictionary(content)
    members: dict[str, bytes | np.ndarray] = {
        "data.pkl": b"\x80\x02" + b"".join(pickle.parts) + b".",
        "byteorder": b"little",
        **{f"data/{key}": tensor for key, tensor in enumerate(pickle.tensors)},
        "version": b"3\n",
    }
    with replacing(path) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        for name, member in members.items():
            # One tensor at a time is copied.
            block = member if isinstance(member, bytes) else member.tobytes()
            archive.writestr(zipfile.ZipInfo(f"{path.stem}/{name}", _NO_DATE), block)


def write_safetensors(path: str | pathlib.Path, tensors: Tensors) -> None:
    """Writes a `.safetensors` file.

    Args:
        path: the file.
        tensors: tensors by their names.

    Example:
        >>> import pathlib, tempfile
        >>> import numpy as np
        >>> from he_keras.zoo.checkpoint_files import read_checkpoint
        >>> from he_keras.zoo.tensor_files import write_safetensors
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "model.safetensors"
        >>> write_safetensors(file, {"weight": np.array([1, 2], "float32")})
        >>> read_checkpoint(file)["weight"].tolist()
        [1.0, 2.0]
    """
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": _known(_SAFETENSORS_TYPES, name, tensor),
            "shape": list(tensor.shape),
            "data_offsets": [position, position + tensor.nbytes],
        }
        position += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    with replacing(pathlib.Path(path)) as temporary, open(temporary, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(_little_endian(tensor).tobytes())


class _Pickle:
    """The few operations of the pickle format that dictionaries of tensors need."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.tensors: list[np.ndarray] = []

    def dictionary(self, content: Mapping) -> None:
        self._ordered_dictionary()
        self.parts.append(b"(")
        for name, value in content.items():
            self._text(name)
            if isinstance(value, Mapping):
                self.dictionary(value)
            else:
                self._tensor(name, np.asarray(value))
        self.parts.append(b"u")

    def _tensor(self, name: str, tensor: np.ndarray) -> None:
        """Writes the call that makes a tensor of a storage, which is a member of the file."""
        self.parts.append(b"ctorch._utils\n_rebuild_tensor_v2\n((")
        self._text("storage")
        self.parts.append(f"ctorch\n{_known(_STORAGES, name, tensor)}\n".encode())
        self._text(str(len(self.tensors)))
        self._text("cpu")
        self._number(tensor.size)
        self.parts.append(b"tQ")
        self._number(0)
        sizes = tensor.shape
        self._numbers(sizes)
        self._numbers(int(np.prod(sizes[axis + 1 :])) for axis in range(len(sizes)))
        self.parts.append(b"\x89")
        self._ordered_dictionary()
        self.parts.append(b"tR")
        self.tensors.append(_little_endian(tensor))

    def _ordered_dictionary(self) -> None:
        self.parts.append(b"ccollections\nOrderedDict\n)R")

    def _text(self, text: str) -> None:
        content = text.encode()
        self.parts.append(b"X" + len(content).to_bytes(4, "little") + content)

    def _numbers(self, numbers) -> None:
        self.parts.append(b"(")
        for number in numbers:
            self._number(number)
        self.parts.append(b"t")

    def _number(self, number: int) -> None:
        if number < 2**31:
            self.parts.append(b"J" + number.to_bytes(4, "little"))
        else:
            self.parts.append(b"\x8a\x08" + number.to_bytes(8, "little"))


def _little_endian(tensor: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(tensor, np.asarray(tensor).dtype.newbyteorder("<"))


def _known(names: Mapping[np.dtype, str], name: str, tensor: np.ndarray) -> str:
    dtype = np.dtype(tensor.dtype.newbyteorder("<"))
    if dtype not in names:
        raise ValueError(
            f"A tensor of an unknown type; expected one of {sorted(map(str, names))}; received "
            f"{name} of {dtype}"
        )
    return names[dtype]
