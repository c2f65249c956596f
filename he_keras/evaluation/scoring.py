"""What a model says about images, in one compiled function: it decides every verdict."""

from typing import NamedTuple

import numpy as np
import tensorflow as tf

from he_keras.attacks import Victim
from he_keras.attacks.attack import score


class Scored(NamedTuple):
    """One entry per image in each array.

    Attributes:
        prediction: the class of the largest logit; -1 where a logit is NaN.
        wrong: the prediction is not the label.
        margin: true logit minus the largest other one.
    """

    prediction: np.ndarray
    wrong: np.ndarray
    margin: np.ndarray


class Scorer:
    """Scores images with a model, traced once for every batch size.

    Example:
        >>> import numpy as np
        >>> from he_keras.evaluation.scoring import Scorer
        >>> scorer = Scorer(lambda images: images)
        >>> scorer(np.array([[0.25, 0.75]], "float32"), np.array([0])).prediction.tolist()
        [1]
    """

    def __init__(self, model) -> None:
        self._victim = Victim(model)
        self._compiled = tf.function(self._score)
        self._num_classes = 0

    def num_classes(self, images: np.ndarray) -> int:
        """Returns how many classes there are; the first time the model sees one image for that."""
        if not self._num_classes:
            self._num_classes = int(self._victim.logits(tf.constant(images[:1])).shape[-1])
        return self._num_classes

    def __call__(self, images: np.ndarray, labels: np.ndarray) -> Scored:
        """Scores one batch."""
        function = self._compiled.get_concrete_function(
            tf.TensorSpec([None, *images.shape[1:]], images.dtype), tf.TensorSpec([None], tf.int32)
        )
        scored = function(tf.constant(images), tf.constant(labels, tf.int32))
        return Scored(*(column.numpy() for column in scored))

    def _score(self, images, labels):
        logits = self._victim.logits(images)
        has_nan = tf.reduce_any(tf.math.is_nan(logits), axis=-1)
        prediction = tf.where(has_nan, -1, tf.argmax(logits, axis=-1, output_type=tf.int32))
        scored = score(logits, labels)
        return prediction, scored.broken, scored.margin
