"""What was compiled, and the path that is attacked, must answer as the model does now.

An attack asks for a faster path through the model (`Victim.for_many_passes`). It gives the model's
own logits, up to rounding. Here both are compared on a few images. Where they differ by more than
rounding explains, the attack takes `head(network(images, training=False))` as it stands, and its
result says so.

TensorFlow reads variables anew at each call, but a trace keeps the Python values that it met: an
activation, a scale, a frozen layer. An attack that was compiled for other values is out of date.
"""

import contextlib
import contextvars
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from he_keras import cpu
from he_keras.arguments import reason_of
from he_keras.attacks.framework.precision import difference_by_rounding
from he_keras.attacks.framework.result import Goal
from he_keras.attacks.framework.settings import configuration
from he_keras.attacks.framework.victim import Victim
from he_keras.cpu.classifier_passes import fault_of, run_plainly
from he_keras.cpu.switch import enabled_tricks

#: Images on which two paths are compared: few, because every attack pays for them.
PROBE_SIZE = 8


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
    fault = fault_of(model)
    return Victim(model, logit_scale), (fault,) if fault else ()


def _probe(model, images) -> Probe:
    victim = Victim(model)
    logits = _first_answer(victim, images)
    faster = victim.for_many_passes()
    if faster is not victim:
        found = faster.logits(images).numpy()
        tolerance = difference_by_rounding(logits, model)
        if _difference(found, logits) > tolerance:
            again = _plain_logits(victim, images).numpy()
            # A model that answers differently each time is another check's business.
            is_random = _difference(again, logits) > tolerance
            run_plainly(model, "" if is_random else _warning(found, logits, tolerance))
    return Probe(model, images, logits)


def _plain_logits(victim: Victim, images):
    """What Keras itself answers: `head(network(images, training=False))`."""
    with cpu.disabled():
        return victim.logits(images)


def _first_answer(victim: Victim, images) -> np.ndarray:
    """The logits of some images, or one sentence where the model cannot take them."""
    try:
        return _plain_logits(victim, images).numpy()
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
    logits = victim.scaled(found.logits) if is_same else _plain_logits(victim, images)
    now = goal.margin(logits).numpy()
    # A margin is the difference of two logits.
    tolerance = 2.0 * difference_by_rounding(logits.numpy(), victim.model)
    if _difference(margins[: len(now)], now) <= tolerance:
        return True
    again = goal.margin(_plain_logits(victim, images)).numpy()
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
        "the faster path answers differently from the model (by up to "
        f"{_difference(found, logits):.2g}; rounding explains {tolerance:.2g}), so it was not "
        "taken; please report this with the model's layers"
    )


def compilation_key(victim: Victim) -> tuple[Hashable, ...]:
    """Returns what a victim's compiled function depends on, in addition to variables."""
    margin = getattr(victim.head, "margin", None)
    settings = victim.scale, margin, victim.training
    return (*_identity(victim.model), *settings, enabled_tricks(), configuration(victim.model))


def _identity(model) -> tuple[int, int]:
    """Tells models apart. A bound method is a new object at each access: its parts are not."""
    return id(getattr(model, "__self__", None)), id(getattr(model, "__func__", model))
