"""Checks of a model and its data before they are attacked.

Most published robustness that later fell had a cause that shows in a few passes over a few images:
answers that are no logits, differ each time or depend on the rest of the batch, gradients that are
missing or say nothing about the loss, inputs in another range than the model was trained on.

Papers: Croce & Hein 2020 (AutoAttack's checks of the model), Carlini et al. 2019 ("On evaluating
adversarial robustness"), Pintor et al. 2022 ("Indicators of attack failure"). `docs/evaluation.md`
has a section for each check.
"""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from he_keras.attacks import Victim, check_examples
from he_keras.attacks.checks import check_class_numbers, check_not_probabilities
from he_keras.evaluation.check import Check
from he_keras.evaluation.preflight_gradients import gradient_checks
from he_keras.evaluation.preflight_inputs import input_checks
from he_keras.evaluation.subject import Subject
from he_keras.threat import ThreatModel

_MAX_IMAGES = 128
_NUM_REPEATED = 32
_REPEATS = 5
_NUM_REARRANGED = 16
_NUM_ALONE = 3
_RANDOM_CHANGE = 1e-4
# Half precision rounds differently in batches of different sizes.
_HALF_CHANGE = 0.03
_HALF_TYPES = ("float16", "bfloat16")


def preflight(
    model, images, labels, threat: ThreatModel, logit_scale: float | str = "model"
) -> tuple[Check, ...]:
    """Checks a model and its data before any attack.

    Costs about 1,000 forward passes of single images and a hundred backward ones.

    Args:
        model: a `keras.Model` or a callable `images -> logits`.
        images: images within the threat model's bounds; the first 128 are used.
        labels: integer labels.
        threat: the threat model.
        logit_scale: see `he_keras.attacks.Victim`.

    Example:
        >>> import numpy as np, tensorflow as tf
        >>> import he_keras as he
        >>> from he_keras.evaluation.preflight import preflight
        >>> images = np.random.default_rng(0).uniform(size=(32, 4)).astype("float32")
        >>> softmax = lambda images: tf.nn.softmax(images)
        >>> checks = preflight(softmax, images, images.argmax(1), he.ThreatModel("linf", 0.1))
        >>> [check.name for check in checks if check.verdict == "fail"]
        ['logits']
    """
    images, labels = check_examples(threat, images, labels)
    images, labels = images[:_MAX_IMAGES].astype(np.float32), labels[:_MAX_IMAGES]
    victim = Victim(model, logit_scale)
    variables = _variables(model, victim, images)
    before = [variable.numpy() for variable in variables]
    logits = _checked_logits(victim, images, labels)
    subject = Subject(victim, images, labels, logits, threat)
    random = _deterministic(subject)
    checks = [
        _finite(logits),
        # Unscaled: probabilities times a number would no longer look like probabilities.
        _are_logits(logits if victim.scale == 1.0 else Victim(model).logits(images).numpy()),
        random,
        _batch_independence(subject, is_random=random.fired),
        *gradient_checks(subject, is_random=random.fired),
        *input_checks(subject),
        _enough_classes(logits.shape[1]),
    ]
    # Last: none of all these passes may have changed the model.
    checks.insert(4, _frozen_state(variables, before))
    return tuple(checks)


def _checked_logits(victim: Victim, images, labels) -> np.ndarray:
    logits = victim.logits(tf.constant(images)).numpy()
    if logits.ndim != 2 or len(logits) != len(images):
        raise ValueError(
            f"Not a classifier; expected logits of shape ({len(images)}, classes) for "
            f"{len(images)} images; received shape {logits.shape}"
        )
    check_class_numbers(labels, logits.shape[1])
    return logits


def _finite(logits: np.ndarray) -> Check:
    bad = int((~np.isfinite(logits)).any(axis=1).sum())
    figure = f"{bad} of {len(logits)} images"
    if not bad:
        return Check("finite", "before", "pass", figure, "Every answer is finite.")
    return Check(
        "finite",
        "before",
        "fail",
        figure,
        "The model answers NaN or infinity: an attack counts that as broken; find the layer that "
        "overflows before you evaluate.",
    )


def _are_logits(logits: np.ndarray) -> Check:
    figure = f"values {logits.min():.3g} to {logits.max():.3g}"
    try:
        check_not_probabilities(logits)
    except ValueError:
        return Check(
            "logits",
            "before",
            "fail",
            f"{figure}, rows sum to 1",
            "The model returns probabilities, whose gradients vanish: remove the softmax of its "
            "last layer, or evaluate `lambda images: tf.math.log(model(images, training=False))`.",
        )
    return Check("logits", "before", "pass", figure, "The outputs are no probabilities.")


