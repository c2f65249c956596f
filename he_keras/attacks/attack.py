"""The contract of an attack: one method to write, everything else is kept here.

An attack file subclasses `Attack` and writes `run`, in TensorFlow operations that accept any batch
size. This class owns the checks, batching, inference mode, dropping of examples that are already
misclassified, restarts, the final projection, the success test, and the counts of passes.

Reproducibility: random draws come from `(seed, example number)`, so that the batch size never
changes a result. Compilation: one trace per (model, image shape, dtype); the batch size is dynamic.
A later call with the same model sees its current weights, but the settings of the attack, and
Python numbers and NumPy arrays inside the model, as they were at the first call.
"""

import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from he_keras import losses
from he_keras.attacks.checks import (
    check_class_numbers,
    check_examples,
    check_flag,
    check_not_probabilities,
    check_positive_integer,
    check_seed,
    check_threat,
)
from he_keras.attacks.result import AttackResult, Crafted, Score, concatenate, copied, merge
from he_keras.attacks.survivors import put_rows, select_rows
from he_keras.attacks.victim import Victim, check_logit_scale
from he_keras.threat import NORMS, ThreatModel

_PROBE_SIZE = 8
KEEP = ("best", "last")


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

    #: Fewest classes that the attack is defined for.
    min_classes = 2
    #: Norms that the attack knows.
    norms: tuple[str, ...] = NORMS
    #: The attack looks for the nearest adversarial image, and `run` returns its distance.
    minimum_norm = False
    #: False for black-box attacks.
    uses_gradient = True
    #: False for attacks that Python has to run operation by operation.
    runs_in_graph = True

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
        check_threat(threat)
        if threat.norm not in self.norms:
            raise ValueError(
                f"{name} is not defined for this norm; expected one of {self.norms}; "
                f"received norm={threat.norm!r}"
            )
        if keep not in KEEP:
            raise ValueError(f"Invalid keep; expected one of {KEEP}; received keep={keep!r}")
        check_positive_integer("num_restarts", num_restarts)
        check_positive_integer("batch_size", batch_size)
        check_seed(seed)
        check_logit_scale(logit_scale)
        check_flag("stop_when_broken", stop_when_broken)
        self.threat = threat
        self.num_restarts = int(num_restarts)
        self.logit_scale = logit_scale if isinstance(logit_scale, str) else float(logit_scale)
        self.stop_when_broken = stop_when_broken
        self.keep = keep
        self.batch_size = int(batch_size)
        self.seed = int(seed)
        self.name = name
        self._compiled: Any = None
        self._compiled_key: tuple | None = None

    def run(self, victim: Victim, images, labels, seeds) -> Crafted:
        """Crafts adversarial images: the one method that an attack writes.

        Args:
            victim: offers `logits(images)` (and `features`, `head`, `scale`).
            images: float tensor `(n, ...)`, n unknown when traced.
            labels: int tensor `(n,)`.
            seeds: int tensor `(n, 2)`, one seed for each example, or `(2,)` for the whole batch.
        """
        raise TypeError(
            f"{type(self).__name__} is not an attack; expected a subclass that defines run()"
        )

    def prepare(self, images, labels) -> None:
        """Sees the first examples of a data set before its batches are attacked.

        An attack that draws on other examples than the one it attacks overrides this, so that the
        batch size does not decide which; here nothing happens.
        """

    def perturb(self, victim: Victim, images, labels, seeds):
        """Returns projected adversarial images, without gradient, of one run on every example.

        Usable inside a training step or another `tf.function`; arguments as for `run`.
        """
        x_adv = self.run(victim.with_fixed_weights(), images, labels, seeds).x_adv
        return tf.stop_gradient(self.threat.project(x_adv, images))

    def __call__(self, model, images, labels, example_ids=None) -> AttackResult:
        """Attacks `model` on `images`.

        Args:
            model: a `keras.Model` or a callable `images -> logits`.
            images: floating-point array `(n, ...)` within the threat model's bounds; `x_adv` is
                float64 if it is, else float32.
            labels: integer array `(n,)`.
            example_ids: numbers that identify the examples in random draws; default 0..n-1. Pass
                the positions in the data set when attacking a part of it.
        """
        images, labels = check_examples(self.threat, images, labels)
        ids = np.arange(len(images)) if example_ids is None else np.asarray(example_ids)
        if ids.shape != labels.shape or not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(
                f"example_ids do not match; expected integers of shape {labels.shape}; "
                f"received dtype={ids.dtype}, shape={ids.shape}"
            )
        self.check_model(model, images[: self.batch_size], labels)
        compiled = self._compile(model)
        parts = []
        for first in range(0, len(images), self.batch_size):
            rows = slice(first, first + self.batch_size)
            part = self._attack_with_restarts(compiled, images[rows], labels[rows], ids[rows])
            parts.append(part)
        return concatenate(parts)

    def _attack_with_restarts(self, compiled, images, labels, ids) -> AttackResult:
        """Runs every restart on the examples that are still classified correctly."""
        best = compiled(images, labels, self._seeds(ids, 0))
        if self.num_restarts == 1:
            return best
        best = copied(best)
        for restart in range(1, self.num_restarts):
            rows = np.flatnonzero(~best.success) if self.stop_when_broken else np.arange(len(ids))
            if not len(rows):
                break
            again = compiled(images[rows], labels[rows], self._seeds(ids[rows], restart))
            merge(best, again, rows, by_distance=self.minimum_norm)
        return best

    def _seeds(self, ids, restart: int) -> np.ndarray:
        draw = np.full(len(ids), self.seed * 10_007 + restart, np.int64)
        return np.stack([draw, ids], axis=1).astype(np.int32)

    def _compile(self, model):
        """Returns the compiled batch function; the last model's is kept."""
        victim = Victim(model, self.logit_scale, streams=None)
        # Every access to a bound method makes a new object: compare its two parts.
        parts = getattr(model, "__self__", None), getattr(model, "__func__", model)
        key = (*map(id, parts), victim.scale, getattr(victim.head, "margin", None))
        if key != self._compiled_key:
            batch_function = functools.partial(self._attack_batch, victim)
            self._compiled = tf.function(batch_function) if self.runs_in_graph else batch_function
            self._compiled_key = key
        compiled = self._compiled

        def call(images, labels, seeds) -> AttackResult:
            tensors = (
                tf.constant(images),
                tf.constant(labels, tf.int32),
                tf.constant(seeds, tf.int32),
            )
            if not self.runs_in_graph:
                outcome = compiled(*tensors)
            else:
                # Tensors of unknown batch size keep one trace for every size.
                outcome = compiled.get_concrete_function(
                    tf.TensorSpec([None, *images.shape[1:]], images.dtype),
                    tf.TensorSpec([None], tf.int32),
                    tf.TensorSpec([None, 2], tf.int32),
                )(*tensors)
            columns = {name: tensor.numpy() for name, tensor in outcome.items()}
            return AttackResult(**{"x_nearest": columns["x_adv"], **columns})

        return call

    def _attack_batch(self, victim: Victim, images, labels, seeds) -> dict[str, Any]:
        """Attacks one batch inside the graph: clean check, attack, scoring."""
        victim = victim.with_fixed_weights()
        clean = score(victim.logits(images), labels)
        rows = tf.range(tf.shape(images)[0])
        if self.stop_when_broken or self.minimum_norm:
            rows = tf.boolean_mask(rows, ~clean.broken)
        # Not every model can run on an empty batch.
        left_alone = self._left_alone(images, clean)
        outcome = tf.cond(
            tf.size(rows) > 0,
            lambda: self._attack_rows(victim, images, labels, seeds, left_alone, rows),
            lambda: left_alone,
        )
        outcome["non_finite"] = ~(clean.finite & outcome.pop("finite"))
        outcome["forward_passes"] += 1
        return outcome

    def _left_alone(self, images, clean: Score) -> dict[str, Any]:
        """The outcome for examples that are not attacked."""
        passes = tf.zeros(tf.shape(images)[:1], tf.int32)
        outcome = {
            "x_adv": images,
            "success": clean.broken,
            "margin": clean.margin,
            "finite": clean.finite,
            "forward_passes": passes,
            "backward_passes": passes,
            "distance": tf.zeros_like(passes, images.dtype),
        }
        return {**outcome, "x_nearest": images} if self.minimum_norm else outcome

    def _attack_rows(self, victim: Victim, images, labels, seeds, left_alone, rows):
        """Attacks some rows; the others keep the outcome of being left alone."""
        chosen, chosen_labels = tf.gather(images, rows), tf.gather(labels, rows)
        crafted = self.run(victim, chosen, chosen_labels, tf.gather(seeds, rows))
        x_adv, scored, passes = self._scored(victim, crafted, chosen, chosen_labels)
        outcome = {
            "x_adv": x_adv,
            "success": scored.broken,
            "margin": scored.margin,
            "finite": scored.finite,
            "forward_passes": crafted.forward_passes + passes,
            "backward_passes": crafted.backward_passes,
            "distance": self.threat.distance(x_adv, chosen),
        }
        if self.minimum_norm:
            outcome |= self._nearest(crafted, chosen, outcome)
        return {name: put_rows(left_alone[name], rows, value) for name, value in outcome.items()}

    def _scored(self, victim: Victim, crafted: Crafted, images, labels) -> tuple[Any, Score, int]:
        """The allowed adversarial images, their scores, and the passes that these cost."""
        if crafted.score is not None:
            return crafted.x_adv, crafted.score, 0
        x_adv = self.threat.project(crafted.x_adv, images)
        if self.minimum_norm:
            # These points lie so close to the decision boundary that even the rounding of a
            # projection could take them back over it.
            within = crafted.distance <= self.threat.epsilon
            x_adv = select_rows(within, crafted.x_adv, x_adv)
        x_adv = tf.where(tf.math.is_finite(x_adv), x_adv, images)
        return x_adv, score(victim.logits(x_adv), labels), 1

    def _nearest(self, crafted: Crafted, images, outcome) -> dict[str, Any]:
        """The nearest adversarial image: the attack's, unless its projection is one too."""
        broken = outcome["success"]
        # Found inside the ball, but not confirmed when scored again: that is no success.
        farther = tf.cast(crafted.distance, images.dtype)
        farther = tf.where(farther > self.threat.epsilon, farther, np.inf)
        x_nearest = select_rows(tf.math.is_finite(farther), crafted.x_adv, images)
        return {
            "distance": tf.where(broken, outcome["distance"], farther),
            "x_nearest": select_rows(broken, outcome["x_adv"], x_nearest),
        }

    def check_model(self, model, images, labels) -> None:
        """Runs the model on a few images: it must return logits that fit labels and attack."""
        images = tf.constant(images[:_PROBE_SIZE])
        # Unscaled: probabilities times a number would no longer look like probabilities.
        logits = Victim(model).logits(images).numpy()
        if logits.ndim != 2 or len(logits) != len(images):
            raise ValueError(
                f"Not a classifier; expected logits of shape ({len(images)}, classes) for "
                f"{len(images)} images; received shape {logits.shape}"
            )
        check_not_probabilities(logits)
        num_classes = logits.shape[1]
        if num_classes < self.min_classes:
            raise ValueError(
                f"Too few classes for {self.name}; expected at least {self.min_classes}; "
                f"received {num_classes}"
            )
        check_class_numbers(labels, num_classes)

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


