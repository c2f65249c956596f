"""Several attacks, one after the other, each on the examples that the earlier ones left unbroken.

One attack runs on all survivors before the next one begins. Every attack starts from the clean
image. An example counts as broken if any attack breaks it.

The result comes with AutoAttack's cheap signs that a figure cannot be trusted (Croce & Hein 2020,
and its later releases). A model answers differently each time, gradients are exactly zero, or a
black-box attack succeeds after gradients have failed.
"""

import dataclasses
import time
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from he_keras.attacks.framework.agreement import agreed, compiled_logits, standing_still
from he_keras.attacks.framework.attack import Attack
from he_keras.attacks.framework.gradients import loss_and_gradient
from he_keras.attacks.framework.result import AttackResult, copied, is_wrong, merge
from he_keras.attacks.framework.victim import Victim
from he_keras.losses import cw_margin
from he_keras.precision import LEAST_CHANGE, change_by_rounding
from he_keras.threat import check_examples


@dataclasses.dataclass(frozen=True)
class Stage:
    """What one attack of an ensemble added.

    Attributes:
        name: the attack.
        attacked: how many examples it was run on.
        broken: how many of them it broke.
        robust_accuracy: share of all examples that is left after it.
        seconds: time spent; it does not count when stages are compared.
        forward_passes: sum over the examples it was run on.
        backward_passes: sum over the examples it was run on.
    """

    name: str
    attacked: int
    broken: int
    robust_accuracy: float
    seconds: float = dataclasses.field(compare=False)
    forward_passes: int
    backward_passes: int


@dataclasses.dataclass(frozen=True)
class EnsembleResult(AttackResult):
    """An `AttackResult`, and what each attack added to it.

    For an example that no attack broke, `x_adv` is the point of smallest margin that any of them
    returned. `distance` and `x_nearest` are those of `x_adv`.

    Attributes:
        stages: one entry for each attack that was run.
        broken_by: number of the attack that broke each example; -1 where none did, 0 where the
            example was misclassified from the start.
        warnings: what makes the result doubtful; see `Ensemble.warnings`.
    """

    stages: tuple[Stage, ...] = ()
    broken_by: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, int))


