"""MART: adversarial training that weighs consistency by how wrong the clean prediction is.

Paper: Wang et al. 2020, "Improving adversarial robustness requires revisiting misclassified
examples".
Loss: `BCE(o(x'), y) + beta * (1 - q_y) * KL(q || p)`, with q and p the predictions on x and x'. The
boosted cross-entropy is `BCE = -log p_y - log(1.0001 - max_{k != y} p_k)`. The adversary is
PGD-AT's. Three things are as in the released code. The constant 1.0001 (1 in the paper) keeps the
second logarithm finite. The gradient also flows through q and through its weight `1 - q_y`. beta is
6 (5 in the released script for ResNet-18).

With an HE head (not part of the paper) the boosted cross-entropy takes the place of PGD-AT's loss:
the margin enters both of its logarithms. It enters neither the divergence, nor its weight, nor the
adversary.
Deviations: the divergence is computed from the logits, and the weight as printed. The released code
adds 1e-12 to p and 1e-7 to the weight, which matters only where these are smaller still.
Cost per example: K (forward + backward), then 2 forward + 2 full backward.
"""

import keras
import tensorflow as tf

from he_keras import losses
from he_keras.arguments import check_number
from he_keras.objectives.objective import IteratedObjective, TrainingPass, with_margin
from he_keras.objectives.registry import register

# The 0.0001 of the boosted cross-entropy.
_FLOOR = 1e-4


@register("mart")
@keras.saving.register_keras_serializable(package="he_keras")
class MART(IteratedObjective):
    """Trains on PGD images, and keeps predictions consistent where the clean one is poor.

    Batch-norm statistics come from both training passes: first clean, then adversarial.

    Args:
        threat: the threat model trained against.
        beta: weight of the divergence, lambda of the paper.
        **kwargs: the adversary's settings, see `IteratedObjective`.

    Example:
        >>> import he_keras as he
        >>> from he_keras.objectives.mart import MART
        >>> MART(he.ThreatModel("linf", "8/255"), beta=5.0).attack.num_steps
        10
    """

    batch_norm_passes = ("clean", "adversarial")

    def __init__(self, threat, beta: float = 6.0, **kwargs) -> None:
        super().__init__(threat, **kwargs)
        check_number("beta", beta, 0.0)
        self.beta = float(beta)

    def forward(self, model, images, labels, x_adv, training: bool = True) -> TrainingPass:
        """A clean pass, then an adversarial one."""
        clean_logits = model(images, training=training)
        logits = model(x_adv, training=training)
        boost = margin_term(with_margin(model, logits, labels), labels)
        boosted = self.cross_entropy(model, logits, labels) + boost
        clean_probability = losses.true_logit(tf.nn.softmax(clean_logits), labels)
        divergence = (1.0 - clean_probability) * losses.kl_divergence(clean_logits, logits)
        return TrainingPass(boosted + self.beta * divergence, logits, clean_logits)


def margin_term(logits, labels):
    """`-log(1.0001 - p_k)`, with k the most probable of the wrong classes.

    Example:
        >>> import tensorflow as tf
        >>> from he_keras.objectives.mart import margin_term
        >>> loss = margin_term(tf.constant([[0.0, 0.0]]), tf.constant([0]))
        >>> round(float(loss[0]), 3)
        0.693
    """
    probabilities = tf.nn.softmax(logits)
    classes = tf.shape(logits)[-1]
    is_true = tf.one_hot(labels, classes, True, False, dtype=tf.bool)
    wrong = tf.where(is_true, -tf.ones_like(probabilities), probabilities)
    is_strongest = tf.one_hot(tf.argmax(wrong, axis=-1), classes, True, False, dtype=tf.bool)
    # The sum keeps what `1 - p_k` loses to rounding where p_k is close to 1.
    rest = tf.where(is_strongest, tf.zeros_like(probabilities), probabilities)
    complement = tf.reduce_sum(rest, axis=-1)
    return -tf.math.log(complement + _FLOOR)
