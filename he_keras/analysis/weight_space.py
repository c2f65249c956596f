"""The mean loss of some examples as a function of a model's weights: values and curvature.

Batch normalisation runs in inference mode. No weight of the model is ever written. Other values
take the place of the model's own during a call (`keras.StatelessScope`).
"""

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from he_keras import losses
from he_keras.attacks.framework.victim import Victim


class WeightSpace:
    """The loss over fixed examples, for any values of the trainable weights.

    Weights are one flat float64 vector here. The passes run in the model's precision, and the sums
    over batches in float64. Memory is that of one batch, whatever the number of examples. The last
    batch is left out if it is not full, as in the tool that drew the paper's figures.

    Args:
        model: a `keras.Model` with trainable weights.
        images: images, clean or adversarial.
        labels: integer labels.
        batch_size: examples in a pass.
        loss: function from logits and labels to per-example losses.

    Example:
        >>> import keras, numpy as np
        >>> from he_keras.analysis.weight_space import WeightSpace
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(2, use_bias=False)])
        >>> model.set_weights([np.zeros((1, 2), "float32")])
        >>> space = WeightSpace(model, np.ones((4, 1), "float32"), np.zeros(4, int), batch_size=2)
        >>> np.round(space.hessian_product(np.array([1.0, 0.0])), 3).tolist()
        [0.25, -0.25]
    """

    def __init__(
        self,
        model,
        images: np.ndarray,
        labels: np.ndarray,
        batch_size: int = 64,
        loss: Callable = losses.cross_entropy,
    ) -> None:
        variables = model.trainable_variables if isinstance(model, keras.Model) else []
        if not variables:
            raise ValueError(
                "This analysis is about the weights; expected a keras.Model with trainable "
                f"weights; received {type(model).__name__}"
            )
        num_batches = len(images) // batch_size
        if not num_batches:
            raise ValueError(
                "Not one full batch (an incomplete batch is left out); expected at least "
                f"batch_size={batch_size} examples; received {len(images)}"
            )
        self.num_examples = num_batches * batch_size
        self._batches = [
            (tf.constant(rows), tf.constant(numbers, tf.int32))
            for rows, numbers in zip(
                np.split(images[: self.num_examples], num_batches),
                np.split(labels[: self.num_examples], num_batches),
                strict=True,
            )
        ]
        self._variables = list(variables)
        self._victim, self._loss = Victim(model), loss
        self._batch_value = tf.function(self._mean_loss)
        self._batch_product = tf.function(self._mean_hessian_product)
        self.origin = _flat(variables)

    @property
    def dimension(self) -> int:
        """The number of weights."""
        return len(self.origin)

    def value(self, offset: np.ndarray | float = 0.0) -> float:
        """The mean loss at the model's weights plus `offset`."""
        weights = self._split(self.origin + offset)
        return float(np.mean([self._batch_value(weights, *batch) for batch in self._batches]))

    def hessian_product(self, vector: np.ndarray) -> np.ndarray:
        """The Hessian of the mean loss at the model's weights, times a vector."""
        weights, direction = self._split(self.origin), self._split(vector)
        total = np.zeros(self.dimension)
        for batch in self._batches:
            total += _flat(self._batch_product(weights, direction, *batch))
        return total / len(self._batches)

    def surface(self, first: np.ndarray, second: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """The mean loss at all sums of multiples of two directions, `[first, second]`."""
        return np.array([[self.value(a * first + b * second) for b in offsets] for a in offsets])

    def _mean_loss(self, weights, images, labels):
        with keras.StatelessScope(state_mapping=list(zip(self._variables, weights, strict=True))):
            logits = self._victim.logits(images)
        return tf.reduce_mean(tf.cast(self._loss(logits, labels), tf.float64))

    def _mean_hessian_product(self, weights, direction, images, labels):
        """Differentiates twice: the gradient of `<gradient, direction>`."""
        with tf.GradientTape(watch_accessed_variables=False) as outer:
            outer.watch(weights)
            with tf.GradientTape(watch_accessed_variables=False) as inner:
                inner.watch(weights)
                loss = self._mean_loss(weights, images, labels)
            gradient = inner.gradient(loss, weights, unconnected_gradients="zero")
        return outer.gradient(
            gradient, weights, output_gradients=direction, unconnected_gradients="zero"
        )

    def _split(self, vector: np.ndarray) -> list:
        sizes = [int(np.prod(variable.shape)) for variable in self._variables]
        parts = np.split(vector, np.cumsum(sizes)[:-1])
        return [
            tf.constant(part.reshape(variable.shape), variable.dtype)
            for part, variable in zip(parts, self._variables, strict=True)
        ]


def _flat(tensors) -> np.ndarray:
    arrays = [keras.ops.convert_to_numpy(tensor) for tensor in tensors]
    return np.concatenate([array.astype(np.float64).reshape(-1) for array in arrays])
