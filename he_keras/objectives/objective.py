"""The contract of a training objective: what to craft, and which loss to minimise.

An objective file writes `craft` and `forward`. Both are plain functions of their arguments, so that
a stored adversarial batch can be fed in. `HEAdversarialModel` takes care of gradients, weights,
replicas and metrics. Crafting runs the network in inference mode unless an objective says
otherwise.

The margin of an HE head enters the training loss only (`Objective.cross_entropy`); attacks inside
training see the scaled logits without it, as in the released code of the HE paper.

Radius and step size may follow schedules of the training step (PAS: Liu et al. 2020, "On the loss
landscape of adversarial training"). `at_step` returns the objective of one step, with scalar
tensors in their place: `craft` and `forward` read `self.threat.epsilon`, `self.step_size` and
`self.attack`, and need not know.
"""

import copy
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras.optimizers.schedules import LearningRateSchedule

from he_keras import losses
from he_keras.attacks.checks import check_number
from he_keras.attacks.projected_gradient import ProjectedGradient
from he_keras.attacks.victim import Victim
from he_keras.threat import ThreatModel, with_radius

_SMALL_RADIUS = 1e-6


class TrainingPass(NamedTuple):
    """Per-example losses, and the logits that they were computed from.

    Attributes:
        losses: shape `(n,)`, to be minimised on average.
        logits: logits of the examples trained on (adversarial where there are any).
        clean_logits: logits of the clean images, where the objective computes them.
    """

    losses: Any
    logits: Any
    clean_logits: Any = None


