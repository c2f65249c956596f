"""Several attacks, one after the other, each on the examples that the earlier ones left unbroken.

The order is attack-major: one attack runs on all survivors before the next begins. Every attack
starts from the clean image. An example counts as broken when any attack breaks it.
"""

import dataclasses
import time
from collections.abc import Sequence

import keras
import numpy as np

from he_keras.attacks.attack import Attack
from he_keras.attacks.checks import check_examples
from he_keras.attacks.indicators import late_warning, model_warnings
from he_keras.attacks.result import AttackResult, copied, merge
from he_keras.attacks.victim import Victim


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
        warnings: what makes the result doubtful; see `he_keras.attacks.indicators`.
    """

    stages: tuple[Stage, ...]
    broken_by: np.ndarray
    warnings: tuple[str, ...]


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

    #: The components average over the randomness of the model.
    allows_random = False
    #: What every report says beside the result.
    note = ""

    def __init__(self, threat, components: Sequence[Attack], name: str = "ensemble", **kwargs):
        super().__init__(threat, name=name, **kwargs)
        self.components = tuple(components)
        _check_components(self.components, threat)
        self.min_classes = max(attack.min_classes for attack in self.components)

    def __call__(self, model, images, labels, example_ids=None) -> EnsembleResult:
        """Attacks `model` on `images`; arguments as for every attack."""
        images, labels = check_examples(self.threat, images, labels)
        ids = np.arange(len(labels)) if example_ids is None else np.asarray(example_ids)
        self.check_model(model, images[: self.batch_size], labels)
        warnings = self.warnings(model, images, labels)
        best: AttackResult | None = None
        rows = np.arange(len(labels))
        broken_by = np.full(len(labels), -1)
        stages = []
        for number, attack in enumerate(self.components):
            began = time.monotonic()
            result = attack(model, images[rows], labels[rows], example_ids=ids[rows])
            broken_by[rows[result.success]] = number
            bounded = _bounded(self.threat, result, images[rows])
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
        }
        return EnsembleResult(
            **columns, stages=tuple(stages), broken_by=broken_by, warnings=tuple(warnings)
        )

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

    def run(self, victim: Victim, images, labels, seeds):
        """Refuses: an ensemble works on whole sets of examples, not inside a training step."""
        raise TypeError(
            f"{self.name} runs several attacks and cannot run inside another graph; expected "
            "a single attack here (for example cw-linf-20); received an Ensemble"
        )

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
        config = dict(config)
        if "components" in config:
            deserialize = keras.saving.deserialize_keras_object
            config["components"] = [deserialize(attack) for attack in config["components"]]
        return super().from_config(config)  # type: ignore[return-value]


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
