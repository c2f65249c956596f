"""FastAT: one large gradient step from a random start.

Paper: Wong et al. 2020, "Fast is better than free"; with HE: Table 3 of "Boosting Adversarial
Training with Hypersphere Embedding". Step 1.25 * epsilon from a uniform start, clipped to ball
and box. The released code uses a triangular learning rate (see `schedules`) and stops on
catastrophic overfitting (see `callbacks.OverfittingGuard`).

Deviation: the adversary runs in inference mode; the released code attacks in training mode, which
updates batch-norm statistics a second time: `attack_training_mode=True`.
Cost per example: 2 forward, 1 input-gradient and 1 full backward pass.
"""

import keras
import tensorflow as tf

from he_keras.attacks.victim import Victim
from he_keras.objectives.noise_buffer import BufferedObjective
from he_keras.objectives.objective import (
    TrainingPass,
    training_attack,
)
from he_keras.objectives.registry import register

INITIALIZATIONS = ("random", "zero", "previous")


@register("fast_at")
@keras.saving.register_keras_serializable(package="he_keras")
class FastAT(BufferedObjective):
    """Trains on single-step examples.

    Batch-norm statistics come from the adversarial training pass; with `attack_training_mode=True`
    from the attack's pass, then from the adversarial training pass.

    Args:
        threat: the threat model trained against.
        step_size: step of the adversary; default 1.25 * epsilon.
        initialization: "random" (uniform), "zero", or "previous" (the perturbation left by the
            batch before, persistent as in FreeAT).
        attack_training_mode: run the adversary's pass in training mode, as the released code does.
        **kwargs: see `Objective`.
    """

    def __init__(
        self,
        threat,
        step_size: float | str | None = None,
        initialization: str = "random",
        attack_training_mode: bool = False,
        **kwargs,
    ) -> None:
        super().__init__(threat, **kwargs)
        if initialization not in INITIALIZATIONS:
            raise ValueError(
                f"Unknown initialization; expected one of {INITIALIZATIONS}; "
                f"received initialization={initialization!r}"
            )
        step_size = 1.25 * threat.epsilon if step_size is None and threat else step_size
        self.attack = training_attack(threat, 1, step_size, random_start=initialization == "random")
        self.initialization = initialization
        self.supports_jit = initialization != "previous"
        self.attack_training_mode = bool(attack_training_mode)
        if self.attack_training_mode:
            self.batch_norm_passes = ("attack", "adversarial")
        self.has_buffer = initialization == "previous"

    def craft(self, model, images, labels, seed=(0, 0)):
        """One step from the chosen start."""
        victim = Victim(model, training=self.attack_training_mode, streams=None)
        if not self.has_buffer:
            return self.attack.perturb(victim, images, labels, seed)
        start = self.threat.project(images + self.noise.first_rows(tf.shape(images)[0]), images)
        x_adv = self.threat.project(self.attack.ascend(victim, images, labels, start).x_adv, images)
        return tf.stop_gradient(x_adv)

    def train_step(self, model, images, labels, sample_weight) -> TrainingPass:
        """Crafts, remembers the perturbation where asked to, and updates the weights."""
        x_adv = self.craft(model, images, labels, model.step_seed())
        if self.has_buffer:
            self.noise.put_first_rows(x_adv - images)
        return model.update(
            lambda: self.forward(model, images, labels, x_adv, training=True), labels, sample_weight
        ).training_pass

    def get_config(self) -> dict:
        """Returns the plain-data arguments of the constructor."""
        return {
            **super().get_config(),
            "step_size": self.attack.step_size,
            "initialization": self.initialization,
            "attack_training_mode": self.attack_training_mode,
        }
