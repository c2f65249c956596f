"""RAT: crafting at noisy weights, and two Taylor terms between clean and adversarial derivatives.

Paper: "Randomized Adversarial Training via Taylor Expansion" (Jin et al. 2023), "+1st+2nd", around
TRADES or adversarial training. The released code of the TRADES variant is followed:

1. The base crafts the adversarial images x* at noisy weights. Noise `weight_noise * N(0, I)`, one
   draw a batch, is added to the convolution kernels, those of shortcuts too.
2. L0 and L1 are the cross-entropies of the batch on x and on x*. a_c and b_c are the derivatives of
   L0 and L1 by the last layer's weights, summed over the inputs of class c.
3. A vector v becomes soft labels: with `u = v - min v`, the wrong classes of an example share
   `label_share` in proportion to u, and its true class y gets the rest. They are constants:
   `t1 = T(|a| - |b|)`, `t1' = T(|b| - |a|)`, `t2 = T(a^2 - b^2)`, `t2' = T(b^2 - a^2)`.
4. With p and p* the predictions, q = p and the base's loss `L0 + beta * KL(q || p*)`:

       loss = (1 - alpha) * L0 + alpha * (F1 + second_order_ratio * F2) + beta * KL(q || p*)
       F1 = (KL(t1 || p*) + KL(t1' || p)) / 2
       F2 = (KL(t2 || p*) + KL(t2' || p)) / 2                       mode="symmetric"
       F2 = (KL(t2' || p*) + KL(t2' || p)) / 2                      mode="released"

"Second order" is the code's word for a squared first derivative. No Hessian is computed. Its F2
uses t2' twice where the line above it uses both: `mode="symmetric"` corrects that. RAT's text also
reports a base of adversarial training (PGDAT, FastAT, N-FGSM), which its code lacks. There L1 takes
the place of `L0 + beta * KL`, and `(1 - alpha) * L1` that of `(1 - alpha) * L0`.

HE heads (not part of the paper). L0 and L1 have the margin, p and p* do not, as in TRADES. The
logits do not depend on the length of a class's weight vector W_c, nor should the statistics. But
the derivative by W_c is inversely proportional to that length. It is
`dL/dW_c = (s / |W_c|) sum_i r_ic (z_i - cos_ic w_c)` for unit vectors z, w and residuals r. For
m-HE these include the slope of the angle. So the derivative by the unit vector w_c is taken: the
same without the division. Without weight normalisation it is that by W_c.

Deviations: where no wrong class has a share (0 / 0 in the code) they share equally. Sample weights
enter L0 and L1. The statistics are those of the batches of all replicas together. The released code
repeats its training-mode passes, eight in all, which changes nothing but moving batch-norm
statistics: `repeat_passes=True`.
Cost: the base's, and two backward passes through the head. Adversarial training takes one forward
and full backward pass more. `repeat_passes` adds six forward passes.
"""

from typing import Any, NamedTuple

import keras
import tensorflow as tf

from he_keras.arguments import check_choice, check_flag, check_number, check_share
from he_keras.distribution import replicas
from he_keras.objectives import added_losses
from he_keras.objectives.objective import Objective, TrainingPass, weighted
from he_keras.objectives.registry import register
from he_keras.objectives.trades import TRADES
from he_keras.objectives.variable_overrides import VariableOverrides
from he_keras.objectives.wrapped import WrappedObjective, check_single_update
from he_keras.precision import at_least_float32

MODES = ("released", "symmetric")
# Number of a random stream; any would do.
_NOISE_STREAM = 1


