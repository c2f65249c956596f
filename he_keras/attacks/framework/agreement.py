"""What was compiled, and the path that is attacked, must answer as the model does now.

An attack asks for a faster path through the model (`Victim.for_many_passes`). It gives the model's
own logits, up to rounding. Here a few images take both paths. Where `he_keras.cpu` finds that they
differ by more than rounding explains, the attack takes `head(network(images, training=False))` as
it stands, and its result says so.

TensorFlow reads variables anew at each call, but a trace keeps the Python values that it met: an
activation, a scale, a frozen layer. An attack, and `HEAdversarialModel`, compile again where they
have changed. Of a layer, all settings count. Of any other callable, its layers count, and its
switches: truth values, texts and functions. Its numbers do not count, because a counter must not
have an attack compiled at each call. `is_current` sees numbers by what the callable answers.
"""

import contextlib
import contextvars
import functools
import hashlib
import inspect
import types
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple, TypeVar

import keras
import numpy as np
import tensorflow as tf

from he_keras import cpu
from he_keras.arguments import reason_of
from he_keras.attacks.framework.batch_function import BatchFunction
from he_keras.attacks.framework.result import Goal
from he_keras.attacks.framework.victim import Victim
from he_keras.precision import difference_by_rounding, largest_difference

#: Images on which two paths are compared: few, because every attack pays for them.
PROBE_SIZE = 8
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


class Probe(NamedTuple):
    """What a model answers to the first images.

    Attributes:
        model: the model.
        images: the images, as a tensor.
        logits: its own logits, unscaled, as Keras computes them.
    """

    model: Any
    images: Any
    logits: np.ndarray


Made = TypeVar("Made")
_HELD: contextvars.ContextVar[dict | None] = contextvars.ContextVar("held", default=None)


@contextlib.contextmanager
def standing_still() -> Iterator[None]:
    """Promises that no model changes as long as this is open, so that each is probed once.

    An ensemble, or a whole evaluation, opens it around the attacks that it runs.
    """
    if _HELD.get() is not None:
        yield
        return
    token = _HELD.set({})
    try:
        yield
    finally:
        _HELD.reset(token)


def shared(key: Hashable, make: Callable[[], Made]) -> Made:
    """Returns what was made for this key while `standing_still` has been open; else makes it."""
    held = _HELD.get()
    if held is None:
        return make()
    if key not in held:
        held[key] = make()
    return held[key]


def probe(model, images) -> Probe:
    """Runs a model on the first images, by itself and by the path that attacks take.

    If the two differ, the model runs plainly from then on, also in `predict` and `evaluate`.

    Cost: one pass, and one more where there is a faster path to compare.

    Args:
        model: a `keras.Model` or a callable `images -> logits`.
        images: array `(n, ...)`; the first 8 are used.

    Example:
        >>> import numpy as np
        >>> from he_keras.attacks.framework.agreement import probe
        >>> probe(lambda images: 2.0 * images, np.ones((9, 2), "float32")).logits.shape
        (8, 2)
    """
    images = tf.constant(images[:PROBE_SIZE])
    # The probe keeps the model alive, so that no other one gets its identity.
    key = (*_identity(model), configuration(model), tuple(images.shape[1:]), images.dtype)
    return shared(("probe", *key), lambda: _probe(model, images))


def agreed(model, images, logit_scale: float | str = "model") -> tuple[Victim, tuple[str, ...]]:
    """Returns the victim to attack, and what a report must say about the path to it.

    Args:
        model: a `keras.Model` or a callable `images -> logits`.
        images: array `(n, ...)`; the first 8 are probed.
        logit_scale: see `Victim`.

    Example:
        >>> import numpy as np
        >>> from he_keras.attacks.framework.agreement import agreed
        >>> victim, warnings = agreed(lambda images: images, np.ones((2, 3), "float32"))
        >>> warnings
        ()
    """
    probe(model, images)
    return Victim(model, logit_scale), cpu.warnings_about(model)


