"""The contract of an attack: one method to write, everything else is kept here.

An attack file subclasses `Attack` and writes `run`, in TensorFlow operations that accept any batch
size. This class owns the checks, batching, inference mode, dropping of examples that are already
misclassified, restarts, the final projection, the success test, and the counts of passes.

Reproducibility: random draws come from `(seed, example number)`, so that the batch size never
changes a result. Compilation: one trace per (model, image shape, dtype); the batch size is dynamic.
"""

import dataclasses
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from he_keras import losses
from he_keras.attacks.victim import Victim, check_logit_scale
from he_keras.threat import ThreatModel

_BOUND_TOLERANCE = 1e-6
_PROBABILITY_TOLERANCE = 1e-5
KEEP = ("best", "last")


class Crafted(NamedTuple):
    """What `run` returns: adversarial images, and passes through the network for each example."""

    x_adv: Any
    forward_passes: Any
    backward_passes: Any


@dataclasses.dataclass(frozen=True)
class AttackResult:
    """The outcome of an attack, one entry per example, as NumPy arrays.

    Attributes:
        x_adv: adversarial images, inside the ball and the bounds; the clean image where the example
            was misclassified from the start (and `stop_when_broken` is on).
        success: the model misclassifies `x_adv`.
        distance: length of the perturbation in the threat model's norm.
        forward_passes: forward passes spent, scoring included.
        backward_passes: input-gradient passes spent.
        non_finite: the model returned NaN or infinity for the clean or the adversarial image.
    """

    x_adv: np.ndarray
    success: np.ndarray
    distance: np.ndarray
    forward_passes: np.ndarray
    backward_passes: np.ndarray
    non_finite: np.ndarray

    @property
    def robust_accuracy(self) -> float:
        """Share of all examples that are still classified correctly."""
        return float(1.0 - self.success.mean())