class Objective:
    """Base class of training objectives.

    With a schedule, `fit` reports the radius of the last batch as `epsilon`. Evaluation never
    follows the schedule: `robust_accuracy` is measured at the threat model's own epsilon, where
    PAS's code tests at the radius of the current epoch, and so reports too much early on.

    Args:
        threat: the threat model trained against; None for training without adversary.
        label_smoothing: r of `losses.smoothed_cross_entropy`; 0 for none.
        epsilon_schedule: a Keras `LearningRateSchedule` that gives the radius e_t of training step
            t, 0 included. Steps are counted as for the learning rate: by batches, and by updates
            where an objective makes several of a batch (FreeAT); a batch has one radius.
        step_size_schedule: the same for the adversary's step size. Default: with an epsilon
            schedule, the step size times `e_t / (epsilon + 1e-6)`, as in PAS. A numeric radius of
            the random start is scaled likewise.

    Example:
        >>> import he_keras as he
        >>> from keras.optimizers.schedules import CosineDecay
        >>> growing = CosineDecay(0.0, 1000, warmup_target=0.4, warmup_steps=600)
        >>> objective = he.objectives.PGDAT(
        ...     he.ThreatModel("linf", 0.4), step_size=0.1, epsilon_schedule=growing
        ... )
        >>> now = objective.at_step(300)
        >>> round(float(now.threat.epsilon), 3), round(float(now.attack.step_size), 3)
        (0.2, 0.05)
    """

    #: Which training-mode passes update batch-norm statistics, in order.
    batch_norm_passes: tuple[str, ...] = ("adversarial",)
    #: Whether XLA can compile the training step.
    supports_jit = True

    def __init__(
        self,
        threat: ThreatModel | None = None,
        label_smoothing: float = 0.0,
        epsilon_schedule: LearningRateSchedule | None = None,
        step_size_schedule: LearningRateSchedule | None = None,
    ) -> None:
        if threat is not None and not isinstance(threat, ThreatModel):
            raise TypeError(f"Invalid threat; expected a ThreatModel; received threat={threat!r}")
        check_number("label_smoothing", label_smoothing, 0.0)
        if label_smoothing >= 1.0:
            raise ValueError(
                "Invalid label_smoothing; expected a number in [0, 1); "
                f"received label_smoothing={label_smoothing!r}"
            )
        _check_schedule("epsilon_schedule", epsilon_schedule, threat)
        _check_schedule("step_size_schedule", step_size_schedule, threat)
        self.threat = threat
        self.label_smoothing = float(label_smoothing)
        self.epsilon_schedule = epsilon_schedule
        self.step_size_schedule = step_size_schedule

    def at_step(self, step) -> "Objective":
        """Returns the objective of a training step: this one, or with schedules a resized copy.

        The copy shares all state with this objective. One that wraps another objective overrides
        this, to pass it on.
        """
        if self.epsilon_schedule is None and self.step_size_schedule is None:
            return self
        now: Any = copy.copy(self)
        step, ratio = tf.convert_to_tensor(step), None
        if self.threat is not None and self.epsilon_schedule is not None:
            epsilon = tf.maximum(tf.cast(self.epsilon_schedule(step), tf.float32), 0.0)
            ratio = epsilon / (self.threat.epsilon + _SMALL_RADIUS)
            now.threat = with_radius(self.threat, epsilon)
        for name, value in vars(self).items():
            if isinstance(value, ProjectedGradient):
                attack: Any = copy.copy(value)
                attack.threat = now.threat
                attack.random_start = _scaled_start(value.random_start, ratio)
                attack.step_size = self._step_size_at(step, value.step_size, ratio)
                setattr(now, name, attack)
            elif name == "step_size":
                now.step_size = self._step_size_at(step, value, ratio)
        return now

    def _step_size_at(self, step, nominal, ratio):
        if self.step_size_schedule is not None:
            return tf.cast(self.step_size_schedule(step), tf.float32)
        return nominal * ratio

    def logs(self) -> dict:
        """Returns what `fit` reports beside metrics: the radius, where it follows a schedule."""
        if self.threat is None or not tf.is_tensor(self.threat.epsilon):
            return {}
        return {"epsilon": self.threat.epsilon}

    def build(self, image_shape: tuple[int, ...]) -> None:
        """Creates state that depends on the image shape; most objectives have none."""

    def craft(self, model, images, labels, seed=(0, 0)):
        """Returns the examples to train on, without gradient; here the images themselves.

        Args:
            model: offers `model(images, training=...)`, `head`, `features`.
            images: clean images.
            labels: integer labels.
            seed: int pair that fixes every random draw.
        """
        return images

    def forward(self, model, images, labels, x_adv, training: bool = True) -> TrainingPass:
        """Runs the passes that are differentiated and returns losses and logits.

        Here one pass over the crafted examples, scored by the cross-entropy with the head's margin.
        """
        logits = model(x_adv, training=training)
        return TrainingPass(self.cross_entropy(model, logits, labels), logits)

    def cross_entropy(self, model, logits, labels):
        """Cross-entropy with the head's margin and the label smoothing; for training losses."""
        return margin_cross_entropy(model, logits, labels, self.label_smoothing)

    def loss(self, model, images, labels, x_adv, training: bool = True):
        """Returns the per-example losses of `forward`."""
        return self.forward(model, images, labels, x_adv, training).losses

    def train_step(self, model, images, labels, sample_weight) -> TrainingPass:
        """Updates the weights once, by `model.update`, and returns its forward pass."""
        x_adv = self.craft(model, images, labels, model.step_seed())
        return model.update(
            lambda: self.forward(model, images, labels, x_adv, training=True), labels, sample_weight
        ).training_pass

    def state_arrays(self) -> dict[str, np.ndarray]:
        """Returns training state other than weights, for checkpoints."""
        return {}

    def load_state_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """Restores what `state_arrays` returned."""

    def get_config(self) -> dict:
        """Returns the plain-data arguments of the constructor."""
        return {
            "threat": keras.saving.serialize_keras_object(self.threat),
            "label_smoothing": self.label_smoothing,
            "epsilon_schedule": keras.saving.serialize_keras_object(self.epsilon_schedule),
            "step_size_schedule": keras.saving.serialize_keras_object(self.step_size_schedule),
        }

    @classmethod
    def from_config(cls, config: dict) -> "Objective":
        """Builds an objective from `get_config()`'s result."""
        config = dict(config)
        for name in ("threat", "epsilon_schedule", "step_size_schedule"):
            if isinstance(config.get(name), dict):
                config[name] = keras.saving.deserialize_keras_object(config[name])
        return cls(**config)