def compiled_logits(victim: Victim, name: str, in_graph: bool = True) -> BatchFunction:
    """Returns a victim's logits as a function of arrays, which everybody can share.

    Args:
        victim: the classifier.
        name: who asks, for errors.
        in_graph: False runs the model operation by operation.

    Example:
        >>> import numpy as np
        >>> from he_keras.attacks import Victim
        >>> from he_keras.attacks.framework.agreement import compiled_logits
        >>> compiled_logits(Victim(lambda images: 2.0 * images), "mine")(np.ones((1, 2)))
        array([[2., 2.]])
    """

    def logits(images):
        return victim.for_many_passes().logits(images)

    # Other people's code may have a Python `if` or `while` on tensors.
    autograph = not isinstance(victim.model, keras.layers.Layer)
    return shared(
        ("logits", *compilation_key(victim), in_graph),
        lambda: BatchFunction(logits, name, in_graph, autograph),
    )


def _probe(model, images) -> Probe:
    victim = Victim(model)
    logits = _first_answer(victim, images)
    faster = victim.for_many_passes()
    if faster is not victim:
        cpu.compare(model, images, logits, victim.logits, faster.logits)
    return Probe(model, images, logits)


def _first_answer(victim: Victim, images) -> np.ndarray:
    """The logits of some images, or one sentence where the model cannot take them."""
    try:
        return cpu.plainly(victim.logits, images).numpy()
    except (ValueError, TypeError, tf.errors.InvalidArgumentError) as error:
        if "; expected" in str(error):
            raise
        raise ValueError(
            "The model does not run on the images; expected a model of one batch of images, here "
            f"of shape {tuple(images.shape)}; received {type(victim.model).__name__}: "
            f"{reason_of(error)}"
        ) from error


def is_current(found: Probe, victim: Victim, images, goal: Goal, margins: np.ndarray) -> bool:
    """Whether a function that was compiled earlier still answers as the model does now.

    A trace keeps the Python values that it met, but a callable may hold others by now.

    Args:
        found: what the model answers now, perhaps to other images.
        victim: the model.
        images: those that the function was called with; the first 8 are used.
        goal: what the attack is after on these images.
        margins: what the function found for the clean images.
    """
    images = tf.constant(images[:PROBE_SIZE])
    goal = tf.nest.map_structure(tf.constant, goal.rows(slice(PROBE_SIZE)))
    is_same = np.array_equal(images, found.images)
    logits = victim.scaled(found.logits) if is_same else cpu.plainly(victim.logits, images)
    now = goal.margin(logits).numpy()
    # A margin is the difference of two logits.
    tolerance = 2.0 * difference_by_rounding(logits.numpy(), victim.model)
    if largest_difference(margins[: len(now)], now) <= tolerance:
        return True
    again = goal.margin(cpu.plainly(victim.logits, images)).numpy()
    # A random model differs from itself as well.
    return largest_difference(again, now) > tolerance


def compilation_key(victim: Victim) -> tuple[Hashable, ...]:
    """Returns what a victim's compiled function depends on, in addition to variables."""
    margin = getattr(victim.head, "margin", None)
    settings = victim.scale, margin, victim.training
    return (*_identity(victim.model), *settings, cpu.in_use(), configuration(victim.model))


def _identity(model) -> tuple[int, int]:
    """Tells models apart. A bound method is a new object at each access: its parts are not."""
    return id(getattr(model, "__self__", None)), id(getattr(model, "__func__", model))


def configuration(model) -> Hashable:
    """Returns the settings of a model's layers, or what counts of any other callable.

    Of a layer, all attributes count that are plain data, arrays or functions. The switches of
    objects that it holds count as well.

    Args:
        model: a Keras layer or any callable.

    Example:
        >>> import keras
        >>> from he_keras.attacks.framework.agreement import configuration
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