class Attack:
    """Base class of all attacks.

    Args:
        threat: the threat model.
        num_restarts: independent repetitions; later ones run only on examples not yet broken.
        logit_scale: see `Victim`.
        stop_when_broken: stop working on an example as soon as it is misclassified; False runs
            every example to the end, for parity with tools that do.
        keep: "best" returns the strongest iterate, "last" the final one.
        batch_size: examples per compiled call.
        seed: seed of all random draws.
        name: name in reports.
    """

    min_classes = 2

    def __init__(
        self,
        threat: ThreatModel,
        *,
        num_restarts: int = 1,
        logit_scale: float | str = "model",
        stop_when_broken: bool = True,
        keep: str = "best",
        batch_size: int = 128,
        seed: int = 0,
        name: str = "attack",
    ) -> None:
        if not isinstance(threat, ThreatModel):
            raise TypeError(f"Invalid threat; expected a ThreatModel; received threat={threat!r}")
        if keep not in KEEP:
            raise ValueError(f"Invalid keep; expected one of {KEEP}; received keep={keep!r}")
        check_positive_integer("num_restarts", num_restarts)
        check_positive_integer("batch_size", batch_size)
        check_logit_scale(logit_scale)
        self.threat = threat
        self.num_restarts = num_restarts
        self.logit_scale = logit_scale
        self.stop_when_broken = stop_when_broken
        self.keep = keep
        self.batch_size = batch_size
        self.seed = seed
        self.name = name
        self._compiled_for: tuple[Any, Any] = (None, None)

    def run(self, victim: Victim, images, labels, seeds) -> Crafted:
        """Crafts adversarial images: the one method that an attack writes.

        Args:
            victim: offers `logits(images)` (and `features`, `head`, `scale`).
            images: float tensor `(n, ...)`, n unknown when traced.
            labels: int tensor `(n,)`.
            seeds: int tensor `(n, 2)`, one seed for each example, or `(2,)` for the whole batch.
        """
        raise TypeError(f"{type(self).__name__} is not an attack; expected a subclass that defines run()")

    def perturb(self, victim: Victim, images, labels, seeds):
        """Returns projected adversarial images, without gradient; usable inside a training step."""
        x_adv = self.run(victim, images, labels, seeds).x_adv
        return tf.stop_gradient(self.threat.project(x_adv, images))

    def __call__(self, model, images, labels, example_ids=None) -> AttackResult:
        """Attacks `model` on `images`.

        Args:
            model: a `keras.Model` or a callable `images -> logits`.
            images: array `(n, ...)` within the threat model's bounds.
            labels: integer array `(n,)`.
            example_ids: numbers that identify the examples in random draws; default 0..n-1. Pass
                the positions in the data set when attacking a part of it.
        """
        images, labels = check_examples(self.threat, images, labels)
        ids = np.arange(len(images)) if example_ids is None else np.asarray(example_ids)
        if ids.shape != labels.shape:
            raise ValueError(
                f"example_ids do not match; expected shape {labels.shape}; received shape {ids.shape}"
            )
        self._check_classifier(Victim(model, self.logit_scale), images[: self.batch_size], labels)
        compiled = self._compile(model)
        parts = []
        for first in range(0, len(images), self.batch_size):
            rows = slice(first, first + self.batch_size)
            parts.append(self._attack_with_restarts(compiled, images[rows], labels[rows], ids[rows]))
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        x_adv, success, _, forward_passes, backward_passes, non_finite = columns
        distance = self.threat.distance(tf.constant(x_adv), tf.constant(images)).numpy()
        return AttackResult(x_adv, success, distance, forward_passes, backward_passes, non_finite)

    def _attack_with_restarts(self, compiled, images, labels, ids) -> list[np.ndarray]:
        """Runs every restart on the examples that are still classified correctly."""
        best = [part.numpy() for part in compiled(images, labels, self._seeds(ids, 0))]
        for restart in range(1, self.num_restarts):
            rows = np.flatnonzero(~best[1]) if self.stop_when_broken else np.arange(len(images))
            if not len(rows):
                break
            again = compiled(images[rows], labels[rows], self._seeds(ids[rows], restart))
            _merge_restart(best, [part.numpy() for part in again], rows)
        return best

    def _seeds(self, ids, restart: int) -> np.ndarray:
        draw = np.full(len(ids), self.seed * 10_007 + restart, np.int64)
        return np.stack([draw, ids], axis=1).astype(np.int32)

    def _compile(self, model):
        """Returns the compiled batch function; the last model's is kept."""
        if self._compiled_for[0] is not model:
            victim = Victim(model, self.logit_scale)
            function = tf.function(
                lambda images, labels, seeds: self._attack_batch(victim, images, labels, seeds),
                reduce_retracing=True,
            )
            self._compiled_for = (model, function)
        compiled = self._compiled_for[1]

        def call(images, labels, seeds):
            # Tensors of unknown batch size keep one trace for every size.
            signature = tf.TensorSpec([None, *images.shape[1:]], images.dtype)
            vector = tf.TensorSpec([None], tf.int32)
            concrete = compiled.get_concrete_function(
                signature, vector, tf.TensorSpec([None, 2], tf.int32)
            )
            return concrete(
                tf.constant(images), tf.constant(labels, tf.int32), tf.constant(seeds, tf.int32)
            )

        return call

    def _attack_batch(self, victim: Victim, images, labels, seeds):
        """Attacks one batch inside the graph: clean check, `run`, projection, scoring."""
        clean_logits = victim.logits(images)
        rows = tf.range(tf.shape(images)[0])
        if self.stop_when_broken:
            rows = tf.boolean_mask(rows, ~is_wrong(clean_logits, labels))
        crafted = self.run(
            victim, tf.gather(images, rows), tf.gather(labels, rows), tf.gather(seeds, rows)
        )
        x_adv = self.threat.project(crafted.x_adv, tf.gather(images, rows))
        x_adv = tf.where(tf.math.is_finite(x_adv), x_adv, tf.gather(images, rows))
        logits = put_rows(clean_logits, rows, victim.logits(x_adv))
        ones, zeros = tf.ones_like(labels), tf.zeros_like(labels)
        forward_passes = ones + put_rows(zeros, rows, crafted.forward_passes + 1)
        finite = tf.reduce_all(tf.math.is_finite(clean_logits) & tf.math.is_finite(logits), axis=1)
        return (
            put_rows(images, rows, x_adv),
            is_wrong(logits, labels),
            losses.margin(logits, labels),
            forward_passes,
            put_rows(zeros, rows, crafted.backward_passes),
            ~finite,
        )

    def _check_classifier(self, victim: Victim, images, labels) -> None:
        logits = np.asarray(keras.ops.convert_to_numpy(victim.logits(tf.constant(images[:8]))))
        if logits.ndim != 2:
            raise ValueError(
                f"Not a classifier; expected logits of shape (n, classes); received shape {logits.shape}"
            )
        check_not_probabilities(logits)
        num_classes = logits.shape[1]
        if num_classes < self.min_classes:
            raise ValueError(
                f"Too few classes for {self.name}; expected at least {self.min_classes}; "
                f"received {num_classes}"
            )
        if labels.max(initial=0) >= num_classes:
            raise ValueError(
                f"Label outside the classes; expected 0..{num_classes - 1}; received {labels.max()}"
            )

    def get_config(self) -> dict:
        """Returns the plain-data arguments of the constructor."""
        return {
            "threat": keras.saving.serialize_keras_object(self.threat),
            "num_restarts": self.num_restarts,
            "logit_scale": self.logit_scale,
            "stop_when_broken": self.stop_when_broken,
            "keep": self.keep,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "name": self.name,
        }

    @classmethod
    def from_config(cls, config: dict) -> "Attack":
        """Builds an attack from `get_config()`'s result."""
        config = dict(config)
        config["threat"] = keras.saving.deserialize_keras_object(config["threat"])
        return cls(**config)


