"""N-FGSM: one gradient step from strong noise, without projection onto the ball.

Paper: de Jorge et al. 2022, "Make some noise: reliable and efficient single-step adversarial
training". It draws noise from U(-k * epsilon, k * epsilon) with k = 2, then makes one step of
length epsilon from the noisy image. The images trained on may be up to `k * epsilon + step_size`
away from the clean ones: the strong noise and the missing projection prevent catastrophic
overfitting at large epsilon. As in the released code, pixels are clipped to the bounds after the
noise and after the step (the paper's formula has neither).

Deviations: the adversary runs in inference mode. The released code attacks in training mode, which
updates batch-norm statistics a second time: `attack_training_mode=True`. The paper covers linf
only. For l2 and l1 the noise is uniform in the ball of radius k * epsilon, and the step is the
norm's.
Cost per example: 2 forward, 1 input-gradient and 1 full backward pass.
"""

import keras
import tensorflow as tf

from he_keras import losses
from he_keras.arguments import check_flag, check_number, positive_number
from he_keras.attacks.framework.gradients import loss_and_gradient
from he_keras.attacks.framework.victim import Victim
from he_keras.objectives.objective import Objective
from he_keras.objectives.registry import register


@register("n_fgsm")
@keras.saving.register_keras_serializable(package="he_keras")
class NFGSM(Objective):
    """Trains on single-step examples around noisy images.

    Batch-norm statistics come from the adversarial training pass; with `attack_training_mode=True`
    from the attack's pass, then from the adversarial training pass.

    Args:
        threat: the threat model trained against.
        noise_ratio: radius k of the noise, in units of epsilon; 0 for none (FGSM from the image).
        step_size: step from the noisy image; default epsilon.
        attack_training_mode: run the adversary's pass in training mode, as the released code does.
        **kwargs: see `Objective`.

    Example:
        >>> import he_keras as he
        >>> from he_keras.objectives.n_fgsm import NFGSM
        >>> NFGSM(he.ThreatModel("linf", 0.1)).step_size
        0.1
    """

    def __init__(
        self,
        threat,
        noise_ratio: float = 2.0,
        step_size: float | str | None = None,
        attack_training_mode: bool = False,
        **kwargs,
    ) -> None:
        super().__init__(threat, **kwargs)
        if threat is None:
            raise ValueError("NFGSM needs a threat model; expected a ThreatModel; received None")
        check_number("noise_ratio", noise_ratio, 0.0)
        check_flag("attack_training_mode", attack_training_mode)
        self.noise_ratio = float(noise_ratio)
        self.step_size = (
            threat.epsilon if step_size is None else positive_number("step_size", step_size)
        )
        self.attack_training_mode = attack_training_mode
        if attack_training_mode:
            self.batch_norm_passes = ("attack", "adversarial")

    def craft(self, model, images, labels, seed=(0, 0), step_number=None):
        """Adds the noise and makes one step on the cross-entropy without margin."""
        sizes = self.sizes_at(step_number)
        victim = Victim(model, training=self.attack_training_mode)
        noisy = self.threat.random_start(images, seed, self.noise_ratio * sizes.threat.epsilon)
        gradient = loss_and_gradient(
            victim.for_many_passes(), lambda logits: losses.cross_entropy(logits, labels), noisy
        )[2]
        x_adv = noisy + sizes.step_size(self.step_size) * self.threat.steepest_step(gradient)
        return tf.stop_gradient(self.threat.clip_to_bounds(x_adv))
