"""ELLE: single-step training that keeps the loss linear between points of the threat model.

Paper: Abad Rocamora et al. 2024, "Efficient local linearity regularization to overcome catastrophic
overfitting".
Loss: `CE(o(x'), y) + lambda * (l(z) - (1 - a) * l(z1) - a * l(z2))**2`, with l the cross-entropy to
y, z1 and z2 uniform in the threat model around x, a uniform in [0, 1], `z = (1 - a) * z1 + a * z2`
and x' FGSM's example. Unlike GradAlign it needs no gradient of a gradient.

ELLE-A (`adaptive=True`): lambda starts at 0. When the mean error of a batch exceeds the mean of all
batches before by two standard deviations, lambda becomes `penalty_weight` from the next batch on;
else it is multiplied by 0.99. As in the released code, three batches have to be known first.

As there, FGSM starts at the image and the three points pass through the network as one batch in
training mode. With an HE head the penalty sees what the adversary sees: scaled logits without
margin, and no label smoothing.

Deviations: z1 and z2 are clipped to the bounds, as is x'; the adversary runs in inference mode, as
in `FastAT`.
Cost per example: 5 forward, 1 input-gradient and 4 full backward passes.
"""

import keras
import numpy as np
import tensorflow as tf

from he_keras import losses
from he_keras.attacks.checks import check_flag, check_number
from he_keras.distribution import replicas
from he_keras.objectives.fast_at import FastAT
from he_keras.objectives.objective import TrainingPass
from he_keras.objectives.registry import register

# Keep the draws of the penalty apart from the start of the adversary, which uses the step's seed.
_FIRST, _SECOND, _SHARE = 7_011, 7_012, 7_013
_DECAY = 0.99
_SENSITIVITY = 2.0
_KNOWN_BATCHES = 3


@register("elle")
@keras.saving.register_keras_serializable(package="he_keras")
class ELLE(FastAT):
    """Trains on single-step examples, with a loss that is linear around each image.

    Batch-norm statistics come from the adversarial training pass, then from the one pass over all
    three points; with `attack_training_mode=True` from the attack's pass before them.

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
        """Creates the perturbation buffer and the state of ELLE-A, where they are needed."""
        super().build(image_shape)
        if self.adaptive and self._watch is None:
            self._watch = NonlinearityWatch(self.penalty_weight)

    def forward(self, model, images, labels, x_adv, training: bool = True) -> TrainingPass:
        """The adversarial pass, then the penalty; its points come from the seed of this step."""
        training_pass = super().forward(model, images, labels, x_adv, training)
        errors = self.linearity_errors(model, images, labels, model.step_seed(), training)
        weight = self.penalty_weight if self._watch is None else self._watch.weight()
        if self._watch is not None and training:
            self._watch.observe(tf.stop_gradient(errors))
        return training_pass._replace(losses=training_pass.losses + weight * errors)

    def linearity_errors(self, model, images, labels, seed=(0, 0), training: bool = True):
        """Returns the squared error of the linear interpolation of each example's loss."""
        first, second, share_seed = (
            tf.random.fold_in(seed, stream) for stream in (_FIRST, _SECOND, _SHARE)
        )
        first = self.threat.random_start(images, first)
        second = self.threat.random_start(images, second)
        share = tf.random.stateless_uniform(tf.shape(labels), share_seed, dtype=images.dtype)
        of_images = tf.reshape(share, [-1] + [1] * (images.shape.rank - 1))
        between = (1.0 - of_images) * first + of_images * second
        logits = model(tf.concat([first, second, between], axis=0), training=training)
        loss = losses.cross_entropy(logits, tf.tile(labels, [3]))
        first_loss, second_loss, loss_between = tf.split(loss, 3)
        share = tf.cast(share, loss.dtype)
        return tf.square(loss_between - (1.0 - share) * first_loss - share * second_loss)

    def logs(self) -> dict:
        """Returns what `fit` reports beside metrics: see `Objective`, and ELLE-A's weight."""
        adapted = {} if self._watch is None else {"penalty_weight": self._watch.weight()}
        return {**super().logs(), **adapted}

    def state_arrays(self) -> dict[str, np.ndarray]:
        """The perturbation buffer and ELLE-A's weight and statistics, where there are any."""
        watched = {} if self._watch is None else self._watch.to_arrays()
        return {**super().state_arrays(), **watched}

    def load_state_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """Restores what `state_arrays` returned."""
        super().load_state_arrays(arrays)
        if self._watch is not None:
            self._watch.from_arrays(arrays)

    def get_config(self) -> dict:
        """Returns the plain-data arguments of the constructor."""
        return {
            **super().get_config(),
            "penalty_weight": self.penalty_weight,
            "adaptive": self.adaptive,
        }


class NonlinearityWatch:
    """The weight of ELLE-A: raised by an outlier among the batches' mean errors, else decaying.

    Mean and variance of all errors so far are kept by Welford's recurrence. Every replica of a
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
        # Outside any graph, where a model that builds itself in its first step would put it.
        with tf.init_scope():
            self._state = tf.Variable(
                tf.zeros([4]),  # weight, number of batches, mean error, sum of squared deviations
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
                name="nonlinearity",
            )

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
        return {"nonlinearity": self._copies()[0].numpy()}

    def from_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """Restores what `to_arrays` returned."""
        for each in self._copies():
            each.assign(tf.constant(arrays["nonlinearity"], tf.float32))

    def _copies(self) -> tuple:
        return tf.distribute.get_strategy().experimental_local_results(self._state)


def recommended_weight(threat, adaptive: bool = False) -> float:
    """The released lambda for CIFAR-10 on PreActResNet-18; the largest of ELLE-A is 4000.

    Example:
        >>> import he_keras as he
        >>> from he_keras.objectives.elle import recommended_weight
        >>> [recommended_weight(he.ThreatModel("linf", e)) for e in ("8/255", "12/255", "24/255")]
        [1000.0, 5000.0, 10000.0]
    """
    if threat.norm != "linf":
        raise ValueError(
            "No recommended penalty_weight for this norm; expected penalty_weight=... (the paper "
            f"has values for linf only); received norm={threat.norm!r}, penalty_weight=None"
        )
    if adaptive:
        return 4000.0
    low, high = threat.bounds
    in_8_bit_units = 255.0 * threat.epsilon / (high - low)
    if in_8_bit_units < 9.0:
        return 1000.0
    return 5000.0 if in_8_bit_units < 21.0 else 10000.0
