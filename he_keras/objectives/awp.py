"""AWP: adversarial training at adversarially perturbed weights, around any objective.

Paper: Wu et al. 2020, "Adversarial weight perturbation helps robust generalization"; RAT's released
code contains it. A proxy of the model makes one step of gradient *ascent* on the training loss of
the batch. For each weight tensor w with two axes or more, the difference d is rescaled to the
tensor's own length. The loss is minimised at the perturbed weights:

    v = gamma * |w| * d / |d|,    w <- w - lr * grad loss(w + v)

With one step of plain SGD, d is the gradient times the proxy's learning rate. The rate cancels, so
there is no argument for it. Biases and batch norm's scale and shift are not perturbed, and the
adversarial images are those of the unperturbed weights. The proxy's passes leave no trace in
batch-norm statistics. The training passes, at w + v, do, as in the released code.

Deviations: the released code adds v to the weights and subtracts it after the optimizer's step.
Here nothing is assigned (`VariableOverrides`), which saves two roundings. Weight decay and
regularisers act on w, in the released code on w + v: a relative difference of gamma in the decay.
Weights that are frozen are not perturbed. A tensor with a zero or non-finite gradient stays where
it is.
Cost: the base's, and its training passes (forward and backward) once more.
"""

import keras
import tensorflow as tf

from he_keras.arguments import check_number
from he_keras.distribution import replicas
from he_keras.objectives import added_losses
from he_keras.objectives.objective import TrainingPass, weighted
from he_keras.objectives.registry import register
from he_keras.objectives.variable_overrides import VariableOverrides
from he_keras.objectives.wrapped import WrappedObjective, check_single_update


@register("awp")
@keras.saving.register_keras_serializable(package="he_keras")
class AWP(WrappedObjective):
    """Computes the training loss of another objective at weights perturbed against it.

    Batch-norm statistics come from the passes of the base. FreeAT and FastAdv+ are refused: they
    carry state from one update to the next. A base whose losses change its state, such as an
    adaptive ELLE, is refused when the model is built.

    Args:
        threat: the threat model trained against; None if the base is an objective.
        base: the objective: an `Objective`, a name, or `{"name": "trades", "beta": 6.0}`.
        gamma: length of the perturbation of a tensor, relative to the tensor's. The default is the
            released code's for TRADES (after ten epochs of warm-up, RAT's too). For plain
            adversarial training that code has 0.01 (without warm-up).
        warm_up_steps: training steps without perturbation (RAT's code: ten epochs of them).
        **kwargs: further arguments of a base given by name.

    Example:
        >>> import he_keras as he
        >>> from he_keras.objectives.awp import AWP
        >>> AWP(base=he.objectives.TRADES(he.ThreatModel(), beta=6.0)).base.beta
        6.0
        >>> AWP(he.ThreatModel(), "pgd_at", num_steps=7).base.attack.num_steps
        7
    """

    def __init__(
        self,
        threat=None,
        base="pgd_at",
        gamma: float = 0.005,
        warm_up_steps: int = 0,
        **kwargs,
    ) -> None:
        check_number("gamma", gamma, 0.0)
        check_number("warm_up_steps", warm_up_steps, 0)
        super().__init__(threat, base, **kwargs)
        if isinstance(self.base, AWP):
            raise ValueError(
                "The weights are perturbed already; expected a base other than AWP; received "
                f"base={type(self.base).__name__}"
            )
        check_single_update("AWP", self.base)
        self.gamma = float(gamma)
        self.warm_up_steps = int(warm_up_steps)

    def build(self, image_shape: tuple[int, ...]) -> None:
        """Creates the state of the base; refuses one, which would change twice in a step."""
        super().build(image_shape)
        if self.state_arrays():
            raise ValueError(
                "AWP computes the loss twice in a step; expected a base without training state of "
                f"its own; received {type(self.base).__name__} with "
                f"{', '.join(sorted(self.state_arrays()))}"
            )

    def gamma_at(self, step_number):
        """The length of the perturbation at a training step: zero during the warm-up."""
        if step_number is None or not self.warm_up_steps:
            return self.gamma
        is_warm = tf.cast(step_number, tf.int64) >= self.warm_up_steps
        return tf.where(is_warm, self.gamma, 0.0)

    def forward_in_step(self, model, images, labels, x_adv, step, training=True) -> TrainingPass:
        """The base's passes, once for the perturbation and once at the perturbed weights."""

        def base_pass():
            return self.base.forward_in_step(model, images, labels, x_adv, step, training)

        def losses():
            return weighted(base_pass().losses, step.sample_weight)

        variables = perturbed_variables(model)
        perturbations = self._perturbations(model, variables, losses, self.gamma_at(step.number))
        values = [
            tf.convert_to_tensor(variable) + perturbation
            for variable, perturbation in zip(variables, perturbations, strict=True)
        ]
        with VariableOverrides(zip(variables, values, strict=True)) as scope:
            training_pass = base_pass()
        scope.keep_updates(model)
        return training_pass

    def _perturbations(self, model, variables, losses, gamma) -> list:
        values = [tf.stop_gradient(tf.convert_to_tensor(variable)) for variable in variables]

        def ascend():
            gradients = _gradients(model, variables, values, losses)
            pairs = zip(gradients, values, strict=True)
            return [tf.stop_gradient(perturbation(*pair, gamma)) for pair in pairs]

        if not tf.is_tensor(gamma) or replicas.count() > 1:
            # Replicas cannot exchange gradients inside a condition.
            return ascend()
        return tf.cond(gamma > 0.0, ascend, lambda: [tf.zeros_like(each) for each in values])

    def get_config(self) -> dict:
        """Returns the plain-data arguments of the constructor."""
        return {
            **super().get_config(),
            "gamma": self.gamma,
            "warm_up_steps": self.warm_up_steps,
        }