@keras.saving.register_keras_serializable(package="he_keras")
class Ensemble(Attack):
    """Runs attacks in turn, each on the survivors of those before it.

    Assumes about the model what its attacks assume. Cost: the sum of theirs, on fewer examples each
    time.

    Args:
        threat: the threat model; the attacks must have the same.
        components: the attacks, in order.
        **kwargs: see `Attack`; `batch_size`, `seed` and `logit_scale` are those of the components.

    Example:
        >>> import he_keras as he, numpy as np, tensorflow as tf
        >>> threat = he.ThreatModel("linf", 0.1)
        >>> attacks = [he.attacks.FGSM(threat), he.attacks.CWLinf(threat, 5)]
        >>> weights = tf.constant([[1.0, -1.0], [0.5, -0.5]])
        >>> images = np.array([[0.5, 0.5], [0.1, 0.05]], "float32")
        >>> both = he.attacks.Ensemble(threat, attacks)
        >>> both(lambda images: (images - 0.1) @ weights, images, np.array([0, 0])).success.tolist()
        [False, True]
    """

    # An ensemble works on whole sets of examples.
    runs_inside_graphs = False
    #: The components average over the randomness of the model.
    allows_random = False
    #: What every report says with the result.
    note = ""

    def __init__(self, threat, components: Sequence[Attack], name: str = "ensemble", **kwargs):
        super().__init__(threat, name=name, **kwargs)
        self.components = tuple(components)
        _check_components(self.components, threat)
        self.min_classes = max(attack.min_classes for attack in self.components)
        self.has_targeted_form = all(attack.has_targeted_form for attack in self.components)

    def __call__(self, model, images, labels, example_ids=None, *, targets=None) -> EnsembleResult:
        """Attacks `model` on `images`; arguments as for every attack."""
        # Its attacks would each probe the model again.
        with standing_still():
            return self._attacked(model, images, labels, example_ids, targets)

    def _attacked(self, model, images, labels, example_ids, targets) -> EnsembleResult:
        images, labels = check_examples(self.threat, images, labels)
        goal = self.goal_of(labels, targets)
        ids = np.arange(len(labels)) if example_ids is None else np.asarray(example_ids)
        self.check_model(model, images[: self.batch_size], labels)
        warnings = self.warnings(model, images, labels)
        best: AttackResult | None = None
        rows = np.arange(len(labels))
        broken_by = np.full(len(labels), -1)
        stages = []
        for number, attack in enumerate(self.components):
            began = time.monotonic()
            part = goal.rows(rows)
            options = {"targets": part.targets} if part.is_targeted else {}
            # At first these are all examples: no copy of a large array.
            given = images if len(rows) == len(images) else images[rows]
            result = attack(model, given, part.labels, example_ids=ids[rows], **options)
            broken_by[rows[result.success]] = number
            bounded = _bounded(self.threat, result, given)
            if best is None:
                best = copied(bounded)
            else:
                merge(best, bounded, rows, by_distance=False)
            stages.append(_stage(attack.name, result, best, time.monotonic() - began))
            warnings += self.stage_warnings(number, stages[-1].broken, len(labels))
            rows = np.flatnonzero(~best.success)
            if not len(rows):
                break
        columns = {
            field.name: getattr(best, field.name) for field in dataclasses.fields(AttackResult)
        } | {"warnings": tuple(warnings)}
        return EnsembleResult(**columns, stages=tuple(stages), broken_by=broken_by)

    def most_passes(self, num_classes: int) -> int:
        """Returns the sum over the attacks, see `Attack`."""
        return sum(attack.most_passes(num_classes) for attack in self.components)

    def check_model(self, model, images, labels) -> None:
        """Checks what the ensemble and each of its attacks need."""
        super().check_model(model, images, labels)
        for attack in self.components:
            attack.check_model(model, images, labels)

    def warnings(self, model, images, labels) -> list[str]:
        """Returns what speaks against attacking this model by gradients."""
        return model_warnings(model, images, labels, self.logit_scale, self.allows_random)

    def stage_warnings(self, number: int, newly_broken: int, num_examples: int) -> list[str]:
        """Returns what the success of one component says of those before it."""
        earlier, attack = self.components[:number], self.components[number]
        if attack.uses_gradient or not any(before.uses_gradient for before in earlier):
            return []
        return late_warning(attack.name, newly_broken, num_examples)

    @staticmethod
    def shared_options(options: dict) -> dict:
        """Returns those of an ensemble's options that it hands to its components."""
        names = ("batch_size", "seed", "logit_scale")
        return {name: options[name] for name in names if name in options}

    def get_config(self) -> dict:
        """Returns the plain-data arguments of the constructor."""
        serialize = keras.saving.serialize_keras_object
        return {
            **super().get_config(),
            "components": [serialize(attack) for attack in self.components],
        }

    @classmethod
    def from_config(cls, config: dict) -> "Ensemble":
        """Builds an ensemble from `get_config()`'s result."""
        if "components" in config:
            attacks = [keras.saving.deserialize_keras_object(each) for each in config["components"]]
            config = {**config, "components": attacks}
        return super().from_config(config)


def parts(attack: Attack) -> tuple[Attack, ...]:
    """Returns an ensemble's attacks, or the attack itself."""
    return getattr(attack, "components", (attack,))


def _check_components(components: tuple, threat) -> None:
    if not components or not all(isinstance(attack, Attack) for attack in components):
        raise TypeError(
            f"Invalid components; expected at least one Attack; received components={components!r}"
        )
    threats = {attack.threat for attack in components}
    if threats != {threat}:
        raise ValueError(
            f"The attacks differ in their threat model; expected {threat!r}; received {threats}"
        )


