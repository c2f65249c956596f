"""ELLE: single-step training that keeps the loss linear between points of the threat model.

Paper: Abad Rocamora et al. 2024, "Efficient local linearity regularization to overcome catastrophic
overfitting".
Loss: `CE(o(x'), y) + lambda * (l(z) - (1 - a) * l(z1) - a * l(z2))**2`, where l is the
cross-entropy to y. z1 and z2 are uniform in the threat model around x, and a is uniform in [0, 1].
`z = (1 - a) * z1 + a * z2`, and x' is FGSM's example. Unlike GradAlign it needs no gradient of a
gradient.

ELLE-A (`adaptive=True`): lambda starts at 0. The mean error of a batch may exceed the mean of all
earlier batches by two standard deviations. Then lambda becomes `penalty_weight` from the next batch
on. Otherwise it is multiplied by 0.99. As in the released code, this begins after three batches.

As in the released code, FGSM starts at the image, and the three points pass through the network as
one batch in training mode. With an HE head the penalty sees what the adversary sees: scaled logits
without margin, and no label smoothing.

Deviations: z1 and z2 are clipped to the bounds, as is x'. The adversary runs in inference mode, as
in `FastAT`.
Cost per example: 5 forward, 1 input-gradient and 4 full backward passes.
"""

import keras
import numpy as np
import tensorflow as tf

from he_keras import losses
from he_keras.arguments import check_flag, check_number
from he_keras.distribution import replicas
from he_keras.objectives.fast_at import FastAT, radius_of_papers
from he_keras.objectives.objective import TrainingPass
from he_keras.objectives.registry import register

# Numbers of random streams: any that differ from one another. They keep the draws of the penalty
# apart from the start of the adversary, which uses the step's seed itself.
_FIRST, _SECOND, _SHARE = 7_011, 7_012, 7_013
# Of ELLE-A, as in the released code.
_DECAY = 0.99
_SENSITIVITY = 2.0
_KNOWN_BATCHES = 3


@register("elle")
@keras.saving.register_keras_serializable(package="he_keras")
class ELLE(FastAT):
    """Trains on single-step examples, with a loss that is linear around each image.

    Batch-norm statistics come from the adversarial training pass, then from the one pass over all
    three points. With `attack_training_mode=True` they also come from the attack's pass before
    them.

    With `adaptive=True`, `fit` reports the weight of the penalty as `penalty_weight`.

    Args:
        threat: the threat model trained against.
        penalty_weight: lambda of the paper, with `adaptive=True` its largest value; default as in
            the released scripts for CIFAR-10: `recommended_weight(threat, adaptive)`.
        adaptive: ELLE-A.
        initialization: start of the adversary, see `FastAT`; the paper's is "zero".
        **kwargs: the adversary's settings, see `FastAT`.

    Example:
        >>> import he_keras as he
        >>> from he_keras.objectives.elle import ELLE
        >>> ELLE(he.ThreatModel("linf", "16/255")).penalty_weight
        5000.0
    """

    def __init__(
        self,
        threat,
        penalty_weight: float | None = None,
        adaptive: bool = False,
        initialization: str = "zero",
        **kwargs,
    ) -> None:
        super().__init__(threat, initialization=initialization, **kwargs)
        check_flag("adaptive", adaptive)
        if penalty_weight is None:
            penalty_weight = recommended_weight(threat, adaptive)
        check_number("penalty_weight", penalty_weight, 0.0)
        self.penalty_weight = float(penalty_weight)
        self.adaptive = adaptive
        self.batch_norm_passes = (*self.batch_norm_passes, "triplets")
        self._watch: NonlinearityWatch | None = None

    def build(self, image_shape: tuple[int, ...]) -> None:
        """Creates the state of ELLE-A, where it is needed."""
        if self.adaptive and self._watch is None:
            self._watch = NonlinearityWatch(self.penalty_weight)

    def forward(
        self, model, images, labels, x_adv, training: bool = True, seed=(0, 0), step_number=None
    ) -> TrainingPass:
        """The adversarial pass, then the penalty, whose points come from the seed."""
        training_pass = super().forward(model, images, labels, x_adv, training)
        errors = self.linearity_errors(model, images, labels, seed, training, step_number)
        if self._watch is None:
            penalized = training_pass.losses + self.penalty_weight * errors
            return training_pass._replace(losses=penalized)
        return training_pass._replace(
            losses=training_pass.losses + self._watch.weight() * errors,
            observed=tf.stop_gradient(errors),
        )

    def forward_in_step(self, model, images, labels, x_adv, step, training=True) -> TrainingPass:
        """`forward`, whose penalty draws within the radius of the step."""
        return self.forward(model, images, labels, x_adv, training, step.seed, step.number)

    def linearity_errors(
        self, model, images, labels, seed=(0, 0), training: bool = True, step_number=None
    ):
        """Returns the squared error of the linear interpolation of each example's loss."""
        first, second, share_seed = (
            tf.random.fold_in(seed, stream) for stream in (_FIRST, _SECOND, _SHARE)
        )
        threat = self.sizes_at(step_number).threat
        first, second = threat.random_start(images, first), threat.random_start(images, second)
        share = tf.random.stateless_uniform(tf.shape(labels), share_seed, dtype=images.dtype)
        of_images = tf.reshape(share, [-1] + [1] * (images.shape.rank - 1))
        between = (1.0 - of_images) * first + of_images * second
        logits = model(tf.concat([first, second, between], axis=0), training=training)
        loss = losses.cross_entropy(logits, tf.tile(labels, [3]))
        first_loss, second_loss, loss_between = tf.split(loss, 3)
        share = tf.cast(share, loss.dtype)
        return tf.square(loss_between - (1.0 - share) * first_loss - share * second_loss)

    def observe(self, observed) -> None:
        """Takes the errors of a batch into account, for the weight of the next one."""
        if self._watch is not None:
            self._watch.observe(observed)

    def logs(self) -> dict:
        """Returns what `fit` reports in addition to metrics: the weight of ELLE-A."""
        return {} if self._watch is None else {"penalty_weight": self._watch.weight()}

    def state_arrays(self) -> dict[str, np.ndarray]:
        """ELLE-A's weight and statistics, where there are any."""
        return {} if self._watch is None else self._watch.to_arrays()

    def load_state_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """Restores what `state_arrays` returned."""
        if self._watch is not None:
            self._watch.from_arrays(arrays)