def score(logits, labels, dtype=None) -> Score:
    """Judges logits; `dtype` is that of the margins, by default the logits'."""
    finite = tf.reduce_all(tf.math.is_finite(logits), axis=1)
    margin = losses.margin(logits, labels)
    return Score(is_wrong(logits, labels), tf.cast(margin, dtype or margin.dtype), finite)


def is_wrong(logits, labels):
    """True where the prediction is not the label; logits that are NaN count as wrong."""
    predictions = tf.argmax(logits, axis=-1, output_type=tf.int32)
    has_nan = tf.reduce_any(tf.math.is_nan(logits), axis=-1)
    # `!=` would lose the static shape where only one side knows the batch size.
    return has_nan | tf.not_equal(predictions, tf.cast(labels, tf.int32))


def seeds_from_content(images, seed: int):
    """Derives a seed for each example from its pixels, where positions in the data are unknown.

    The hash is exact integer arithmetic, so it does not depend on the batch size.
    """
    pixels = tf.cast(tf.reshape(images, [tf.shape(images)[0], -1]) * 65535.0, tf.int32)
    weights = tf.range(1, tf.shape(pixels)[1] + 1, dtype=tf.int32) * 40_503
    content = tf.reduce_sum(pixels * weights, axis=1)
    return tf.stack([tf.fill(tf.shape(content), seed), content], axis=1)
