"""A faster function is compared with what Keras computes, before anybody relies on it.

A model whose two answers differ by more than rounding explains runs plainly from then on,
everywhere: in `fit`, `predict`, `evaluate` and in attacks.
"""

from collections.abc import Callable

import keras
import numpy as np

from he_keras.cpu.switch import disabled
from he_keras.precision import difference_by_rounding, largest_difference

#: Attribute of the layers of a model that runs plainly; it says why. Attacks and models compile
#: anew where such an attribute has changed.
_FAULT = "_cpu_fault"


def plainly(function: Callable, *arguments):
    """Returns `function(*arguments)` as Keras computes it.

    Example:
        >>> import he_keras as he
        >>> he.cpu.plainly(he.cpu.is_enabled)
        False
    """
    with disabled():
        return function(*arguments)


def compare(model, images, logits: np.ndarray, plain: Callable, faster: Callable) -> None:
    """Has a model run plainly from now on if its faster function is not the plain one.

    Args:
        model: a `keras.Model`.
        images: some images.
        logits: what `plain` answered to them when it ran plainly.
        plain: function from images to logits.
        faster: the faster function from images to logits.
    """
    found = faster(images).numpy()
    tolerance = difference_by_rounding(logits, model)
    if largest_difference(found, logits) <= tolerance:
        return
    again = plainly(plain, images).numpy()
    # A model that answers differently each time is another check's business.
    is_random = largest_difference(again, logits) > tolerance
    _run_plainly(model, "" if is_random else _warning(found, logits, tolerance))


def is_trusted(layer) -> bool:
    """Whether a model or a layer may run in another way than Keras would run it."""
    return not hasattr(layer, _FAULT)


def warnings_about(model) -> tuple[str, ...]:
    """Returns what a report must say about a model that runs plainly; nothing about any other."""
    fault = getattr(model, _FAULT, "") if isinstance(model, keras.Model) else ""
    return (fault,) if fault else ()


def _run_plainly(model: keras.Model, fault: str) -> None:
    for layer in model._flatten_layers():
        setattr(layer, _FAULT, fault)
    if getattr(model, "train_function", None) is not None:
        # A training that is under way goes on with another function.
        model.make_train_function(force=True)


def _warning(found: np.ndarray, logits: np.ndarray, tolerance: float) -> str:
    return (
        "the faster path answers differently from the model (by up to "
        f"{largest_difference(found, logits):.2g}; rounding explains {tolerance:.2g}), so it was "
        "not taken; please report this with the model's layers"
    )
