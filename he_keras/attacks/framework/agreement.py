"""What was compiled, and the path that is attacked, must answer as the model does now.

An attack takes short cuts through a model: it reads the variables once, and `he_keras.cpu` may run
the model in a faster way. That gives the model's own logits, up to rounding. Here both are compared
on a few images. Where they differ by more than `precision` explains, the attack takes
`head(network(images, training=False))` as it stands, and its result says so.

TensorFlow reads variables anew at each call, but a trace keeps the Python values that it met: an
activation, a scale, a frozen layer. An attack that was compiled for other values is out of date.
"""

import contextlib
import contextvars
import functools
import hashlib
import inspect
import types
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from he_keras.attacks.framework.precision import difference_by_rounding
from he_keras.attacks.framework.result import Goal
from he_keras.attacks.framework.victim import Victim
from he_keras.cpu.switch import enabled_tricks

PROBE_SIZE = 8


class Probe(NamedTuple):
    """What a model answers to the first images.

    Attributes:
        model: the model.
        images: the images, as a tensor.
        logits: its own logits, unscaled, as Keras computes them.
        agrees: whether the short cuts give the same.
        warnings: what a report must say where they do not.
    """

    model: Any
    images: Any
    logits: np.ndarray
    agrees: bool
    warnings: tuple[str, ...]


_PROBES: contextvars.ContextVar[dict | None] = contextvars.ContextVar("probes", default=None)


@contextlib.contextmanager
def standing_still() -> Iterator[None]:
    """Promises that no model changes as long as this is open, so that each is probed once.

    An ensemble, or a whole evaluation, opens it around the attacks that it runs.
    """
    if _PROBES.get() is not None:
        yield
        return
    token = _PROBES.set({})
    try:
        yield
    finally:
        _PROBES.reset(token)


def probe(model, images) -> Probe:
    """Runs a model on the first images, by itself and by the path that attacks take.

    If the two differ, an `HEAdversarialModel` takes no short cut from then on, also not in
    `predict`, `evaluate` and `export`.

    Cost: one pass, and one more where there are short cuts to compare.

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
    held = _PROBES.get()
    if held is None:
        return _probe(model, images)
    # The probe keeps the model alive, so that no other one gets its identity.
    key = (*_identity(model), configuration(model), tuple(images.shape[1:]), images.dtype)
    if key not in held:
        held[key] = _probe(model, images)
    return held[key]


def agreed(model, images, logit_scale: float | str = "model") -> tuple[Victim, tuple[str, ...]]:
    """Returns the victim to attack, and what a report must say about the path to it.

    If the short cuts fail the probe, the victim takes none.

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
    found = probe(model, images)
    earlier = getattr(model, "short_cut_fault", "")
    warnings = (earlier,) if earlier else found.warnings
    return Victim(model, logit_scale, tuned=found.agrees), warnings


def _probe(model, images) -> Probe:
    plain = Victim(model)
    logits = plain.plain_logits(images).numpy()
    attacked = Victim(model)
    if not attacked.has_short_cuts:
        return Probe(model, images, logits, True, ())
    found = attacked.with_fixed_weights().logits(images).numpy()
    tolerance = difference_by_rounding(logits, model)
    if _difference(found, logits) <= tolerance:
        return Probe(model, images, logits, True, ())
    again = _difference(plain.plain_logits(images).numpy(), logits)
    # A model that answers differently each time is another check's business.
    if again > tolerance:
        return Probe(model, images, logits, False, ())
    warning = _warning(found, logits, tolerance)
    if hasattr(model, "take_no_short_cuts"):
        model.take_no_short_cuts(warning)
    return Probe(model, images, logits, False, (warning,))


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
    logits = victim.scaled(tf.constant(found.logits) if is_same else victim.plain_logits(images))
    now = goal.margin(logits).numpy()
    # A margin is the difference of two logits.
    tolerance = 2.0 * difference_by_rounding(logits.numpy(), victim.model)
    if _difference(margins[: len(now)], now) <= tolerance:
        return True
    again = goal.margin(victim.scaled(victim.plain_logits(images))).numpy()
    # A random model differs from itself as well.
    return _difference(again, now) > tolerance