class NonlinearityWatch:
    """The weight of ELLE-A: an outlier among the batches' mean errors raises it, else it decays.

    Welford's recurrence keeps the mean and the variance of all errors so far. Every replica of a
    distribution strategy sees the mean error of the whole batch.

    Args:
        largest_weight: what an outlier sets the weight to.

    Example:
        >>> import tensorflow as tf
        >>> from he_keras.objectives.elle import NonlinearityWatch
        >>> watch = NonlinearityWatch(4000.0)
        >>> for error in (1.0, 1.5, 1.0, 9.0):
        ...     watch.observe(tf.constant([error]))
        >>> float(watch.weight())
        4000.0
    """

    def __init__(self, largest_weight: float) -> None:
        self.largest_weight = largest_weight
        # Weight, number of batches, mean error, sum of squared deviations.
        self._state = replicas.own_variable(np.zeros(4, np.float32), "nonlinearity")

    def weight(self):
        """The weight for the next batch."""
        return self._state.read_value()[0]

    def observe(self, errors) -> None:
        """Takes the errors of a batch into account."""
        errors = tf.cast(errors, tf.float32)
        total = replicas.total(tf.reduce_sum(errors))
        error = total / replicas.total(tf.cast(tf.size(errors), tf.float32))
        weight, count, mean, squares = tf.unstack(self._state.read_value())
        deviation = tf.sqrt(tf.math.divide_no_nan(squares, count))
        is_outlier = (count >= _KNOWN_BATCHES) & (error > mean + _SENSITIVITY * deviation)
        weight = tf.where(is_outlier, self.largest_weight, weight * _DECAY)
        moved = mean + (error - mean) / (count + 1.0)
        squares += (error - mean) * (error - moved)
        self._state.assign(tf.stack([weight, count + 1.0, moved, squares]))

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Returns the state, which is the same on all replicas."""
        return {"nonlinearity": replicas.copies(self._state)[0].numpy()}

    def from_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """Restores what `to_arrays` returned."""
        for each in replicas.copies(self._state):
            each.assign(tf.constant(arrays["nonlinearity"], tf.float32))


def recommended_weight(threat, adaptive: bool = False) -> float:
    """The released lambda for CIFAR-10 on PreActResNet-18; the largest of ELLE-A is 4000.

    Example:
        >>> import he_keras as he
        >>> from he_keras.objectives.elle import recommended_weight
        >>> [recommended_weight(he.ThreatModel("linf", e)) for e in ("8/255", "12/255", "24/255")]
        [1000.0, 5000.0, 10000.0]
    """
    radius = radius_of_papers(threat)
    if adaptive:
        return 4000.0
    if radius < 9.0:
        return 1000.0
    return 5000.0 if radius < 21.0 else 10000.0