def _gradients(model, variables, values, losses) -> list:
    """The gradients of the loss over the batches of all replicas, up to a common factor."""
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(values)
        # What layers add to the loss is not ascended, and counts in the second pass alone.
        with VariableOverrides(zip(variables, values, strict=True)), added_losses.collected():
            per_example = losses()
        count = replicas.total(tf.cast(tf.size(per_example), per_example.dtype))
        loss = tf.reduce_sum(per_example) / count
        optimizer = getattr(model, "optimizer", None)
        # Loss scaling, which cancels too, keeps half-precision gradients from underflow.
        loss = loss if optimizer is None else optimizer.scale_loss(loss)
    gradients = tape.gradient(loss, values, unconnected_gradients="zero")
    return replicas.total(gradients)


def perturbed_variables(model) -> list:
    """The trainable weights with two axes or more: kernels."""
    return [variable for variable in model.trainable_variables if len(variable.shape) > 1]


def perturbation(gradient, weight, gamma):
    """`gamma * |weight| * gradient / |gradient|`; zero for a zero or non-finite gradient.

    Example:
        >>> import tensorflow as tf
        >>> from he_keras.objectives.awp import perturbation
        >>> shift = perturbation(tf.constant([[3.0, 4.0]]), tf.constant([[0.0, 10.0]]), 0.125)
        >>> shift.numpy().round(6).tolist()
        [[0.75, 1.0]]
    """
    # Scaled by the largest entry first, squares of small gradients do not underflow.
    direction = tf.math.divide_no_nan(gradient, tf.reduce_max(tf.abs(gradient)))
    factor = tf.math.divide_no_nan(tf.norm(weight), tf.norm(direction))
    shift = tf.cast(gamma, weight.dtype) * factor * direction
    is_finite = tf.reduce_all(tf.math.is_finite(gradient))
    return tf.where(is_finite, shift, tf.zeros_like(shift))
