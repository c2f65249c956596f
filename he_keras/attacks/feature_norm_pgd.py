"""PGD with feature normalisation in the attack only."""

from typing import Any

import keras
import tensorflow as tf

from he_keras.attacks.framework.result import Crafted
from he_keras.attacks.framework.victim import Victim
from he_keras.attacks.projected_gradient import ProjectedGradient
from he_keras.attacks.registry import register
from he_keras.layers.feature_norm import normalize
from he_keras.threat import ThreatModel


class _NormalizingVictim:
    """Answers with both logits where an attack asks for logits: `(n, 2, classes)`.

    The victim's own logits come first, then those of normalised features.
    """

    def __init__(self, victim: Victim) -> None:
        self.victim = victim
        self.training = victim.training

    def logits(self, images):
        features = self.victim.features(images)
        kernel, _ = self.victim.head_weights()
        normalized = tf.linalg.matmul(normalize(features), tf.cast(kernel, features.dtype))
        return tf.stack([self.victim.logits_of_features(features), normalized], axis=1)


@keras.saving.register_keras_serializable(package="he_keras")
@register("fn-pgd", budget="num_steps")
class FeatureNormPGD(ProjectedGradient):
    """PGD on the cross-entropy of a victim's head applied to normalised features.

    The victim is a trained network with ordinary logits `W phi(x) + b`. The attack ascends
    `CE(W phi(x') / |phi(x')|, y)`: features normalised, weights as they are, no bias, no scale. The
    normalisation turns the gradient along the sphere, where it can change the direction of the
    features and nothing else. Whether an image is misclassified is decided by the victim's own
    logits.

    Paper: Pang et al. 2020, the HE paper, Eq. 12 and Table 7.
    Assumes: features and a head of type `Dense` (or `CosineHead`, whose kernel is taken as stored),
        and a useful gradient of the features.
    Cost: as PGD, `num_steps` forward and backward passes and one forward pass to score the last
        iterate.
    Deviations: the paper states neither step size nor start, so they are PGD's. By default the
        iterate with the highest loss is returned and broken examples are dropped, as
        `ProjectedGradient` explains.

    Args:
        threat: the threat model.
        num_steps: number of steps K (the paper's table has 1 and 2).
        step_size: length of a step; default 2.5 * epsilon / num_steps.
        random_start: see `ProjectedGradient`.
        eot_samples: passes over which the gradient of a randomised model is averaged.
        **kwargs: see `Attack`.

    Example:
        >>> import he_keras as he, keras, numpy as np
        >>> head = keras.layers.Dense(2, kernel_initializer="identity")
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Identity(), head])
        >>> attack = he.attacks.get("fn-pgd-2", he.ThreatModel("linf", 0.1), random_start=False)
        >>> result = attack(model, np.array([[0.8, 0.5]], "float32"), np.array([0]))
        >>> [round(float(pixel), 3) for pixel in result.x_adv[0]]
        [0.7, 0.6]
    """

    def __init__(
        self,
        threat: ThreatModel,
        num_steps: int = 20,
        step_size: float | str | None = None,
        random_start: bool | float | str = True,
        eot_samples: int = 1,
        name: str = "fn-pgd",
        **kwargs,
    ) -> None:
        super().__init__(
            threat,
            num_steps,
            step_size,
            random_start,
            loss="ce",
            decay=None,
            margin=0.0,
            eot_samples=eot_samples,
            name=name,
            **kwargs,
        )

    def ascend(
        self, victim: Victim, images, labels, start, targets=None, threat=None, step_size=None
    ) -> Crafted:
        """Runs the loop from a given start."""
        both: Any = _NormalizingVictim(victim)
        return super().ascend(both, images, labels, start, targets, threat, step_size)

    def _loss(self, victim, logits, goal, reference):
        return goal.loss("ce", logits[:, 1])

    def _record(self, state, logits, loss, goal):
        return super()._record(state, logits[:, 0], loss, goal)

    def get_config(self) -> dict:
        """Returns the plain-data arguments of the constructor."""
        config = super().get_config()
        for fixed in ("loss", "decay", "margin"):
            del config[fixed]
        return config
