"""What a compiled function of a model depends on besides variables: values that Python holds.

A trace keeps the Python values that it met. An attack, and `HEAdversarialModel`, compile again
where they have changed. Of a layer, all settings count. Of any other callable, its layers count,
and its switches: truth values, texts and functions. Its numbers do not count, because a counter
must not have an attack compiled at each call. `agreement.is_current` sees numbers by what the
callable answers.
"""

import functools
import hashlib
import inspect
import types
from collections.abc import Hashable, Iterator

import keras
import numpy as np

#: What Keras notes about a model's own runs; none of it changes what the model computes.
_BOOKKEEPING = {"built", "compiled", "history", "jit_compile", "run_eagerly", "stop_training"} | {
    f"{verb}_function" for verb in ("train", "test", "predict")
}
#: Private attributes that Keras and TensorFlow keep.
_BOOKKEEPING_BEGINS = ("_self_", "_tf_", "_keras_", "_obj_", "stop_")
#: Objects of these packages are not looked into.
_OPAQUE = ("builtins", "he_keras", "keras", "numpy", "tensorflow")
#: So many containers, objects and functions inside each other are opened.
_DEPTH = 4


def configuration(model) -> Hashable:
    """Returns the settings of a model's layers, or what counts of any other callable.

    Of a layer, all attributes count that are plain data, arrays or functions. The switches of
    objects that it holds count as well.

    Args:
        model: a Keras layer or any callable.

    Example:
        >>> import keras
        >>> from he_keras.attacks.framework.settings import configuration
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
        >>> before, through_function = configuration(model), configuration(lambda x: model(x))
        >>> model.layers[0].activation = keras.activations.relu
        >>> before == configuration(model), through_function == configuration(lambda x: model(x))
        (False, False)
    """
    if isinstance(model, keras.layers.Layer):
        return _of_layers([model])
    held = [*_held_by(model)]
    layers = [value for value in held if isinstance(value, keras.layers.Layer)]
    return _of_layers(layers), _switches(held)


def _of_layers(layers) -> Hashable:
    return tuple(_of_layer(each) for layer in layers for each in layer._flatten_layers())


def _of_layer(layer) -> Hashable:
    values = {name: _frozen(value) for name, value in vars(layer).items() if _counts(name, value)}
    # Objects of other kinds do not count, nor does whether a call has put one there.
    values = {name: value for name, value in values.items() if value is not None}
    # Kept by Keras under names of its own.
    values["trainable"], values["dtype"] = layer.trainable, layer.dtype_policy.name
    return id(layer), tuple(sorted(values.items(), key=lambda item: item[0]))


def _counts(name: str, value) -> bool:
    if name.startswith(_BOOKKEEPING_BEGINS) or name in _BOOKKEEPING:
        return False
    if not name.startswith("_"):
        return True
    # Somebody's own layer: of what Keras keeps in private attributes, nothing counts.
    is_plain = isinstance(value, (bool, int, float, str, types.FunctionType))
    return is_plain and name not in _private_names_of_keras()


@functools.cache
def _private_names_of_keras() -> frozenset[str]:
    return frozenset().union(*map(vars, (keras.layers.Layer(), keras.Model(), keras.Sequential())))


def _frozen(value) -> Hashable:
    """Something that stays equal as long as the value does; None for objects of other kinds.

    Tensors are objects of other kinds, because layers keep the last ones that they met.
    """
    if isinstance(value, (bool, int, float, complex, str, bytes)):
        return type(value).__name__, repr(value)
    if isinstance(value, (np.ndarray, np.generic)):
        digest = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
        return str(value.dtype), value.shape, digest
    if callable(value):
        return value if isinstance(value, Hashable) else id(value)
    if isinstance(value, dict):
        return tuple((repr(key), _frozen(each)) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(each) for each in value)
    if _is_open(value):
        return _switches(_opened(vars(value).values(), set(), 1))
    return None


def _switches(values) -> Hashable:
    """The truth values, texts and functions among some values; a list may grow without effect."""
    plain = [value for value in values if isinstance(value, (bool, str, types.FunctionType))]
    return tuple((type(value).__name__, value) for value in plain)


def _held_by(function) -> Iterator:
    """What a function, a method, a partial or an object holds, and what those things hold."""
    if isinstance(function, functools.partial):
        parts = [function.func, *function.args, *function.keywords.values()]
    else:
        owner = getattr(function, "__self__", None)
        parts = [getattr(function, "__func__", function), owner]
        parts += [*vars(function).values()] if hasattr(function, "__dict__") else []
    package = getattr(function, "__module__", None)
    yield from _opened(parts, set(), _DEPTH, package)


def _opened(values, seen: set[int], depth: int, package: str | None = None) -> Iterator:
    """The values, and what is in those that are containers, objects or functions of a package."""
    for value in values:
        yield value
        if id(value) in seen or not depth:
            continue
        seen.add(id(value))
        inner: list = []
        if isinstance(value, dict):
            inner = [*value.values()]
        elif isinstance(value, (list, tuple)):
            inner = [*value]
        elif isinstance(value, types.FunctionType):
            inner = _variables(value) if value.__module__ == package else []
        elif isinstance(value, (functools.partial, types.MethodType)):
            inner = [*_held_by(value)]
        elif _is_open(value):
            inner = [*vars(value).values()]
        yield from _opened(inner, seen, depth - 1, package)


def _variables(function: types.FunctionType) -> list:
    found = inspect.getclosurevars(function)
    return [*found.nonlocals.values(), *found.globals.values()]


def _is_open(value) -> bool:
    """Whether an object of somebody else's class can be looked into."""
    if isinstance(value, (type, types.ModuleType, keras.layers.Layer)):
        return False
    is_namespace = isinstance(value, types.SimpleNamespace)
    package = type(value).__module__.partition(".")[0]
    return is_namespace or (hasattr(value, "__dict__") and package not in _OPAQUE)
