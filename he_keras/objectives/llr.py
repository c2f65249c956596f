"""LLR: trains on clean images and penalises how far the loss around them is from linear.

Paper: Qin et al. 2019, "Adversarial robustness through local linearization".
Loss: `l(x) + lambda * g(d; x) + mu * |<d, G>|` with `G = grad l(x)`. Here
`g(d; x) = |l(x + d) - l(x) - <d, G>|` is the deviation from the tangent plane, and d the most
non-linear perturbation found. As `l(x + d)` exceeds `l(x)` by at most `g + |<d, G>|`, this bounds
the adversarial loss. The gradient of the weights goes through G (double backward) and takes d as
constant.

The released code is followed. The search starts at a uniform point. Adam with rate 0.1 moves the
perturbation, which is projected after each step. At such a rate it jumps between the corners of the
ball. The search ascends `sgn * grad l(x + d)` without the plane's own gradient (`linear_term=True`
has it). The radius grows linearly over the first 500 steps. In training, every pass uses the
batch-norm statistics of the clean batch, and the gradient flows through them. So the nominal pass
and `l(x)` of the regulariser are the same number, and one pass serves for both. The released code
makes two. Its weights differ from the paper's: see `weights`.

`l` is the loss that is trained, in the search too: with the margin of an HE head and with label
smoothing. What is minimised is the bound on that loss.

The loss needs second derivatives: a network with a smooth activation (`activation="softplus"`, as
in the released code, or "swish"). ReLU is not refused, but is piecewise linear. Its own second
derivative is zero wherever it has one, and the penalty then acts through the rest of the network.

Cost per example: K + 1 (forward + backward), then 2 forward, 1 backward and 3 full backward (of the
clean pass, of its gradient and of the perturbed pass).
"""

from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras.optimizers.schedules import PolynomialDecay

from he_keras.arguments import (
    check_choice,
    check_flag,
    check_number,
    check_positive_integer,
    positive_number,
)
from he_keras.attacks.framework.gradients import image_gradient
from he_keras.objectives.local_linearity import OPTIMIZERS, Search, Tangent, most_nonlinear_point
from he_keras.objectives.objective import Objective, TrainingPass
from he_keras.objectives.registry import register
from he_keras.objectives.variable_overrides import VariableOverrides
from he_keras.threat import ThreatModel

STATISTICS = ("batch", "moving")
#: Weights of the nominal loss, of the deviation (lambda) and of the slope (mu).
WEIGHTS = {"paper": (1.0, 4.0, 3.0), "released": (2.0, 4.0, 1.2)}


class _CleanPass(NamedTuple):
    logits: Any
    tangent: Tangent
    #: Pairs of a variable and its value for the passes that this one is compared with.
    statistics: list


