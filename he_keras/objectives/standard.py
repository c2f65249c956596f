"""Training on clean images: the baseline without adversary."""

import keras

from he_keras.objectives.objective import Objective, TrainingPass
from he_keras.objectives.registry import register


@register("standard")
@keras.saving.register_keras_serializable(package="he_keras")
class Standard(Objective):
    """Cross-entropy on clean images (with the head's margin).

    Batch-norm statistics come from the clean pass. A threat model is optional; it only sets what
    `robust_accuracy` is measured against.
    """

    batch_norm_passes = ("clean",)

    def forward(self, model, images, labels, x_adv, training: bool = True) -> TrainingPass:
        """One pass over the clean images."""
        logits = model(images, training=training)
        return TrainingPass(self.cross_entropy(model, logits, labels), logits, logits)
