"""FastAT: one large gradient step from a random start.

Paper: Wong et al. 2020, "Fast is better than free"; with HE: Table 3 of "Boosting Adversarial
Training with Hypersphere Embedding". The adversary makes one step of 1.25 * epsilon from a uniform
start and is clipped to ball and box. The released code uses a triangular learning rate (see
`schedules`) and stops on catastrophic overfitting (see `callbacks.OverfittingGuard`). Its start
from the perturbation of the batch before, which no experiment uses, is left out.

Deviation: the adversary runs in inference mode. The released code attacks in training mode, which
updates batch-norm statistics a second time: `attack_training_mode=True`.
Cost per example: 2 forward, 1 input-gradient and 1 full backward pass.
"""

import keras

from he_keras.arguments import check_choice
from he_keras.attacks.framework.victim import Victim
from he_keras.objectives.objective import Objective, last_iterate, training_attack
from he_keras.objectives.registry import register

INITIALIZATIONS = ("random", "zero")


@register("fast_at")
@keras.saving.register_keras_serializable(package="he_keras")
class FastAT(Objective):
    """Trains on single-step examples.

    Batch-norm statistics come from the adversarial training pass; with `attack_training_mode=True`
    from the attack's pass, then from the adversarial training pass.

    Args:
        threat: the threat model trained against.
        step_size: step of the adversary; default 1.25 * epsilon.
        initialization: start of the adversary: "random" (uniform), or "zero" for the image itself.
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
        check_choice("initialization", initialization, INITIALIZATIONS)
        step_size = 1.25 * threat.epsilon if step_size is None and threat else step_size
        self.attack = training_attack(threat, 1, step_size, random_start=initialization == "random")
        self.step_size = self.attack.step_size
        self.initialization = initialization
        self.attack_training_mode = bool(attack_training_mode)
        if self.attack_training_mode:
            self.batch_norm_passes = ("attack", "adversarial")

    def craft(self, model, images, labels, seed=(0, 0), step_number=None):
        """One step from the chosen start."""
        victim = Victim(model, training=self.attack_training_mode)
        return last_iterate(self.attack, victim, images, labels, seed, self.sizes_at(step_number))


def radius_of_papers(threat) -> float:
    """The radius in 1/255 of the bounds, which the papers on larger radii count in; linf only."""
    if threat.norm != "linf":
        raise ValueError(
            "No recommended penalty_weight for this norm; expected penalty_weight=... (the paper "
            f"has values for linf only); received norm={threat.norm!r}, penalty_weight=None"
        )
    return 255.0 * threat.epsilon / threat.width