@register("llr")
@keras.saving.register_keras_serializable(package="he_keras")
class LLR(Objective):
    """Trains on clean images with a loss that is nearly linear around them.

    `clean_accuracy` is that of the nominal pass, `accuracy` that at the most non-linear points,
    which is no robust accuracy: the search looks for curvature, not for errors. Batch-norm
    statistics come from the nominal pass.

    With `statistics="batch"` the compared passes share the statistics of the clean batch. Layers
    other than batch norm that depend on the mode (dropout) run in training mode in the nominal pass
    only. "moving" compares passes in inference mode, in addition to the nominal pass.

    Args:
        threat: the threat model trained against.
        num_steps: steps K of the search (released: 10; for the best CIFAR-10 model of the paper
            15; 2 on ImageNet).
        weights: "paper", 1, 4 and 3 for nominal loss, deviation and slope, its values for
            CIFAR-10, or "released", 2, 4 and 1.2.
        nominal_weight: in place of that of `weights`.
        linearity_weight: lambda, in place of that of `weights`.
        slope_weight: mu, in place of that of `weights`.
        optimizer: of the search: "adam" or "sign" (steepest steps).
        learning_rate: of Adam, as a share of the width of the pixel bounds. Unlike a step size, it
            does not follow an epsilon schedule.
        step_size: of "sign"; default 2.5 * epsilon / num_steps.
        linear_term: whether the search follows the whole gradient of the deviation.
        statistics: "batch" or "moving".
        warm_up_steps: training steps over which the radius grows from 0 to epsilon; 0 for none. An
            `epsilon_schedule` takes its place.
        **kwargs: see `Objective`.

    Example:
        >>> import he_keras as he
        >>> from he_keras.objectives.llr import LLR
        >>> objective = LLR(he.ThreatModel("linf", "8/255"), weights="released")
        >>> objective.linearity_weight, objective.slope_weight
        (4.0, 1.2)
    """

    threat: ThreatModel
    nominal_weight: float
    linearity_weight: float
    slope_weight: float
    batch_norm_passes = ("clean",)

    def __init__(
        self,
        threat,
        num_steps: int = 10,
        weights: str = "paper",
        nominal_weight: float | None = None,
        linearity_weight: float | None = None,
        slope_weight: float | None = None,
        optimizer: str = "adam",
        learning_rate: float = 0.1,
        step_size: float | str | None = None,
        linear_term: bool = False,
        statistics: str = "batch",
        warm_up_steps: int = 500,
        **kwargs,
    ) -> None:
        if threat is None:
            raise ValueError("LLR needs a threat model; expected a ThreatModel; received None")
        self._warms_up = kwargs.get("epsilon_schedule") is None
        super().__init__(threat, **kwargs)
        check_positive_integer("num_steps", num_steps)
        check_choice("weights", weights, tuple(WEIGHTS))
        check_choice("optimizer", optimizer, OPTIMIZERS)
        check_choice("statistics", statistics, STATISTICS)
        check_flag("linear_term", linear_term)
        self.num_steps = int(num_steps)
        self.optimizer = optimizer
        self.learning_rate = positive_number("learning_rate", learning_rate)
        self.step_size = 2.5 * threat.epsilon / num_steps
        if step_size is not None:
            self.step_size = positive_number("step_size", step_size)
        self.linear_term = linear_term
        self.statistics = statistics
        self._set_weights(weights, nominal_weight, linearity_weight, slope_weight)
        self._set_warm_up(warm_up_steps)

    def _set_weights(self, weights: str, nominal, linearity, slope) -> None:
        self.weights = weights
        given = {"nominal_weight": nominal, "linearity_weight": linearity, "slope_weight": slope}
        for (name, value), default in zip(given.items(), WEIGHTS[weights], strict=True):
            if value is not None:
                check_number(name, value, 0.0)
            setattr(self, name, default if value is None else float(value))

    def _set_warm_up(self, warm_up_steps: int) -> None:
        check_number("warm_up_steps", warm_up_steps, 0)
        self.warm_up_steps = int(warm_up_steps)
        if self._warms_up and self.warm_up_steps:
            # Of power 1: a straight line to the radius, which then stays.
            self.epsilon_schedule = PolynomialDecay(
                0.0, self.warm_up_steps, end_learning_rate=self.threat.epsilon
            )

    def craft(self, model, images, labels, seed=(0, 0), step_number=None):
        """Searches for the most non-linear points from a uniform start, and returns the last."""
        sizes = self.sizes_at(step_number)
        clean = self._clean_pass(model, images, labels, self.statistics == "batch", update=False)

        def forward(x_adv):
            return _logits_by(model, x_adv, clean.statistics)

        def cross_entropy(logits):
            return self.cross_entropy(model, logits, labels)

        rate = self.learning_rate * self.threat.width
        step_size = rate if self.optimizer == "adam" else sizes.step_size(self.step_size)
        x_adv = most_nonlinear_point(
            Search(self.num_steps, self.optimizer, step_size, self.linear_term),
            forward,
            cross_entropy,
            images,
            clean.tangent,
            sizes.threat.random_start(images, seed),
            sizes.threat,
        )
        return tf.stop_gradient(x_adv)

    def forward(self, model, images, labels, x_adv, training: bool = True) -> TrainingPass:
        """A clean pass, its input gradient, and a pass at `x_adv` by the same statistics."""
        by_batch = training and self.statistics == "batch"
        clean = self._clean_pass(model, images, labels, by_batch, update=by_batch)
        logits = _logits_by(model, x_adv, clean.statistics)
        slope = clean.tangent.slope(x_adv, images)
        deviation = self.cross_entropy(model, logits, labels) - clean.tangent.loss - slope
        nominal_logits, nominal = clean.logits, clean.tangent.loss
        if training and not by_batch:
            # Last, because it changes the averages that the search and the other passes use.
            nominal_logits = model(images, training=True)
            nominal = self.cross_entropy(model, nominal_logits, labels)
        losses = (
            self.nominal_weight * nominal
            + self.linearity_weight * tf.abs(deviation)
            + self.slope_weight * tf.abs(slope)
        )
        return TrainingPass(losses, logits, nominal_logits)

    def _clean_pass(self, model, images, labels, by_batch: bool, update: bool) -> _CleanPass:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(images)
            if by_batch:
                logits, statistics = pass_with_statistics(model, images, update)
            else:
                logits, statistics = model(images, training=False), []

        def cross_entropy(logits):
            return self.cross_entropy(model, logits, labels)

        loss, gradient = image_gradient(
            tape, cross_entropy, images, logits, is_per_example=not by_batch
        )
        return _CleanPass(logits, Tangent(loss, gradient), statistics)

    def get_config(self) -> dict:
        """Returns the plain-data arguments of the constructor."""
        config = super().get_config()
        return {**config, "epsilon_schedule": None} if self._warms_up else config


