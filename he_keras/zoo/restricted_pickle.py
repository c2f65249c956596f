"""Reads the pickles of checkpoints without running any code that they name.

A pickle is a program. Python's own loader runs it, so a hostile file can run any code. Here, only
the few operations that checkpoints need are executed, on plain values. A name in the file never
becomes code: the caller says which names it knows, and which function stands in for each.
"""

import io
import pickletools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

#: A file of few bytes must not become many objects. The smallest known networks have 35 bytes of
#: file for each operation, and 270 for each container. With these limits, the objects of a pickle
#: need less than twice the memory of its file, plus half a megabyte.
_MIN_OPERATIONS, _BYTES_PER_OPERATION = 5_000, 32
_MIN_CONTAINERS, _BYTES_PER_CONTAINER = 2_000, 128
_MARK = object()

Constructor = Callable[..., Any]


class UnsafePickleError(ValueError):
    """The pickle is damaged, or it asks for something that no checkpoint needs."""


class Name:
    """A class or function that a pickle names, with the plain function that stands in for it.

    Args:
        path: the name in the pickle, for example "collections OrderedDict".
        constructor: a function from the arguments in the pickle to a value. It may refuse them.
    """

    def __init__(self, path: str, constructor: Constructor) -> None:
        self.path = path
        self.construct = constructor


def read_pickle(
    stream: io.BytesIO,
    constructors: Mapping[str, Constructor],
    persistent: Constructor | None = None,
    values: Mapping[str, Any] | None = None,
) -> Any:
    """Reads one pickle from a stream. The stream is then at the end of the pickle.

    Args:
        stream: the whole file, at the beginning of the pickle. Its size limits what is created.
        constructors: for each known name ("module attribute") the function that stands in for it.
        persistent: a function from the parts of a persistent id to a value. None refuses such ids.
        values: for each name that is mentioned but never called, the value that stands in for it.

    Example:
        >>> import collections, io, pickle
        >>> from he_keras.zoo.restricted_pickle import read_pickle
        >>> content = pickle.dumps(collections.OrderedDict(a=1), protocol=2)
        >>> read_pickle(io.BytesIO(content), {"collections OrderedDict": dict})
        {'a': 1}
    """
    machine = _Machine(constructors, persistent, values or {})
    num_bytes = len(stream.getbuffer())
    limit = _MIN_OPERATIONS + num_bytes // _BYTES_PER_OPERATION
    container_limit = _MIN_CONTAINERS + num_bytes // _BYTES_PER_CONTAINER
    num_containers = 0
    try:
        for count, (operation, argument, _) in enumerate(pickletools.genops(stream)):
            num_containers += operation.name.startswith(("EMPTY_", "TUPLE"))
            if count >= limit or num_containers > container_limit:
                raise UnsafePickleError(f"too many objects for {num_bytes:,} bytes")
            machine.run(operation.name, argument)
        return machine.result()
    except UnsafePickleError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError) as error:
        raise UnsafePickleError(f"damaged ({type(error).__name__}: {error!s:.80})") from error


class _Machine:
    """A stack and a memo, as the pickle format describes them."""

    def __init__(self, constructors, persistent, values) -> None:
        self._values = values
        self._constructors = constructors
        self._persistent = persistent
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def result(self) -> Any:
        (value,) = self._stack
        return value

    def run(self, operation: str, argument) -> None:
        if operation in _CONSTANTS:
            self._stack.append(_CONSTANTS[operation])
        elif operation in _LITERALS:
            self._stack.append(argument)
        elif operation in _CONTAINERS:
            self._stack.append(_CONTAINERS[operation]())
        elif operation in _OPERATIONS:
            _OPERATIONS[operation](self, argument)
        elif operation not in _NOTHING:
            raise UnsafePickleError(f"the operation {operation}")

    def _from_mark(self) -> list:
        position = len(self._stack) - 1
        while self._stack[position] is not _MARK:
            position -= 1
            if position < 0:
                raise UnsafePickleError("damaged (no mark)")
        values = self._stack[position + 1 :]
        del self._stack[position:]
        return values

    def _mark(self, _) -> None:
        self._stack.append(_MARK)

    def _tuple(self, _) -> None:
        self._stack.append(tuple(self._from_mark()))

    def _short_tuple(self, length: int) -> None:
        values = [self._stack.pop() for _ in range(length)]
        self._stack.append(tuple(reversed(values)))

    def _append(self, _) -> None:
        value = self._stack.pop()
        self._extend([value])

    def _appends(self, _) -> None:
        self._extend(self._from_mark())

    def _extend(self, values: Iterable) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise UnsafePickleError(f"items for a {type(target).__name__}")
        target.extend(values)

    def _set_item(self, _) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set([key, value])

    def _set_items(self, _) -> None:
        self._set(self._from_mark())

    def _set(self, pairs: list) -> None:
        target = self._stack[-1]
        if type(target) is not dict or len(pairs) % 2:
            raise UnsafePickleError(f"keys for a {type(target).__name__}")
        target.update(zip(pairs[::2], pairs[1::2], strict=True))

    def _put(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    def _memoize(self, _) -> None:
        self._put(len(self._memo))

    def _get(self, index: int) -> None:
        self._stack.append(self._memo[index])

    def _global(self, path: str) -> None:
        if path in self._values:
            self._stack.append(self._values[path])
        elif path in self._constructors:
            self._stack.append(Name(path, self._constructors[path]))
        else:
            raise UnsafePickleError(f"the name {path.replace(' ', '.')!s:.80}")

    def _stack_global(self, _) -> None:
        attribute, module = self._stack.pop(), self._stack.pop()
        self._global(f"{module} {attribute}")

    def _reduce(self, _) -> None:
        arguments, name = self._stack.pop(), self._stack.pop()
        if not isinstance(name, Name) or type(arguments) is not tuple:
            raise UnsafePickleError("a call of something that is no name")
        self._stack.append(name.construct(*arguments))

    def _build(self, _) -> None:
        """Gives an object its state. Plain containers need none and ignore it."""
        state = self._stack.pop()
        set_state = getattr(self._stack[-1], "set_state", None)
        if set_state is not None:
            set_state(state)

    def _persistent_id(self, _) -> None:
        if self._persistent is None:
            raise UnsafePickleError("a persistent id")
        self._stack.append(self._persistent(*self._stack.pop()))


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_LITERALS = {
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BINSTRING", "SHORT_BINSTRING"),
}
_CONTAINERS: dict[str, Callable[[], Any]] = {
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
}
_NOTHING = ("PROTO", "FRAME", "STOP")
_OPERATIONS: dict[str, Callable[[_Machine, Any], None]] = {
    "MARK": _Machine._mark,
    "TUPLE": _Machine._tuple,
    "TUPLE1": lambda machine, _: machine._short_tuple(1),
    "TUPLE2": lambda machine, _: machine._short_tuple(2),
    "TUPLE3": lambda machine, _: machine._short_tuple(3),
    "APPEND": _Machine._append,
    "APPENDS": _Machine._appends,
    "SETITEM": _Machine._set_item,
    "SETITEMS": _Machine._set_items,
    "BINPUT": _Machine._put,
    "LONG_BINPUT": _Machine._put,
    "MEMOIZE": _Machine._memoize,
    "BINGET": _Machine._get,
    "LONG_BINGET": _Machine._get,
    "GLOBAL": _Machine._global,
    "STACK_GLOBAL": _Machine._stack_global,
    "REDUCE": _Machine._reduce,
    "BUILD": _Machine._build,
    "BINPERSID": _Machine._persistent_id,
}