def is_wrong(logits, labels):
    """True where the prediction is not the label; logits that are NaN count as wrong."""
    predictions = tf.argmax(logits, axis=-1, output_type=tf.int32)
    has_nan = tf.reduce_any(tf.math.is_nan(logits), axis=-1)
    return has_nan | (predictions != tf.cast(labels, tf.int32))


def seeds_from_content(images, seed: int):
    """Derives a seed for each example from its pixels, where positions in the data are unknown.

    The hash is exact integer arithmetic, so it does not depend on the batch size.
    """
    pixels = tf.cast(tf.reshape(images, [tf.shape(images)[0], -1]) * 65535.0, tf.int32)
    weights = tf.range(1, tf.shape(pixels)[1] + 1, dtype=tf.int32) * 40_503
    content = tf.reduce_sum(pixels * weights, axis=1)
    return tf.stack([tf.fill(tf.shape(content), seed), content], axis=1)


def put_rows(tensor, rows, values):
    """Returns `tensor` with `values` at `rows` of the first axis."""
    return tf.tensor_scatter_nd_update(tensor, rows[:, tf.newaxis], tf.cast(values, tensor.dtype))


def check_positive_integer(name: str, value) -> None:
    """Raises a ValueError unless `value` is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"Invalid {name}; expected an integer >= 1; received {name}={value!r}")


def check_examples(threat: ThreatModel, images, labels) -> tuple[np.ndarray, np.ndarray]:
    """Returns images as float arrays and labels as int32, or says what is wrong with them."""
    images = np.asarray(images)
    labels = np.asarray(labels)
    if not np.issubdtype(images.dtype, np.floating) or images.ndim < 2:
        raise ValueError(
            "Invalid images; expected floating-point values of shape (n, ...); received "
            f"dtype={images.dtype}, shape={images.shape}"
        )
    if labels.shape == (len(images), 1):
        labels = labels[:, 0]
    if labels.shape != (len(images),) or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(
            f"Invalid labels; expected integers of shape ({len(images)},); received "
            f"dtype={labels.dtype}, shape={labels.shape}"
        )
    if len(images) == 0:
        raise ValueError("No examples; expected at least one image; received 0")
    if labels.min() < 0:
        raise ValueError(f"Negative label; expected labels >= 0; received {labels.min()}")
    _check_range(images, *threat.bounds)
    images = images if images.dtype == np.float64 else images.astype(np.float32)
    return np.clip(images, *threat.bounds), labels.astype(np.int32)


def _check_range(images: np.ndarray, low: float, high: float) -> None:
    smallest, largest = float(images.min()), float(images.max())
    if not low - _BOUND_TOLERANCE <= smallest <= largest <= high + _BOUND_TOLERANCE:
        raise ValueError(
            f"Images outside the threat model's bounds (or NaN); expected values in [{low}, {high}], "
            "with any normalisation inside the model; "
            f"received values in [{smallest}, {largest}]"
        )


def check_not_probabilities(logits: np.ndarray) -> None:
    """Refuses outputs that look like a softmax: attacks on probabilities are misleadingly weak."""
    close = _PROBABILITY_TOLERANCE
    rows_sum_to_one = np.all(np.abs(logits.sum(axis=1) - 1.0) < close)
    if rows_sum_to_one and logits.min() > -close and logits.max() < 1.0 + close:
        raise ValueError(
            "The model returns probabilities; expected logits: remove the softmax of the last layer, or pass "
            "`lambda images: tf.math.log(model(images, training=False))`; "
            "received rows that sum to 1"
        )


def _merge_restart(best: list, again: list, rows: np.ndarray) -> None:
    """Keeps, for each example, the restart with the smaller margin; adds up the passes."""
    margins = best[2][rows]
    better = (again[1] & ~best[1][rows]) | (~(best[1][rows] & ~again[1]) & (again[2] < margins))
    for column in (0, 1, 2, 5):
        best[column][rows[better]] = again[column][better]
    for column in (3, 4):
        best[column][rows] += again[column]