def _logits_by(model, images, statistics: list):
    """Logits of a pass in inference mode that normalises by the given statistics."""
    with VariableOverrides(statistics):
        return model(images, training=False)


def pass_with_statistics(model, images, update: bool):
    """Runs the model in training mode; returns its logits and the statistics of the batch.

    Keras normalises a training-mode pass by the statistics of its own batch, and any other pass by
    the moving averages. LLR compares the loss at two batches, which must be one function of the
    images: the statistics of the clean batch serve for both, as tensors that the gradient flows
    through. They are pairs of a layer's variable and the batch's value of it. Within
    `VariableOverrides` of these pairs, a pass in inference mode normalises by them.

    Layers that ignore the batch (frozen ones, for example) are not among them. Only layers of the
    kind `keras.layers.BatchNormalization` are covered, each called once.

    Args:
        model: a built Keras model.
        images: the batch.
        update: whether the pass changes what a training pass does: moving averages, states
            of random layers. If not, no variable changes.
    """
    layers = _normalizations(model)
    zeros = [
        (variable, tf.zeros(variable.shape, variable.dtype))
        for layer in layers
        for variable in _moving_averages(layer)
    ]
    scope = VariableOverrides(zeros)
    untouched = {id(variable): scope.get_current_value(variable) for variable, _ in zeros}
    with scope:
        logits = model(images, training=True)
    statistics = []
    for layer in layers:
        for variable in _moving_averages(layer):
            # From zero, the moving average has moved to this share of the batch's value.
            moved = scope.get_current_value(variable)
            if moved is untouched[id(variable)]:
                continue
            statistics.append((variable, moved / (1.0 - layer.momentum)))
            if update:
                variable.assign(variable * layer.momentum + tf.stop_gradient(moved))
    if update:
        _keep_other_updates(model, scope, untouched)
    return logits, statistics


def _keep_other_updates(model, scope: VariableOverrides, averages: dict) -> None:
    for variable in model.non_trainable_variables:
        value = scope.get_current_value(variable)
        if value is not None and id(variable) not in averages:
            variable.assign(value)


def _normalizations(model) -> list:
    return [
        layer
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.BatchNormalization)
        if layer.trainable and not getattr(layer, "renorm", False) and layer.momentum < 1.0
    ]


def _moving_averages(layer) -> tuple:
    return layer.moving_mean, layer.moving_variance