class IteratedObjective(Objective):
    """An objective whose adversary is the projected-gradient loop with fixed number of steps.

    Args:
        threat: the threat model trained against.
        num_steps: steps K of the adversary.
        step_size: length of a step; default 0.007 / 0.031 of epsilon, the released ratio (the HE
            paper's text says 2/255 at 8/255).
        random_start: see `ProjectedGradient`; default "gaussian", 0.001 * N(0, I) as in the
            released
            code (the paper's text says uniform: True).
        **kwargs: see `Objective`.
    """

    attack_loss = "ce"

    def __init__(
        self,
        threat: ThreatModel,
        num_steps: int = 10,
        step_size: float | str | None = None,
        random_start: bool | float | str = "gaussian",
        **kwargs,
    ) -> None:
        super().__init__(threat, **kwargs)
        self.attack = training_attack(threat, num_steps, step_size, random_start, self.attack_loss)

    def craft(self, model, images, labels, seed=(0, 0)):
        """Runs the adversary in inference mode and returns its last iterate."""
        return self.attack.perturb(Victim(model, streams=None), images, labels, seed)

    def get_config(self) -> dict:
        """Returns the plain-data arguments of the constructor."""
        return {
            **super().get_config(),
            "num_steps": self.attack.num_steps,
            "step_size": self.attack.step_size,
            "random_start": self.attack.random_start,
        }


class TrainingAttack(ProjectedGradient):
    """The projected-gradient loop; its sizes may be scalar tensors, see `Objective.at_step`."""

    def _start(self, images, seeds):
        if tf.is_tensor(self.random_start):
            return self.threat.random_start(images, seeds, self.random_start)
        return super()._start(images, seeds)


def training_attack(threat, num_steps, step_size, random_start, loss="ce") -> ProjectedGradient:
    """The adversary inside a training step: all examples run to the end, last iterate returned."""
    if threat is None:
        raise ValueError(
            "This objective needs a threat model; expected a ThreatModel; received None"
        )
    return TrainingAttack(
        threat,
        num_steps,
        step_size=threat.epsilon * 0.007 / 0.031 if step_size is None else step_size,
        random_start=random_start,
        loss=loss,
        keep="last",
        stop_when_broken=False,
    )


def _scaled_start(random_start, ratio):
    is_radius = not isinstance(random_start, (bool, str))
    return random_start * ratio if is_radius and ratio is not None else random_start


def _check_schedule(name: str, schedule, threat) -> None:
    if schedule is None:
        return
    if not isinstance(schedule, LearningRateSchedule):
        raise TypeError(
            f"Invalid {name}; expected a keras.optimizers.schedules.LearningRateSchedule such as "
            f"those of he_keras.schedules; received {name}={schedule!r}"
        )
    if threat is None:
        raise ValueError(
            f"{name} without an adversary; expected a threat model beside it; received threat=None"
        )


def margin_cross_entropy(model, logits, labels, smoothing: float = 0.0):
    """Cross-entropy with the head's margin on the true class (plain for heads without margin)."""
    logits = with_margin(model, logits, labels)
    if smoothing:
        return losses.smoothed_cross_entropy(logits, labels, smoothing)
    return losses.cross_entropy(logits, labels)


def with_margin(model, logits, labels):
    """Logits with the head's margin on the true class (unchanged for heads without margin)."""
    has_margin = hasattr(model.head, "with_margin")
    return model.head.with_margin(logits, labels) if has_margin else logits


def unscaled(model, logits):
    """Logits at scale 1: cosines or negative angles for an HE head, unchanged for others."""
    scale = getattr(model.head, "scale", None)
    return logits if scale is None else logits / tf.cast(scale, logits.dtype)