@register("rat")
@keras.saving.register_keras_serializable(package="he_keras")
class RAT(WrappedObjective):
    """Adds first- and second-order terms to TRADES or to adversarial training.

    Batch-norm statistics come from a clean and an adversarial pass, in this order. An adversary in
    training mode works on the noisy copy and leaves none.

    Args:
        threat: the threat model trained against; None if the base is an objective.
        base: TRADES, or an objective whose loss is the cross-entropy of what it crafts (PGDAT,
            FastAT, NFGSM): an `Objective`, a name, or `{"name": "trades", "beta": 6.0}`.
        mode: "released", or "symmetric" with the slip in the second term corrected.
        alpha: weight of the terms; the cross-entropy has `1 - alpha`.
        second_order_ratio: weight of F2 relative to F1. The default is 0.5. The released file with
            AWP for ResNet-18 has 0.4. (At alpha = 0.2 that is 0.05 or 0.04 for each pair of
            divergences.) 0 takes the first order alone.
        label_share: share of the wrong classes in the soft labels. Default `1 - 2 / classes`, which
            gives the released 0.8 for 10 and 0.98 for 100 classes: the true class has twice what
            equal shares would give it (with two classes: all).
        weight_noise: standard deviation of the noise on convolution kernels while crafting.
        repeat_passes: make the six further training-mode passes of the released code.
        **kwargs: further arguments of a base given by name.

    Example:
        >>> import he_keras as he
        >>> from he_keras.objectives.rat import RAT
        >>> RAT(he.ThreatModel(), "trades", beta=6.0, step_size="2/255").base.beta
        6.0
    """

    def __init__(
        self,
        threat=None,
        base="trades",
        mode: str = "released",
        alpha: float = 0.2,
        second_order_ratio: float = 0.5,
        label_share: float | None = None,
        weight_noise: float = 1e-4,
        repeat_passes: bool = False,
        **kwargs,
    ) -> None:
        check_choice("mode", mode, MODES)
        check_number("second_order_ratio", second_order_ratio, 0.0)
        check_number("weight_noise", weight_noise, 0.0)
        check_flag("repeat_passes", repeat_passes)
        check_share("alpha", alpha)
        if label_share is not None:
            check_share("label_share", label_share)
        super().__init__(threat, base, **kwargs)
        _check_base(self.base)
        self.mode = mode
        self.alpha = float(alpha)
        self.second_order_ratio = float(second_order_ratio)
        self.label_share = None if label_share is None else float(label_share)
        self.weight_noise = float(weight_noise)
        self.repeat_passes = repeat_passes
        further = ("adversarial", "clean") * 3 if repeat_passes else ()
        self.batch_norm_passes = ("clean", "adversarial", *further)

    def craft(self, model, images, labels, seed=(0, 0), step_number=None):
        """Crafts as the base does, at noisy convolution kernels; no weight changes."""
        kernels = convolution_kernels(model) if self.weight_noise else []
        values = noisy_values(kernels, self.weight_noise, seed)
        with VariableOverrides(zip(kernels, values, strict=True)):
            return super().craft(model, images, labels, seed, step_number)

    def forward_in_step(self, model, images, labels, x_adv, step, training=True) -> TrainingPass:
        """A clean pass, then an adversarial one."""
        recorder = _Recorder(model)
        if "clean" not in self.base.batch_norm_passes:
            recorder(images, training=training)
        base_pass = self.base.forward(recorder, images, labels, x_adv, training)
        clean, adversarial = recorder.passes[:2]
        if training and self.repeat_passes:
            # They train nothing, and what layers add to the loss in them does not count.
            with added_losses.collected():
                for repeated in (x_adv, images) * 3:
                    recorder(repeated, training=True)

        # TRADES learns the labels from the clean images, adversarial training from the others.
        learned_from = clean if isinstance(self.base, TRADES) else adversarial
        plain = self.base.cross_entropy(model, learned_from.logits, labels)
        first, second = self._terms(model, labels, clean, adversarial, step.sample_weight)
        terms = first + self.second_order_ratio * second - plain
        losses = base_pass.losses + self.alpha * terms
        return TrainingPass(losses, adversarial.logits, clean.logits)

    def _terms(self, model, labels, clean, adversarial, sample_weight):
        """F1 and F2 of each example."""
        a, b = replicas.total(
            [self._row_sums(model, labels, each, sample_weight) for each in (clean, adversarial)]
        )
        classes = clean.logits.shape[-1]
        share = 1.0 - 2.0 / classes if self.label_share is None else self.label_share

        def half_sum(adversarial_gap, clean_gap):
            on_adversarial = soft_labels(adversarial_gap, labels, share)
            on_clean = soft_labels(clean_gap, labels, share)
            return 0.5 * (
                divergence_from(on_adversarial, adversarial.logits)
                + divergence_from(on_clean, clean.logits)
            )

        sizes, squares = tf.abs(a) - tf.abs(b), tf.square(a) - tf.square(b)
        first = half_sum(sizes, -sizes)
        return first, half_sum(squares if self.mode == "symmetric" else -squares, -squares)

    def _row_sums(self, model, labels, recorded: "_Pass", sample_weight):
        logits = tf.stop_gradient(recorded.logits)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(logits)
            losses = self.base.cross_entropy(model, logits, labels)
            # The sum: soft labels do not depend on a common factor.
            loss = tf.reduce_sum(weighted(losses, sample_weight))
        residual = tape.gradient(loss, logits)
        return row_sums(model.head, tf.stop_gradient(recorded.features), residual)

    def get_config(self) -> dict:
        """Returns the plain-data arguments of the constructor."""
        return {
            **super().get_config(),
            "mode": self.mode,
            "alpha": self.alpha,
            "second_order_ratio": self.second_order_ratio,
            "label_share": self.label_share,
            "weight_noise": self.weight_noise,
            "repeat_passes": self.repeat_passes,
        }


class _Pass(NamedTuple):
    features: Any
    logits: Any


class _Recorder:
    """A model for a base's `forward` that keeps features and logits of every pass."""

    def __init__(self, model) -> None:
        if getattr(model, "has_own_call", False):
            raise ValueError(
                "RAT computes features and logits apart; expected a model whose `call` is that of "
                "HEAdversarialModel: override `features` instead; received "
                f"{type(model).__name__}.call"
            )
        self._model = model
        self.head = model.head
        self.passes: list[_Pass] = []

    def __call__(self, images, training: bool = False):
        features = self._model.features(images, training=training)
        logits = at_least_float32(self.head(features))
        if training:
            added_losses.note(self._model.network, self.head)
        self.passes.append(_Pass(features, logits))
        return logits


