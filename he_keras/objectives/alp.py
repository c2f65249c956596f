"""ALP: adversarial logit pairing.

Paper: Kannan et al. 2018; with HE: "Boosting Adversarial Training with Hypersphere Embedding",
Table 1.
Loss: `w CE(o(x)) + (1 - w) CE(o(x')) + beta * pairing(o(x), o(x'))`. The defaults follow the
released code: w = 0.5, and the pairing is the mean squared difference over the classes, on
*unscaled* cosines for HE heads. The paper's text pairs by the l2 norm, not squared: `pairing="l2"`.
`pair_scaled=True` pairs the scaled logits.
Cost per example: that of PGD-AT, and one forward and full backward pass.
"""

import keras
import tensorflow as tf

from he_keras.arguments import check_choice, check_number
from he_keras.objectives.objective import IteratedObjective, TrainingPass, unscaled
from he_keras.objectives.registry import register

#: The square of 1e-12, as in `layers/feature_norm.py`: below it the square root has no gradient.
_SMALLEST_SQUARED_NORM = 1e-24


@register("alp")
@keras.saving.register_keras_serializable(package="he_keras")
class ALP(IteratedObjective):
    """Trains on clean and PGD images and pairs their logits.

    Batch-norm statistics come from both training passes: first clean, then adversarial.

    Args:
        threat: the threat model trained against.
        beta: weight of the pairing term (released default 1; its README uses 0.5).
        clean_weight: weight w of the clean cross-entropy.
        pairing: "mse", "squared-l2" or "l2".
        pair_scaled: pair the scaled logits of an HE head instead of unscaled ones.
        **kwargs: the adversary's settings, see `IteratedObjective`.
    """

    batch_norm_passes = ("clean", "adversarial")

    def __init__(
        self,
        threat,
        beta: float = 1.0,
        clean_weight: float = 0.5,
        pairing: str = "mse",
        pair_scaled: bool = False,
        **kwargs,
    ) -> None:
        super().__init__(threat, **kwargs)
        check_choice("pairing", pairing, PAIRINGS)
        check_number("beta", beta, 0.0)
        if not 0.0 <= clean_weight <= 1.0:
            raise ValueError(
                f"Invalid clean_weight; expected 0..1; received clean_weight={clean_weight!r}"
            )
        self.beta = float(beta)
        self.clean_weight = float(clean_weight)
        self.pairing = pairing
        self.pair_scaled = bool(pair_scaled)

    def forward(self, model, images, labels, x_adv, training: bool = True) -> TrainingPass:
        """A clean pass, then an adversarial one."""
        clean_logits = model(images, training=training)
        logits = model(x_adv, training=training)
        clean_loss = self.cross_entropy(model, clean_logits, labels)
        adversarial_loss = self.cross_entropy(model, logits, labels)
        difference = clean_logits - logits
        if not self.pair_scaled:
            difference = unscaled(model, difference)
        mixed = self.clean_weight * clean_loss + (1.0 - self.clean_weight) * adversarial_loss
        paired = PAIRINGS[self.pairing](difference)
        return TrainingPass(mixed + self.beta * paired, logits, clean_logits)


def _mean_square(difference):
    return tf.reduce_mean(tf.square(difference), axis=-1)


def _squared_l2(difference):
    return tf.reduce_sum(tf.square(difference), axis=-1)


def _l2(difference):
    # The floor keeps the gradient finite where both predictions agree.
    return tf.sqrt(tf.maximum(_squared_l2(difference), _SMALLEST_SQUARED_NORM))


PAIRINGS = {"mse": _mean_square, "squared-l2": _squared_l2, "l2": _l2}
