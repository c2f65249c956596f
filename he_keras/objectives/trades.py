"""TRADES: clean cross-entropy plus the divergence between clean and adversarial predictions.

Paper: Zhang et al. 2019; with HE: "Boosting Adversarial Training with Hypersphere Embedding",
Table 1.
Loss: `CE(o(x), y) + beta * KL(S(o(x)) || S(o(x')))`. The adversary ascends the same KL with the
clean prediction held constant. The defaults follow the released code: beta = 6, a gradient through
*both* predictions in the training loss, and the margin in the clean term only. The HE paper's table
prints a cross-entropy between the two predictions in place of KL: `divergence="cross-entropy"`.

The adversary computes the clean prediction once per batch, since in inference mode it cannot change
between steps. The released loop recomputes it at every step. Deviation for l2: the adversary takes
normalised gradient steps where the released code runs SGD on the perturbation.
Cost per example: K (forward + backward) + 1 forward, then 2 forward + 2 full backward.
"""

import keras

from he_keras import losses
from he_keras.arguments import check_choice, check_number
from he_keras.objectives.objective import IteratedObjective, TrainingPass
from he_keras.objectives.registry import register

DIVERGENCES = {"kl": losses.kl_divergence, "cross-entropy": losses.soft_cross_entropy}


@register("trades")
@keras.saving.register_keras_serializable(package="he_keras")
class TRADES(IteratedObjective):
    """Trains on clean images and keeps the prediction constant within the threat model.

    Batch-norm statistics come from both training passes: first clean, then adversarial, as in the
    HE release. The original TRADES code passes the clean batch once more.

    Args:
        threat: the threat model trained against.
        beta: weight of the divergence, 1 / lambda of the paper.
        divergence: "kl" or "cross-entropy" in the training loss.
        **kwargs: the adversary's settings, see `IteratedObjective`.
    """

    attack_loss = "kl"
    batch_norm_passes = ("clean", "adversarial")

    def __init__(self, threat, beta: float = 6.0, divergence: str = "kl", **kwargs) -> None:
        super().__init__(threat, **kwargs)
        check_choice("divergence", divergence, DIVERGENCES)
        check_number("beta", beta, 0.0)
        self.beta = float(beta)
        self.divergence = divergence

    def forward(self, model, images, labels, x_adv, training: bool = True) -> TrainingPass:
        """A clean pass, then an adversarial one."""
        clean_logits = model(images, training=training)
        logits = model(x_adv, training=training)
        clean_loss = self.cross_entropy(model, clean_logits, labels)
        divergence = DIVERGENCES[self.divergence](clean_logits, logits)
        return TrainingPass(clean_loss + self.beta * divergence, logits, clean_logits)