def _bounded(threat, result: AttackResult, images: np.ndarray) -> AttackResult:
    """The result of a minimum-norm attack with the distance of `x_adv`, as bounded attacks have."""
    if result.x_nearest is result.x_adv:
        return result
    distance = np.asarray(threat.distance(result.x_adv, images))
    return dataclasses.replace(result, distance=distance, x_nearest=result.x_adv)


def _stage(name: str, result: AttackResult, best: AttackResult, seconds: float) -> Stage:
    return Stage(
        name=name,
        attacked=len(result.success),
        broken=int(result.success.sum()),
        robust_accuracy=best.robust_accuracy,
        seconds=round(seconds, 2),
        forward_passes=int(result.forward_passes.sum()),
        backward_passes=int(result.backward_passes.sum()),
    )


#: Bounds the cost of the warnings; one example that changes between passes is enough.
_NUM_PROBES = 64
#: As many passes as AutoAttack takes to find out whether a model is random.
_REPEATS = 5
#: AutoAttack's threshold for Square: more than 20 of 10,000 images.
_LATE_SHARE = 0.002


def model_warnings(model, images, labels, logit_scale="model", allows_random=False) -> list[str]:
    """Returns what speaks against attacking this model by gradients, from a few examples.

    This judges the path that attacks take. It costs 5 forward passes and 1 backward pass on at most
    64 examples, in addition to the passes of `agreement.probe`.

    Args:
        model: a `keras.Model` or a callable `images -> logits`.
        images: array `(n, ...)`; the first 64 are used.
        labels: array `(n,)`.
        logit_scale: see `Victim`.
        allows_random: the attack averages over randomness, so that this is no warning.
    """
    images, labels = images[:_NUM_PROBES], labels[:_NUM_PROBES]
    victim, warnings = agreed(model, images, logit_scale)
    found, labels = [*warnings], tf.constant(labels, tf.int32)
    logits, _, gradient = loss_and_gradient(
        victim.for_many_passes(), lambda logits: cw_margin(logits, labels), tf.constant(images)
    )
    if not allows_random and _changes_between_passes(victim, images, logits.numpy()):
        found.append(
            "the model answers differently each time: single gradients mislead attacks; use "
            "autoattack-rand, or eot_samples > 1"
        )
    share = _zero_gradient_share(gradient, ~is_wrong(logits, labels))
    if share > 0:
        found.append(
            f"the gradient of the margin is exactly zero for {share:.0%} of the examples tried: "
            "gradient attacks cannot move them, only black-box and transfer attacks can"
        )
    return found


def late_warning(name: str, newly_broken: int, num_examples: int) -> list[str]:
    """Returns a warning where a black-box attack broke what gradient attacks had left."""
    if newly_broken <= _LATE_SHARE * num_examples:
        return []
    return [
        f"{name}, which uses no gradient, broke {newly_broken} examples that every gradient attack "
        "before it had left: the gradients are probably masked"
    ]


def _changes_between_passes(victim: Victim, images: np.ndarray, logits: np.ndarray) -> bool:
    """Whether more passes give other logits than these, by more than rounding explains."""

    def directions(logits):
        logits = logits.astype(np.float64)
        return logits / (np.linalg.norm(logits, axis=1, keepdims=True) + 1e-10)

    again, first = compiled_logits(victim, "ensemble"), directions(logits)
    change = max(
        np.linalg.norm(directions(again(images)) - first, axis=1).max(initial=0.0)
        for _ in range(_REPEATS - 1)
    )
    # What else rounding explains may cost a trace of the model.
    return bool(change > LEAST_CHANGE and change > change_by_rounding(victim, images))


def _zero_gradient_share(gradient, right) -> float:
    """Share of the correctly classified examples whose margin has no gradient at all."""
    gradient, right = gradient.numpy(), right.numpy()
    is_zero = ~np.any(gradient, axis=tuple(range(1, gradient.ndim)))
    return float(is_zero[right].mean()) if right.any() else 0.0
