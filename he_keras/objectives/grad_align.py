"""GradAlign: single-step training that keeps the loss gradient aligned within the threat model.

Paper: Andriushchenko and Flammarion 2020, "Understanding and improving fast adversarial training".
Loss: `CE(o(x'), y) + lambda * (1 - cos(g(x), g(x + u)))`, where `g(z)` is the gradient of
`CE(o(z), y)` by the image z. u is uniform in the threat model, and x' is FGSM's example. After
catastrophic overfitting the two gradients are nearly orthogonal. The penalty keeps single steps
useful at large epsilon. Three things are as in the released code. FGSM starts at the image. All
passes of the penalty run in training mode. Only `g(x + u)` is differentiated by the weights. The
paper's formula differentiates both gradients: `detach_clean_gradient=False`.

With an HE head the penalty sees what the adversary sees: scaled logits without margin, and no label
smoothing.

Deviations: an example with a zero gradient adds no penalty. The released code leaves it out of the
mean over the batch. x + u is clipped to the bounds. The adversary runs in inference mode, as in
`FastAT`. So g(x) is computed once more, where the released code's adversary shares it.
Cost per example: 4 forward, 3 input-gradient and 1 full backward pass, and a double backward pass,
which costs about two full ones.
"""

import keras
import tensorflow as tf

from he_keras import losses
from he_keras.arguments import check_flag, check_number
from he_keras.attacks.framework.gradients import image_gradient
from he_keras.objectives.fast_at import FastAT, radius_of_papers
from he_keras.objectives.objective import TrainingPass
from he_keras.objectives.registry import register

# Number of a random stream; any would do. It keeps the draw of the penalty apart from the start of
# the adversary, which uses the step's seed itself.
_STREAM = 7_001


@register("grad_align")
@keras.saving.register_keras_serializable(package="he_keras")
class GradAlign(FastAT):
    """Trains on single-step examples, with aligned input gradients.

    Batch-norm statistics come from the adversarial training pass, then from the clean and from the
    noisy pass of the penalty. With `attack_training_mode=True` they also come from the attack's
    pass before them.

    Args:
        threat: the threat model trained against.
        penalty_weight: lambda of the paper; default `recommended_weight(threat)`.
        detach_clean_gradient: take g(x) as a constant, as the released code does.
        initialization: start of the adversary, see `FastAT`; the paper's is "zero".
        **kwargs: the adversary's settings, see `FastAT`.

    Example:
        >>> import he_keras as he
        >>> from he_keras.objectives.grad_align import GradAlign
        >>> GradAlign(he.ThreatModel("linf", "8/255")).penalty_weight
        0.2
    """

    def __init__(
        self,
        threat,
        penalty_weight: float | None = None,
        detach_clean_gradient: bool = True,
        initialization: str = "zero",
        **kwargs,
    ) -> None:
        super().__init__(threat, initialization=initialization, **kwargs)
        check_flag("detach_clean_gradient", detach_clean_gradient)
        if penalty_weight is None:
            penalty_weight = recommended_weight(threat)
        check_number("penalty_weight", penalty_weight, 0.0)
        self.penalty_weight = float(penalty_weight)
        self.detach_clean_gradient = detach_clean_gradient
        self.batch_norm_passes = (*self.batch_norm_passes, "clean", "noisy")

    def forward(
        self, model, images, labels, x_adv, training: bool = True, seed=(0, 0), step_number=None
    ) -> TrainingPass:
        """The adversarial pass, then the penalty, whose noise comes from the seed."""
        training_pass = super().forward(model, images, labels, x_adv, training)
        misalignment = self.misalignment(model, images, labels, seed, training, step_number)
        penalized = training_pass.losses + self.penalty_weight * misalignment
        return training_pass._replace(losses=penalized)

    def forward_in_step(self, model, images, labels, x_adv, step, training=True) -> TrainingPass:
        """`forward`, whose penalty draws within the radius of the step."""
        return self.forward(model, images, labels, x_adv, training, step.seed, step.number)

    def misalignment(
        self, model, images, labels, seed=(0, 0), training: bool = True, step_number=None
    ):
        """Returns `1 - cos(g(x), g(x + u))` of each example; 0 where a gradient is zero."""
        threat = self.sizes_at(step_number).threat
        noisy = threat.random_start(images, tf.random.fold_in(seed, _STREAM))
        clean_gradient = _input_gradient(model, images, labels, training)
        if self.detach_clean_gradient:
            clean_gradient = tf.stop_gradient(clean_gradient)
        return cosine_distance(clean_gradient, _input_gradient(model, noisy, labels, training))


def recommended_weight(threat) -> float:
    """The released lambda for CIFAR-10 on ResNet-18: `0.02 * 10**(epsilon / 8)`, epsilon in 1/255.

    The released experiments end at 16/255, and so does the rise.

    Example:
        >>> import he_keras as he
        >>> from he_keras.objectives.grad_align import recommended_weight
        >>> [round(recommended_weight(he.ThreatModel("linf", e)), 3) for e in ("1/255", "12/255")]
        [0.027, 0.632]
    """
    radius = radius_of_papers(threat)
    return round(0.02 * 10.0 ** (min(radius, 16.0) / 8.0), 12)


def cosine_distance(one, other):
    """Returns `1 - cos` of the two tensors' rows, shape `(n,)`; 0 where a row is all zeros.

    Example:
        >>> import tensorflow as tf
        >>> from he_keras.objectives.grad_align import cosine_distance
        >>> rows = tf.constant([[3.0, 0.0], [1e-30, 0.0], [0.0, 0.0]])
        >>> cosine_distance(rows, tf.constant([[0.0, 2.0], [2e-30, 0.0], [1.0, 0.0]])).numpy()
        array([1., 0., 0.], dtype=float32)
    """
    one, one_is_zero = _unit_rows(one)
    other, other_is_zero = _unit_rows(other)
    distance = 1.0 - tf.reduce_sum(one * other, axis=-1)
    return tf.where(one_is_zero | other_is_zero, tf.zeros_like(distance), distance)


def _input_gradient(model, images, labels, training: bool):
    """Gradient of the cross-entropy without margin, itself differentiable by the weights."""
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(images)
        logits = model(images, training=training)

    def loss(logits):
        return losses.cross_entropy(logits, labels)

    return image_gradient(tape, loss, images, logits, is_per_example=not training)[1]


def _unit_rows(tensor):
    """Rows of unit length, zero rows left as they are, and which rows are zero."""
    rows = tf.reshape(tensor, [tf.shape(tensor)[0], -1])
    # The squares of a confident model's gradients would underflow. A cosine does not depend on
    # lengths, so the gradient may take the factor as constant.
    largest = tf.stop_gradient(tf.reduce_max(tf.abs(rows), axis=-1, keepdims=True))
    is_zero = largest[:, 0] == 0.0
    rows = tf.math.divide_no_nan(rows, largest)
    # At least 1 except in zero rows, where the square root would have no derivative.
    squared = tf.maximum(tf.reduce_sum(tf.square(rows), axis=-1, keepdims=True), 0.5)
    return rows * tf.math.rsqrt(squared), is_zero
