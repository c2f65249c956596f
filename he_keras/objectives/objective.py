"""The contract of a training objective: what to craft, and which loss to minimise.

An objective file writes `craft` and `forward`. Both are plain functions of their arguments, so that
a stored adversarial batch can be fed in. `HEAdversarialModel` takes care of gradients, weights,
replicas and metrics. Crafting runs the network in inference mode unless an objective says
otherwise.

The margin of an HE head enters the training loss only (`Objective.cross_entropy`); attacks inside
training see the scaled logits without it, as in the released code of the HE paper.
"""

from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from he_keras import losses
from he_keras.attacks.checks import check_number
from he_keras.attacks.projected_gradient import ProjectedGradient
from he_keras.attacks.victim import Victim
from he_keras.threat import ThreatModel


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

    Args:
        threat: the threat model trained against; None for training without adversary.
        label_smoothing: r of `losses.smoothed_cross_entropy`; 0 for none.
    """

    #: Which training-mode passes update batch-norm statistics, in order.
    batch_norm_passes: tuple[str, ...] = ("adversarial",)
    #: Whether XLA can compile the training step.
    supports_jit = True

    def __init__(self, threat: ThreatModel | None = None, label_smoothing: float = 0.0) -> None:
        if threat is not None and not isinstance(threat, ThreatModel):
            raise TypeError(f"Invalid threat; expected a ThreatModel; received threat={threat!r}")
        check_number("label_smoothing", label_smoothing, 0.0)
        if label_smoothing >= 1.0:
            raise ValueError(
                "Invalid label_smoothing; expected a number in [0, 1); "
                f"received label_smoothing={label_smoothing!r}"
            )
        self.threat = threat
        self.label_smoothing = float(label_smoothing)

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
        }

    @classmethod
    def from_config(cls, config: dict) -> "Objective":
        """Builds an objective from `get_config()`'s result."""
        config = dict(config)
        config["threat"] = keras.saving.deserialize_keras_object(config["threat"])
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
        return self.attack.perturb(Victim(model), images, labels, seed)

    def get_config(self) -> dict:
        """Returns the plain-data arguments of the constructor."""
        return {
            **super().get_config(),
            "num_steps": self.attack.num_steps,
            "step_size": self.attack.step_size,
            "random_start": self.attack.random_start,
        }


def training_attack(threat, num_steps, step_size, random_start, loss="ce") -> ProjectedGradient:
    """The adversary inside a training step: all examples run to the end, last iterate returned."""
    if threat is None:
        raise ValueError(
            "This objective needs a threat model; expected a ThreatModel; received None"
        )
    return ProjectedGradient(
        threat,
        num_steps,
        step_size=threat.epsilon * 0.007 / 0.031 if step_size is None else step_size,
        random_start=random_start,
        loss=loss,
        keep="last",
        stop_when_broken=False,
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