def _difference(found: np.ndarray, logits: np.ndarray) -> float:
    """Largest difference; infinite where only one of the two is finite."""
    if found.shape != logits.shape:
        return np.inf
    finite = np.isfinite(logits)
    if not np.array_equal(np.isfinite(found), finite):
        return np.inf
    return float(np.abs(found[finite].astype(np.float64) - logits[finite]).max(initial=0.0))


def _warning(found, logits, tolerance: float) -> str:
    return (
        "the faster path that attacks take through this model answers otherwise than the model "
        f"itself (by up to {_difference(found, logits):.2g}, where rounding explains "
        f"{tolerance:.2g}): it was not taken; report this, with the model's layers"
    )


def compilation_key(victim: Victim) -> tuple[Hashable, ...]:
    """Returns what a compiled function of a victim depends on, beside the model's variables."""
    margin = getattr(victim.head, "margin", None)
    settings = victim.scale, margin, victim.training, victim.tuned
    return (*_identity(victim.model), *settings, enabled_tricks(), configuration(victim.model))


def _identity(model) -> tuple[int, int]:
    """Tells models apart. A bound method is a new object at each access: its parts are not."""
    return id(getattr(model, "__self__", None)), id(getattr(model, "__func__", model))


#: What Keras notes about a model's own runs; none of it changes what the model computes.
_BOOKKEEPING = {"built", "compiled", "history", "jit_compile", "run_eagerly", "stop_training"} | {
    f"{verb}_function" for verb in ("train", "test", "predict")
}


def configuration(model) -> Hashable:
    """Returns the settings of a model's layers, or of the layers that a function refers to.

    Of a layer, all attributes count that are plain data, arrays or functions. Of other callables,
    only their Keras layers count: a counter inside them must not have an attack compiled again.

    Args:
        model: a Keras layer or any callable.

    Example:
        >>> import keras
        >>> from he_keras.cpu.switch import enabled_tricks
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
        >>> before, through_function = configuration(model), configuration(lambda x: model(x))
        >>> model.layers[0].activation = keras.activations.relu
        >>> before == configuration(model), through_function == configuration(lambda x: model(x))
        (False, False)
    """
    layers = [model] if isinstance(model, keras.layers.Layer) else [*_layers_behind(model)]
    return tuple(_of_layer(each) for layer in layers for each in layer._flatten_layers())


def _of_layer(layer) -> Hashable:
    values = {name: _frozen(value) for name, value in vars(layer).items() if _counts(name)}
    # Kept by Keras under names of its own.
    values["trainable"], values["dtype"] = layer.trainable, layer.dtype_policy.name
    return id(layer), tuple(sorted(values.items(), key=lambda item: item[0]))


def _counts(name: str) -> bool:
    return not (name.startswith(("_", "stop_")) or name in _BOOKKEEPING)


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
    return None


def _layers_behind(function) -> Iterator[keras.layers.Layer]:
    """The Keras layers that a function, a method, a partial or an object holds itself."""
    held: list = [getattr(function, "__self__", None), *_attributes(function)]
    if isinstance(function, functools.partial):
        held += [function.func, *function.args, *function.keywords.values()]
        yield from _layers_behind(function.func)
    if isinstance(function, types.MethodType):
        held += _attributes(function.__self__)
        function = function.__func__
    if isinstance(function, types.FunctionType):
        variables = inspect.getclosurevars(function)
        held += [*variables.nonlocals.values(), *variables.globals.values()]
    for value in held:
        if isinstance(value, keras.layers.Layer):
            yield value


def _attributes(holder) -> list:
    return [*getattr(holder, "__dict__", {}).values()]