def convolution_kernels(model) -> list:
    """The trainable weights with three axes or more: kernels of convolutions."""
    return [variable for variable in model.trainable_variables if len(variable.shape) > 2]


def noisy_values(variables, deviation: float, seed) -> list:
    """The variables' values plus `deviation * N(0, I)`, the same on every replica.

    Args:
        variables: Keras variables.
        deviation: standard deviation of the noise.
        seed: int pair; replicas may have different ones, the first one's counts.
    """
    if not variables:
        return []
    seed = tf.convert_to_tensor(seed, tf.int32)
    if replicas.count() > 1:
        seed = replicas.total(tf.where(replicas.number() == 0, seed, tf.zeros_like(seed)))
    # Not the seed itself, which draws the adversary's start.
    seed = tf.random.fold_in(seed, _NOISE_STREAM)
    noisy = []
    for position, variable in enumerate(variables):
        value = tf.convert_to_tensor(variable)
        own_seed = tf.random.fold_in(seed, position)
        noise = tf.random.stateless_normal(value.shape, own_seed, dtype=value.dtype)
        noisy.append(value + deviation * noise)
    return noisy


def row_sums(head, features, residual):
    """Derivatives by the kernel of the head, summed over the inputs of each class.

    Args:
        head: a layer with a kernel `(features, classes)`: `Dense` or `CosineHead`.
        features: its inputs, `(n, features)`.
        residual: derivatives of the loss by the logits, `(n, classes)`.

    Example:
        >>> import keras, tensorflow as tf
        >>> from he_keras.objectives.rat import row_sums
        >>> head = keras.layers.Dense(2)
        >>> head.build((None, 2))
        >>> row_sums(head, tf.constant([[1.0, 2.0]]), tf.constant([[0.5, -0.5]])).numpy().tolist()
        [1.5, -1.5]
    """
    _check_head(head)
    values = [tf.convert_to_tensor(variable) for variable in head.variables]
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(values)
        with VariableOverrides(zip(head.variables, values, strict=True)):
            logits = at_least_float32(head(features))
            kernel = tf.convert_to_tensor(head.kernel)
    position = [variable is head.kernel for variable in head.variables].index(True)
    gradient = tape.gradient(logits, values[position], output_gradients=residual)
    if getattr(head, "weight_norm", False):
        gradient *= tf.norm(kernel, axis=0, keepdims=True)
    return tf.stop_gradient(tf.reduce_sum(gradient, axis=0))


def soft_labels(gap, labels, label_share: float):
    """`T(gap)[y]`: what the wrong classes share by their distance from the smallest gap.

    Args:
        gap: one number a class, `(classes,)`.
        labels: class numbers, `(n,)`.
        label_share: what the wrong classes get together; equal shares if their gaps are all zero.

    Example:
        >>> import tensorflow as tf
        >>> from he_keras.objectives.rat import soft_labels
        >>> soft_labels(tf.constant([0.0, 1.0, 3.0]), [0], 0.75).numpy().tolist()
        [[0.25, 0.1875, 0.5625]]
    """
    is_true = tf.one_hot(labels, gap.shape[-1], dtype=gap.dtype)
    wrong = (gap - tf.reduce_min(gap)) * (1.0 - is_true)
    total = tf.reduce_sum(wrong, axis=-1, keepdims=True)
    equal = (1.0 - is_true) / (gap.shape[-1] - 1)
    shares = tf.where(total > 0.0, tf.math.divide_no_nan(wrong, total), equal)
    return (1.0 - label_share) * is_true + label_share * shares


def divergence_from(probabilities, logits):
    """`sum_k t_k (log t_k - log p_k)` for soft labels t, which may be zero.

    Example:
        >>> import tensorflow as tf
        >>> from he_keras.objectives.rat import divergence_from
        >>> divergences = divergence_from(tf.constant([[1.0, 0.0]]), tf.constant([[0.0, 0.0]]))
        >>> round(float(divergences[0]), 3)
        0.693
    """
    entropy = tf.math.xlogy(probabilities, probabilities)
    return tf.reduce_sum(entropy - probabilities * tf.nn.log_softmax(logits), axis=-1)


def _check_base(base) -> None:
    if type(base).forward not in (Objective.forward, TRADES.forward):
        raise ValueError(
            "RAT has no terms for this base; expected TRADES, or an objective whose loss is the "
            "cross-entropy of what it crafts: PGDAT, FastAT, NFGSM; "
            f"received base={type(base).__name__}"
        )
    check_single_update("RAT", base)


def _check_head(head) -> None:
    kernel: Any = getattr(head, "kernel", None)
    is_own = any(kernel is variable for variable in getattr(head, "variables", ()))
    if not is_own or len(kernel.shape) != 2:
        raise ValueError(
            "RAT differentiates by the weights of the head; expected a layer with a kernel "
            f"(features, classes) such as Dense or CosineHead; received {type(head).__name__}"
        )
