"""The hypersphere-embedding head: scaled cosine (or negative angle) logits.

Paper: "Boosting Adversarial Training with Hypersphere Embedding". Feature normalisation (FN) and
weight normalisation (WN) are Eq. 4, the angular margin (AM) is Eq. 6, and m-HE, which uses the
angle itself, is Sec. 3.5. The scale `s` is part of the logits, so that training, attack, evaluation
and export see the same values.

Deviations:

* The released code keeps the scale in the loss and evaluates raw cosines.
* The released code overwrites the weights with their normalised value in every forward pass. Its
  gradient ignores the normalisation. Here the normalisation is part of the graph, as in Eq. 4, and
  no forward pass changes a weight.
* The paper's text says "additive angular margin". In Eq. 6 and in the code it is a margin on the
  cosine (`angle="cosine"`) or on the angle (`angle="arc"`).
"""

import keras
import tensorflow as tf

from he_keras.arguments import check_choice, check_number, check_positive, is_number
from he_keras.configurable import Configurable
from he_keras.layers.feature_norm import computation_dtype, normalize

ANGLES = ("cosine", "arc")
# Beyond this cosine the slope of arccos is capped (at about 707 in size) instead of infinite.
_ARC_LIMIT = 1.0 - 1e-6


@tf.custom_gradient
def arccos_with_finite_slope(cosines):
    """`arccos` whose derivative is capped near cos = +-1, where the true one is infinite."""
    angles = tf.acos(tf.clip_by_value(cosines, -1.0, 1.0))

    def gradient(upstream):
        bounded = tf.clip_by_value(cosines, -_ARC_LIMIT, _ARC_LIMIT)
        return -upstream * tf.math.rsqrt(1.0 - tf.square(bounded))

    return angles, gradient


@keras.saving.register_keras_serializable(package="he_keras")
class CosineHead(Configurable, keras.layers.Layer):
    """Maps features to `scale * cos(theta)`, or `-scale * theta` for `angle="arc"` (m-HE).

    Computes in float32 under any dtype policy (float64 under float64). There is no bias.

    Args:
        num_classes: number of classes.
        scale: the factor s of the logits (paper: 15; released PGD preset: 10).
        margin: the margin m, subtracted from the true class by `with_margin` in training losses.
        feature_norm: normalise the features (FN).
        weight_norm: normalise each class's weight vector (WN).
        angle: "cosine" or "arc"; "arc" needs both normalisations: an angle needs unit vectors.
        kernel_initializer: default is PyTorch's for linear layers, U(-1/sqrt(d), 1/sqrt(d)).

    Example:
        >>> import he_keras as he, numpy as np
        >>> head = he.CosineHead(2, scale=10.0, kernel_initializer="identity")
        >>> head(np.array([[3.0, 4.0]])).numpy().round(4).tolist()
        [[6.0, 8.0]]
    """

    def __init__(
        self,
        num_classes: int,
        scale: float = 15.0,
        margin: float = 0.2,
        feature_norm: bool = True,
        weight_norm: bool = True,
        angle: str = "cosine",
        kernel_initializer="pytorch_linear",
        **kwargs,
    ) -> None:
        _check_numbers(num_classes, scale, margin)
        _check_angle(angle, feature_norm, weight_norm)
        super().__init__(**kwargs)
        self.autocast = False
        self.num_classes = int(num_classes)
        self.scale = float(scale)
        self.margin = float(margin)
        self.feature_norm = bool(feature_norm)
        self.weight_norm = bool(weight_norm)
        self.angle = angle
        if kernel_initializer == "pytorch_linear":
            kernel_initializer = keras.initializers.VarianceScaling(1 / 3, "fan_in", "uniform")
        self.kernel_initializer = keras.initializers.get(kernel_initializer)

    def build(self, input_shape) -> None:
        """Creates the kernel, `(features, num_classes)`."""
        if len(input_shape) != 2 or input_shape[-1] is None:
            raise ValueError(
                "CosineHead needs feature vectors of known length; expected shape "
                f"(batch, features); received input_shape={tuple(input_shape)}"
            )
        self.kernel = self.add_weight(
            name="kernel",
            shape=(input_shape[-1], self.num_classes),
            initializer=self.kernel_initializer,
            dtype=computation_dtype(self),
            # An enclosing mixed-precision model must not cast the kernel to half precision.
            autocast=False,
        )

    def class_vectors(self):
        """Returns the vectors that features are multiplied by, `(features, num_classes)`.

        With weight normalisation they have unit length.
        """
        kernel = tf.cast(tf.convert_to_tensor(self.kernel), computation_dtype(self))
        return normalize(kernel, axis=0) if self.weight_norm else kernel

    def cosines(self, features):
        """Returns the products of features and class vectors: raw cosines with FN and WN."""
        features = tf.cast(features, computation_dtype(self))
        if self.feature_norm:
            features = normalize(features)
        return tf.matmul(features, self.class_vectors())

    def call(self, inputs):
        """Returns scaled logits without margin."""
        return self.scale * self.unscaled(inputs)

    def unscaled(self, features):
        """Returns the logits at scale 1: cosines, or negative angles for `angle="arc"`."""
        cosines = self.cosines(features)
        return cosines if self.angle == "cosine" else -arccos_with_finite_slope(cosines)

    def with_margin(self, logits, labels, margin: float | None = None):
        """Subtracts `scale * margin` from the true class's logit, for training losses only."""
        margin = self.margin if margin is None else margin
        offset = tf.cast(self.scale * margin, logits.dtype)
        return logits - offset * tf.one_hot(labels, self.num_classes, dtype=logits.dtype)

    def compute_output_spec(self, inputs) -> keras.KerasTensor:
        """Logits have shape (batch, num_classes) and the computation dtype."""
        return keras.KerasTensor((inputs.shape[0], self.num_classes), dtype=computation_dtype(self))

    def compute_output_shape(self, input_shape) -> tuple:
        """Returns (batch, num_classes)."""
        return (input_shape[0], self.num_classes)


def _check_numbers(num_classes, scale, margin) -> None:
    if not (is_number(num_classes) and num_classes >= 2 and int(num_classes) == num_classes):
        raise ValueError(
            f"Invalid num_classes; expected an integer >= 2; received num_classes={num_classes!r}"
        )
    check_positive("scale", scale)
    check_number("margin", margin, 0)


def _check_angle(angle: str, feature_norm: bool, weight_norm: bool) -> None:
    check_choice("angle", angle, ANGLES)
    if angle == "arc" and not (feature_norm and weight_norm):
        raise ValueError(
            "An angle needs unit vectors; expected feature_norm=True and weight_norm=True with "
            f'angle="arc"; received feature_norm={feature_norm}, weight_norm={weight_norm}'
        )
