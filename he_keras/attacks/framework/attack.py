"""The contract of an attack: one method to write, everything else is kept here.

An attack file subclasses `Attack` and writes `run`, in TensorFlow operations that accept any batch
size. This class owns the checks, batching, inference mode, restarts, the final projection, the
success test and the counts of passes. It also drops examples that are broken from the start.

Reproducibility: random draws come from `(seed, example number)`, so that the batch size never
changes a result. Compilation: one trace per (model, image shape, dtype); the batch size is dynamic.
A later call with the same model sees its current weights and settings. A callable is traced again
if it answers differently from its trace, because a Python value inside it has changed. The settings
of an attack cannot change, so that what it reports is what ran.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from he_keras.arguments import (
    check_choice,
    check_flag,
    check_positive_integer,
    check_seed,
    check_takes,
)
from he_keras.attacks.framework.agreement import (
    Probe,
    agreed,
    compilation_key,
    compiled_logits,
    is_current,
    probe,
    standing_still,
)
from he_keras.attacks.framework.batch_function import BatchFunction
from he_keras.attacks.framework.pass_counter import COUNTER
from he_keras.attacks.framework.result import (
    AttackResult,
    Crafted,
    Goal,
    Score,
    check_crafted,
    checked_targets,
    checked_values,
    concatenate,
    copied,
    merge,
)
from he_keras.attacks.framework.rows import select_rows, under_xla
from he_keras.attacks.framework.victim import (
    Victim,
    check_class_numbers,
    check_logit_scale,
    check_logits,
)
from he_keras.balls import NORMS
from he_keras.configurable import Configurable, Sealed, constructor_arguments, is_own
from he_keras.losses import MIN_CLASSES
from he_keras.threat import ThreatModel, bounds_of, check_examples, check_threat

KEEP = ("best", "last")
#: How far the seeds of two attacks lie apart. There are fewer restarts than this, so that no
#: restart of one seed draws the numbers of the next seed; a prime, so that seeds which differ by a
#: round number do not meet either.
_RESTARTS_PER_SEED = 10_007


class _Functions(NamedTuple):
    """Of arrays: the score of images, and the attack on images that are to be broken."""

    score: Callable
    craft: BatchFunction


class Attack(Configurable, Sealed):
    """Base class of all attacks.

    A subclass sets its attributes in its `__init__`. Afterwards only attributes whose names begin
    with an underscore can be set.

    Args:
        threat: the threat model.
        num_restarts: independent repetitions; later ones run only on examples not yet broken.
        logit_scale: "model" takes the logits as they are. "unit" divides the scale of a cosine head
            out, as the HE paper's protocol does. A number sets that scale; see `Victim`.
        stop_when_broken: stop working on an example as soon as it is misclassified. False runs
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
    #: True for attacks that can be given the classes to be predicted.
    has_targeted_form = False
    #: The attack looks for the nearest adversarial image, and `run` returns its distance.
    minimum_norm = False
    #: False for black-box attacks.
    uses_gradient = True
    #: False for attacks that Python has to run operation by operation.
    runs_in_graph = True
    #: False for attacks that cannot be a part of another function, as in a training step.
    runs_inside_graphs = True
    #: False for attacks whose shapes change from step to step.
    runs_under_xla = True

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
        check_choice("keep", keep, KEEP)
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
        self._proven: Probe | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What a copy keeps: not the compiled code."""
        return {**vars(self), "_compiled": None, "_compiled_key": None}

    def run(self, victim: Victim, images, labels, seeds) -> Crafted:
        """Crafts adversarial images: the one method that an attack writes.

        An attack with a targeted form has one more argument, `targets=None`: int tensor `(n,)`, the
        classes to be predicted.

        Args:
            victim: offers `logits(images)` (and `features`, `head`, `scale`).
            images: float tensor `(n, ...)`, n unknown when traced.
            labels: int tensor `(n,)`.
            seeds: int tensor `(n, 2)`, one seed for each example, or `(2,)` for the whole batch.
        """
        raise TypeError(
            f"{type(self).__name__} is not an attack; expected a subclass that defines run()"
        )

    def most_passes(self, num_classes: int) -> int:
        """Returns how many passes, forward and backward, an image takes that holds to the end.

        Example:
            >>> import he_keras as he
            >>> attack = he.attacks.get("pgd-20", he.ThreatModel("linf", 0.1), num_restarts=3)
            >>> attack.most_passes(num_classes=10)
            123
        """
        return self.num_restarts * self.passes_of_run(num_classes)

    def passes_of_run(self, num_classes: int) -> int:
        """Returns the same of a single run; an attack whose steps cost otherwise overrides it.

        Here a step takes a forward and a backward pass, and the image is scored once at the end.
        """
        return 2 * getattr(self, "num_steps", 1) + 1

    def prepare(self, images, labels) -> None:
        """Sees the first examples of a data set before its batches are attacked.

        An attack that needs other examples than the one it attacks overrides this, so that the
        batch size does not decide which ones it gets. Here nothing happens.
        """

    def perturb(self, victim: Victim, images, labels, seeds, targets=None):
        """Returns allowed adversarial images, without gradient, of one run on every example.

        It can be used inside a training step or another `tf.function`, also under XLA. Its
        arguments are those of `run`. XLA draws other random numbers, and broken examples save no
        time there.
        """
        self.check_runs_inside_graphs(under_xla())
        goal = Goal.of(labels, targets)
        crafted = self._run_towards(goal, victim.for_many_passes(), images, seeds)
        return tf.stop_gradient(self._allowed(crafted, images))

    def _run_towards(self, goal: Goal, victim: Victim, images, seeds) -> Crafted:
        """Calls `run`, which needs to know of targets only where there are some."""
        targets = {"targets": goal.targets} if goal.is_targeted else {}
        crafted = self.run(victim, images, goal.labels, seeds, **targets)
        check_crafted(crafted, images, self.name, self.minimum_norm)
        return checked_values(crafted, images, self.name) if is_own(self) else crafted

    def check_runs_inside_graphs(self, xla: bool = False) -> None:
        """Raises an error if this attack cannot run inside another function.

        Args:
            xla: whether XLA compiles that function.
        """
        if not self.runs_inside_graphs:
            raise TypeError(
                f"{self.name} cannot run inside another graph, as evaluate() does; expected a "
                f"single attack, such as cw-linf-20; received {type(self).__name__}"
            )
        if self.num_restarts != 1:
            raise ValueError(
                f"{self.name} runs only once inside another graph, as evaluate() does; expected "
                "num_restarts=1 (evaluate_robustness makes restarts); "
                f"received num_restarts={self.num_restarts}"
            )
        if xla and not self.runs_under_xla:
            raise ValueError(
                f"XLA cannot compile {self.name} in {self.threat.norm}, whose shapes change from "
                "step to step; expected jit_compile=False or another attack, such as cw-linf-20; "
                f"received {type(self).__name__}"
            )

    def __call__(self, model, images, labels, example_ids=None, *, targets=None) -> AttackResult:
        """Attacks `model` on `images`.

        Args:
            model: a `keras.Model` or a callable `images -> logits`.
            images: floating-point array `(n, ...)` within the threat model's bounds; `x_adv` is
                float64 if it is, else float32.
            labels: integer array `(n,)`.
            example_ids: numbers that identify the examples in random draws; default 0..n-1. Pass
                the positions in the data set when attacking a part of it.
            targets: integer array `(n,)`, the class that each image shall be predicted as; None
                for any class but its label.
        """
        images, labels = check_examples(self.threat, images, labels)
        goal = self.goal_of(labels, targets)
        ids = np.arange(len(images)) if example_ids is None else np.asarray(example_ids)
        if ids.shape != labels.shape or not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(
                f"example_ids do not match; expected integers of shape {labels.shape}; "
                f"received dtype={ids.dtype}, shape={ids.shape}"
            )
        with standing_still():
            self.check_model(model, images[: self.batch_size], labels)
            victim, warnings = agreed(model, images, self.logit_scale)
            found = probe(model, images)
            self._check_target_classes(goal, found.logits.shape[1])
            attack_batch = self._compile(victim, found)
        parts = []
        for first in range(0, len(images), self.batch_size):
            rows = slice(first, first + self.batch_size)
            part = self._attack_with_restarts(
                attack_batch, images[rows], goal.rows(rows), ids[rows]
            )
            parts.append(part)
        return dataclasses.replace(concatenate(parts), warnings=warnings)

    def goal_of(self, labels: np.ndarray, targets) -> Goal:
        """Returns the goal of an attack on these examples; an error where it cannot be aimed at."""
        if targets is not None and not self.has_targeted_form:
            raise ValueError(
                f"{self.name} has no targeted form; expected targets=None, or an attack that has "
                f"one, such as cw-linf-20; received targets={targets!r:.60}"
            )
        return Goal.of(labels, checked_targets(targets, labels))

    def _check_target_classes(self, goal: Goal, num_classes: int) -> None:
        if goal.is_targeted and getattr(self, "loss", None) == "dlr":
            self._check_num_classes(num_classes, MIN_CLASSES["dlr-targeted"])
        check_class_numbers(goal.classes, num_classes)

    def _attack_with_restarts(self, attack_batch, images, goal: Goal, ids) -> AttackResult:
        """Runs every restart on the examples that are not broken yet."""
        best = attack_batch(images, goal, self._seeds(ids, 0))
        if self.num_restarts == 1:
            return best
        best = copied(best)
        for restart in range(1, self.num_restarts):
            rows = np.flatnonzero(~best.success) if self.stop_when_broken else np.arange(len(ids))
            if not len(rows):
                break
            again = attack_batch(images[rows], goal.rows(rows), self._seeds(ids[rows], restart))
            merge(best, again, rows, by_distance=self.minimum_norm)
        return best

    def _seeds(self, ids, restart: int) -> np.ndarray:
        draw = np.full(len(ids), self.seed * _RESTARTS_PER_SEED + restart, np.int64)
        return np.stack([draw, ids], axis=1).astype(np.int32)

    def _compile(self, victim: Victim, found: Probe):
        """Returns the function that attacks a batch. What the last victim had compiled is kept.

        It is compared with the model once after each probe.
        """
        key = (*compilation_key(victim), self.runs_in_graph)
        is_unproven = key == self._compiled_key and found is not self._proven
        if key != self._compiled_key:
            self._compiled = self._functions(victim, key)
        self._compiled_key, self._proven = key, found

        def call(images, goal: Goal, seeds) -> AttackResult:
            nonlocal is_unproven
            clean = self._compiled.score(images, goal)
            if is_unproven and not is_current(found, victim, images, goal, clean.margin):
                self._compiled = self._functions(victim, key)
                clean = self._compiled.score(images, goal)
            is_unproven = False
            return self._attack_batch(images, goal, seeds, clean)

        return call

    def _functions(self, victim: Victim, key) -> _Functions:
        """What is to be compiled; all attacks on a victim can share its logits."""
        logits = compiled_logits(victim, self.name, self.runs_in_graph)
        victim = victim.counted()

        def score(images, goal: Goal) -> Score:
            answer = COUNTER.watched(tf.constant(logits(images)))
            return tf.nest.map_structure(np.asarray, goal.score(answer))

        # Our attacks have no Python `if` or `while` on tensors, and Keras never runs layers with
        # autograph. Without it, tracing takes a fifth less time.
        autograph = is_own(self) or not isinstance(victim.model, keras.layers.Layer)
        craft = functools.partial(self._craft, victim)
        return _Functions(score, BatchFunction(craft, self.name, self.runs_in_graph, autograph))

    def _attack_batch(self, images, goal: Goal, seeds, clean: Score) -> AttackResult:
        """Attacks one batch, whose clean images were scored."""
        outcome = self._left_alone(images, clean)
        rows = np.arange(len(images))
        if self.stop_when_broken or self.minimum_norm:
            rows = np.flatnonzero(~clean.broken)
        # Not every model can run on an empty batch.
        if len(rows):
            attacked = self._attack_rows(images[rows], goal.rows(rows), seeds[rows])
            for name, column in attacked.items():
                outcome[name][rows] = column
        outcome["non_finite"] = ~(clean.finite & outcome.pop("finite"))
        outcome["forward_passes"] += 1
        return AttackResult(**{"x_nearest": outcome["x_adv"], **outcome})

    def _left_alone(self, images, clean: Score) -> dict[str, Any]:
        """The outcome for examples that are not attacked."""
        outcome: dict[str, Any] = {
            "x_adv": images.copy(),
            "success": clean.broken.copy(),
            "margin": clean.margin.copy(),
            "finite": clean.finite.copy(),
            "forward_passes": np.zeros(len(images), np.int32),
            "backward_passes": np.zeros(len(images), np.int32),
            "distance": np.zeros(len(images), images.dtype),
        }
        return {**outcome, "x_nearest": images.copy()} if self.minimum_norm else outcome

    def _attack_rows(self, images, goal: Goal, seeds) -> dict[str, np.ndarray]:
        """Attacks these images, and scores what was found where the attack has not done so."""
        crafted, distance, nearest = self._compiled.craft(images, goal, seeds)
        scored = crafted.score
        outcome = {
            "x_adv": crafted.x_adv,
            "forward_passes": crafted.forward_passes,
            "backward_passes": crafted.backward_passes,
            "distance": distance,
        }
        if scored is None:
            scored = self._compiled.score(crafted.x_adv, goal)
            outcome["forward_passes"] = crafted.forward_passes + 1
        outcome |= {"success": scored.broken, "margin": scored.margin, "finite": scored.finite}
        if self.minimum_norm:
            outcome |= self._nearest(nearest, crafted.distance, images, outcome)
        return outcome

    def _craft(self, victim: Victim, images, goal: Goal, seeds) -> tuple[Crafted, Any, Any]:
        """Runs the attack; returns also how far its allowed images lie, and what it found itself.

        This is what is compiled.
        """
        crafted = self._run_towards(goal, victim.for_many_passes(), images, seeds)
        x_adv = self._allowed(crafted, images)
        nearest = crafted.x_adv if self.minimum_norm else None
        return crafted._replace(x_adv=x_adv), self.threat.distance(x_adv, images), nearest

    def _allowed(self, crafted: Crafted, images):
        """The adversarial images inside ball and bounds; NaN and infinity become the image's."""
        if crafted.score is not None:
            return crafted.x_adv
        x_adv = self.threat.project(crafted.x_adv, images)
        if self.minimum_norm:
            # These points lie so close to the decision boundary that even the rounding of a
            # projection could take them back over it.
            within = crafted.distance <= self.threat.epsilon
            x_adv = select_rows(within, crafted.x_adv, x_adv)
        return tf.where(tf.math.is_finite(x_adv), x_adv, images)

    def _nearest(self, nearest, distance, images, outcome) -> dict[str, np.ndarray]:
        """The nearest adversarial image: the attack's, unless its projection is one too."""
        broken, farther = outcome["success"], distance.astype(images.dtype)
        # Found inside the ball, but not confirmed when scored again: that is no success.
        farther = np.where(farther > self.threat.epsilon, farther, np.inf)
        x_nearest = images.copy()
        is_found = np.isfinite(farther)
        x_nearest[is_found] = nearest[is_found]
        x_nearest[broken] = outcome["x_adv"][broken]
        return {
            "distance": np.where(broken, outcome["distance"], farther),
            "x_nearest": x_nearest,
        }

    def check_model(self, model, images, labels) -> None:
        """Runs the model on a few images: it must return logits that fit labels and attack."""
        check_takes(self.run, f"{type(self).__name__}.run", "victim", "images", "labels", "seeds")
        bounds_of(model, self.threat.bounds)
        found = probe(model, images)
        logits = found.logits
        check_logits(logits, len(found.images), model)
        self._check_num_classes(logits.shape[1], self.min_classes)
        check_class_numbers(labels, logits.shape[1])

    def _check_num_classes(self, received: int, needed: int) -> None:
        if received < needed:
            raise ValueError(
                f"Too few classes for {self.name}; expected at least {needed}; received {received}"
            )

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments as plain data.

        An argument that is no attribute of the same name is left out.
        """
        kept = {
            name: getattr(self, name)
            for name in constructor_arguments(type(self))
            if hasattr(self, name)
        }
        return {**kept, "threat": keras.saving.serialize_keras_object(self.threat)}