def _deterministic(subject: Subject) -> Check:
    """AutoAttack's check: five passes, logits of unit length."""
    images = tf.constant(subject.images[:_NUM_REPEATED])
    answers = np.stack([subject.victim.logits(images).numpy() for _ in range(_REPEATS)])
    change = max(_largest_change(answer, answers[0]) for answer in answers[1:])
    predictions = answers.argmax(axis=2)
    flips = int((predictions != predictions[0]).any(axis=0).sum())
    figure = f"largest change {change:.1e}, {flips} of {len(images)} predictions flip"
    if change <= _RANDOM_CHANGE:
        return Check("deterministic", "before", "pass", figure, "Repeated passes agree.")
    return Check(
        "deterministic",
        "before",
        "fail" if flips else "warn",
        figure,
        "The model answers differently each time, so single gradients mislead an attack and no "
        "verdict can be repeated: use autoattack-rand, or attacks with eot_samples > 1.",
    )


def _batch_independence(subject: Subject, is_random: bool) -> Check:
    name, when = "batch-independence", "before"
    if is_random:
        reason = "Cannot be decided for a model that answers differently each time."
        return Check(name, when, "skipped", "not measured", reason)
    images = subject.images[:_NUM_REARRANGED]
    together = subject.victim.logits(tf.constant(images)).numpy()
    order = np.random.default_rng(0).permutation(len(images))
    changes = [
        # The same images inside the larger batch, in another order, and some all alone.
        _largest_change(subject.logits[: len(images)], together),
        _largest_change(subject.victim.logits(tf.constant(images[order])).numpy(), together[order]),
    ]
    for row in range(min(_NUM_ALONE, len(images))):
        alone = subject.victim.logits(tf.constant(images[row : row + 1])).numpy()
        changes.append(_largest_change(alone, together[row : row + 1]))
    figure = f"largest change {max(changes):.1e}"
    limit = _HALF_CHANGE if _uses_half_precision(subject.victim.model) else _RANDOM_CHANGE
    if max(changes) <= limit:
        return Check(name, when, "pass", figure, "An image's logits are its own.")
    return Check(
        name,
        when,
        "fail",
        figure,
        "The logits of an image depend on the batch it is in, as batch norm in training mode does: "
        "call the model with training=False.",
    )


def _frozen_state(variables: list, before: list) -> Check:
    changed = [
        getattr(variable, "path", getattr(variable, "name", "a variable"))
        for variable, value in zip(variables, before, strict=True)
        if not np.array_equal(variable.numpy(), value, equal_nan=True)
    ]
    figure = f"{len(changed)} of {len(variables)} variables changed"
    if not changed:
        return Check("frozen-state", "before", "pass", figure, "No pass changes the model.")
    return Check(
        "frozen-state",
        "before",
        "fail",
        figure,
        f"Calling the model changes it ({changed[0]}), so that every attack meets another model: "
        "call it with training=False, and keep state out of the forward pass.",
    )


def _enough_classes(num_classes: int) -> Check:
    figure = f"{num_classes} classes"
    if num_classes >= 4:
        message = "Every loss of the attacks is defined."
        return Check("enough-classes", "before", "pass", figure, message)
    missing = "DLR loss is" if num_classes == 3 else "DLR loss, targeted or not, is"
    return Check(
        "enough-classes",
        "before",
        "warn",
        figure,
        f"The {'targeted ' if num_classes == 3 else ''}{missing} undefined, which autoattack "
        "needs: use screen, cw-linf-100 and square-5000 instead.",
    )


def _largest_change(logits: np.ndarray, reference: np.ndarray) -> float:
    """Largest distance between logit vectors, divided by the length of each."""
    difference = np.linalg.norm(_directions(logits) - _directions(reference), axis=1)
    return float(difference.max(initial=0.0))


def _directions(logits: np.ndarray) -> np.ndarray:
    # What is not finite is another check's business.
    logits = np.nan_to_num(logits.astype(np.float64), posinf=0.0, neginf=0.0)
    return logits / (np.linalg.norm(logits, axis=1, keepdims=True) + 1e-10)


def _uses_half_precision(model) -> bool:
    if not isinstance(model, keras.Layer):
        return False
    layers = model._flatten_layers()
    return any(getattr(layer, "compute_dtype", None) in _HALF_TYPES for layer in layers)


def _variables(model, victim: Victim, images) -> list[Any]:
    """The floating-point variables of a model, also of one that is hidden in a function.

    The state of random generators is integer, and changes rightly.
    """
    found = getattr(model, "variables", None)
    if found is None:
        try:
            graph = tf.function(victim.logits, autograph=False)
            function = graph.get_concrete_function(tf.constant(images[:1]))
        except Exception:  # noqa: BLE001
            # Code of any kind, which may not run in a graph: then its state cannot be seen.
            return []
        found = function.graph.variables
    return [each for each in found if tf.as_dtype(each.dtype).is_floating]
