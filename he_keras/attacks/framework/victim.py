"""What an attack sees of a classifier: images in, logits and gradients out.

Below the victim stand the gradients by the images, averaged over the randomness of the model where
asked (EoT), and the checks of logits.
"""

import copy
import math
import numbers
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from he_keras import cpu
from he_keras.attacks.framework.pass_counter import COUNTER
from he_keras.attacks.framework.precision import HALF_PRECISIONS, UNITS, at_least_float32
from he_keras.layers.call_context import call_context
from he_keras.layers.cosine_head import CosineHead
from he_keras.networks.checks import (
    NO_FEATURES,
    NO_LOGITS,
    PROBABILITIES,
    check_single,
    last_activation,
    sides_of,
)

#: AutoAttack's: how far a row of probabilities may be from the sum 1.
_PROBABILITY_TOLERANCE = 1e-5
#: Units in the last place by which the rounded values of a softmax may miss the sum 1.
_SUM_UNITS = 4
#: Random examples that a network and a head are tried with.
_NUM_TRIED = 4


class Victim:
    """Wraps a `keras.Model` or a callable `images -> logits` for an attack.

    The wrapped model always runs inside a Keras call with an explicit `training` flag (False unless
    asked otherwise), a plain callable included: leaving the flag out can put layers in training
    mode in Keras 3. A model's head is its attribute `head`, else its last layer.

    Args:
        model: a `keras.Model`, an `HEAdversarialModel`, or any callable from images to logits.
        logit_scale: "model" takes the logits as they are. "unit" divides the scale of a cosine head
            out, which is the HE paper's protocol and weakens cross-entropy attacks. A number sets
            the scale of a cosine head, or multiplies the logits of any other classifier.
        training: run the model in training mode (only some training objectives want that).
        tuned: whether the model may run in another way with the same values, see `he_keras.cpu`.
    """

    def __init__(
        self,
        model,
        logit_scale: float | str = "model",
        training: bool = False,
        tuned: bool = True,
    ) -> None:
        check_logit_scale(logit_scale)
        if not callable(model) or isinstance(model, type):
            kind = "a class" if isinstance(model, type) else type(model).__name__
            raise TypeError(
                "Cannot attack this object; expected a keras.Model or a callable images -> logits "
                f"(of a SavedModel: a function of it, such as loaded.serve); received {kind}"
            )
        check_single(model, "model")
        self.model = model
        self.training = training
        # In training mode the statistics are those of the whole batch.
        self.tuned = tuned and not training
        self.head = _head_of(model)
        head_scale = self.head.scale if isinstance(self.head, CosineHead) else 1.0
        self.scale = head_scale if logit_scale == "model" else _as_number(logit_scale)
        self._factor = self.scale / head_scale
        self._body: keras.Model | None = None
        self._fixed: Any = None
        self._is_counted = False

    def counted(self) -> "Victim":
        """Returns a victim whose passes are counted, see `pass_counter`."""
        counted = copy.copy(self)
        counted._is_counted = True
        return counted

    def _watched(self, outputs):
        return COUNTER.watched(outputs) if self._is_counted else outputs

    def with_fixed_weights(self) -> "Victim":
        """Returns a victim that reads the model's variables once, now, where the model can do that.

        It is for many passes while the variables do not change, and belongs to the graph in which
        it is made.
        """
        if not self._can_fix():
            return self
        fixed = copy.copy(self)
        fixed._fixed = self.model.with_fixed_weights()
        return fixed

    @property
    def has_short_cuts(self) -> bool:
        """Whether an attack does anything else than call the model."""
        run = self._raw_logits
        return self._can_fix() or self._faster(run) is not run

    def _can_fix(self) -> bool:
        if not self.tuned or not hasattr(self.model, "with_fixed_weights"):
            return False
        return not getattr(self.model, "has_own_passes", False)

    def _faster(self, function):
        return cpu.batch_function(function, self.model) if self.tuned else function

    def logits(self, images):
        """Returns the logits that the attack works on, in float32 or better."""
        return self.scaled(self._watched(self._faster(self._raw_logits)(images)))

    def plain_logits(self, images):
        """Returns what Keras itself answers: `head(network(images, training=False))`, unscaled."""
        run = getattr(self.model, "plain_logits", self.model)
        return at_least_float32(_checked(self._called(run, images), self.model))

    def _raw_logits(self, images):
        run = self.model if self._fixed is None else self._fixed
        return _checked(self._called(run, images), self.model)

    def _called(self, run, inputs):
        if isinstance(run, keras.layers.Layer):
            return run(inputs, training=self.training)
        with call_context(self.training):
            return run(inputs)

    def features(self, images):
        """Returns the feature vectors before the head, in float32 or better.

        They come from the model's own method `features`, else they are the input of the last layer
        of a functional or sequential model.
        """
        features = self._faster(self._raw_features)(images)
        if not tf.is_tensor(features) or features.shape.rank != 2:
            raise ValueError(
                "The head's input is not a feature vector; expected a tensor of shape (n, "
                f"features): add global pooling or Flatten; received {features!r:.100}"
            )
        return at_least_float32(self._watched(features))

    def _raw_features(self, images):
        if self._fixed is not None:
            return self._called(self._fixed.features, images)
        if not hasattr(self.model, "features"):
            return self._body_of_model()(images, training=self.training)
        with call_context(self.training):
            return self.model.features(images, training=self.training)

    def logits_of_features(self, features):
        """Returns the logits that the head makes of features.

        An attack that needs features and logits spends one pass on both.
        """
        if hasattr(self.model, "features") and not callable(getattr(self.model, "head", None)):
            raise ValueError(
                "This attack works on features; expected a model that has the layer after its "
                f"method `features` as attribute `head`; received {type(self.model).__name__}"
            )
        head = self.head if self._fixed is None else self._fixed.logits_of_features
        return self.scaled(self._called(head, features))

    def head_weights(self):
        """Returns the head's kernel (features, classes), as stored, and its bias or None."""
        is_dense = isinstance(self.head, keras.layers.Dense)
        if is_dense and self.head.activation is keras.activations.linear:
            kernel, bias = self.head.kernel, self.head.bias
        elif isinstance(self.head, CosineHead):
            kernel, bias = self.head.kernel, None
        else:
            kind = type(self.head).__name__ if self.head is not None else "no layer"
            raise ValueError(
                "This attack works on the weights of the head; expected a Dense layer without "
                f"activation or a CosineHead as the model's last layer; received {kind}"
            )
        kernel = at_least_float32(tf.convert_to_tensor(kernel))
        return kernel, None if bias is None else at_least_float32(tf.convert_to_tensor(bias))

    def head_margin(self) -> float:
        """The margin that the head was trained with; 0 for heads without one."""
        return float(getattr(self.head, "margin", 0.0))

    def scaled(self, logits):
        """Returns logits of the model at the scale that the attack works on, in float32."""
        logits = at_least_float32(logits)
        return logits if self._factor == 1.0 else logits * self._factor

    def _body_of_model(self):
        """The model up to its last layer, as a model of the same layers; built once."""
        if self._body is None:
            # The first call may come from within a `tf.function`.
            with tf.init_scope():
                self._body = _without_head(self.model, self.head)
        return self._body


def _checked(logits, model):
    """A model's logits, if they are one tensor of floating-point numbers."""
    if isinstance(logits, (list, tuple, dict)):
        key = repr(next(iter(logits), None)) if isinstance(logits, dict) else 0
        raise TypeError(
            "The model returns no single tensor; expected one floating-point TensorFlow tensor, "
            f"the logits: pass `lambda images: {_call_of(model)}[{key}]` if it is that one; "
            f"received a {type(logits).__name__} of length {len(logits)}"
        )
    if not tf.is_tensor(logits) or not logits.dtype.is_floating:
        raise TypeError(
            "The model does not return logits; expected one floating-point TensorFlow tensor "
            "(n, classes); wrap other code in tf.numpy_function for attacks that need no "
            f"gradient; received {logits!r:.100}"
        )
    if logits.shape.rank is None:
        # What `tf.numpy_function` returns.
        logits = tf.ensure_shape(logits, [None, None])
    return logits


def check_logit_scale(logit_scale) -> None:
    """Raises a ValueError unless `logit_scale` is "model", "unit" or a positive number."""
    if isinstance(logit_scale, str) and logit_scale in ("model", "unit"):
        return
    is_number = isinstance(logit_scale, numbers.Real) and not isinstance(logit_scale, bool)
    if is_number and 0 < logit_scale < math.inf:
        return
    raise ValueError(
        'Invalid logit_scale; expected "model", "unit" or a number > 0; '
        f"received logit_scale={logit_scale!r}"
    )


def _as_number(logit_scale) -> float:
    return 1.0 if logit_scale == "unit" else float(logit_scale)


def _head_of(model):
    head = getattr(model, "head", None)
    if head is not None:
        return head
    layers = getattr(model, "layers", None)
    return layers[-1] if layers else None


def _without_head(model, head) -> keras.Model:
    outputs = _symbolic_outputs(model)
    if len(outputs) != 1 or len(model.inputs) != 1:
        raise ValueError(
            "This attack works on features; expected a model with a method `features(images)` such "
            "as HEAdversarialModel, or a functional or built sequential model with one input and "
            f"one output; received {type(model).__name__}"
        )
    # Not `layers[-1].input`: that is its first call, which may belong to another model.
    last, call_number, _ = outputs[0]._keras_history
    if last is not head or not last.weights:
        raise ValueError(
            "This attack works on features; expected a model whose last layer is its head, with "
            f"weights; received the last layer {last.name!r} ({type(last).__name__})"
        )
    return keras.Model(model.inputs[0], last._inbound_nodes[call_number].input_tensors[0])


def _symbolic_outputs(model) -> list:
    """The outputs of a functional or built sequential model; empty for any other."""
    if isinstance(model, keras.Model):
        return list(getattr(model, "outputs", None) or [])
    return []


def check_class_numbers(labels: np.ndarray, num_classes: int) -> None:
    """Raises a ValueError unless every label is one of the model's classes."""
    if labels.max(initial=0) >= num_classes:
        raise ValueError(
            f"Label outside the classes; expected 0..{num_classes - 1}; received {labels.max()}"
        )


def check_logits(logits: np.ndarray, num_images: int, model) -> None:
    """Raises a ValueError unless a model's answer to some images can be logits of classes."""
    if logits.ndim != 2 or len(logits) != num_images:
        raise ValueError(
            f"Not a classifier; expected logits of shape ({num_images}, classes) for "
            f"{num_images} images; received shape {logits.shape}"
        )
    if logits.shape[1] == 1:
        raise ValueError(
            "The model has one output; expected one logit for each class: for a logit z without "
            f"sigmoid pass `lambda images: tf.pad({_call_of(model)}, [[0, 0], [1, 0]])`,"
            " which answers (0, z); received 1 output"
        )
    check_not_probabilities(logits, model)


def check_not_probabilities(logits: np.ndarray, model=None) -> None:
    """Refuses outputs that look like a softmax: attacks on probabilities are misleadingly weak.

    Args:
        logits: what a model answers to some images, in any dtype.
        model: a Keras model is also judged by its last activation.
    """
    activation = None if model is None else last_activation(model)
    if _are_distributions(logits):
        received = "rows that sum to 1"
    elif activation in PROBABILITIES:
        received = f"activation={activation!r}"
    else:
        return
    raise ValueError(
        "The model returns probabilities; expected logits: remove the softmax of the last "
        f"layer, or pass `lambda images: tf.math.log({_call_of(model)})`; received {received}"
    )


def _call_of(model) -> str:
    """How the logits of a model are asked for: only a Keras layer takes the flag of the mode."""
    return (
        "model(images, training=False)"
        if isinstance(model, keras.layers.Layer)
        else "model(images)"
    )


def check_values(network, head, input_shape, num_features: int) -> None:
    """Raises a ValueError for a network or a head whose values are probabilities.

    Both are run on random numbers. `check_parts` judges them by their layers, of which parts of
    somebody else's class say nothing.

    Args:
        network: a built network, from images to features.
        head: a built head, from features to logits.
        input_shape: shape of a batch of images, None where a size is open.
        num_features: length of a feature vector.
    """
    random = np.random.RandomState(0)
    features = random.normal(0.0, 9.0, (_NUM_TRIED, num_features))
    if _are_distributions(_values(head, features)):
        raise ValueError(f"{NO_LOGITS}; received rows that sum to 1")
    # A functional network says by its layers what it ends in.
    if _symbolic_outputs(network):
        return
    images = random.uniform(size=(_NUM_TRIED, *sides_of(input_shape)))
    if _are_distributions(_values(network, images)):
        raise ValueError(f"{NO_FEATURES}; received rows that sum to 1")


def _values(layer, inputs: np.ndarray) -> np.ndarray:
    return at_least_float32(layer(tf.constant(inputs.astype(np.float32)), training=False)).numpy()


def _are_distributions(rows: np.ndarray) -> bool:
    """Whether all numbers are shares, up to rounding, and those of each row sum to 1."""
    # Larger numbers and NaN are no shares, and half precision could not hold all of them.
    if not (rows.min() > -1.0 and rows.max() < 2.0):
        return False
    close = _sum_tolerance(rows)
    sums_to_one = np.all(np.abs(rows.sum(axis=1) - 1.0) < close)
    return bool(sums_to_one and rows.min() > -close and rows.max() < 1.0 + close)


def _sum_tolerance(logits: np.ndarray) -> float:
    """How far from 1 the sums of a softmax may be in the coarsest dtype that holds these values.

    That is the dtype that they were rounded to, also where they were cast to float32 afterwards.
    """
    for name in HALF_PRECISIONS:
        rounded = logits.astype(tf.as_dtype(name).as_numpy_dtype).astype(logits.dtype)
        if np.array_equal(rounded, logits, equal_nan=True):
            return _SUM_UNITS * UNITS[name]
    return _PROBABILITY_TOLERANCE


# float16 holds sizes from 6e-8 to 65504, and gradients shrink on the way from logits to pixels.
# If the largest entry of the logits' gradient has this size, gradients may shrink a billion times
# or grow a thousand times before float16 loses them.
_LARGEST_ENTRY = 64.0
_EXPONENT_BITS = {tf.float32: (tf.int32, 0x7F800000), tf.float64: (tf.int64, 0x7FF0000000000000)}


def loss_and_gradient(victim, loss_function, x_adv, eot_samples: int = 1):
    """Returns logits, per-example loss, and the gradient of the loss at `x_adv`.

    With `eot_samples > 1` the gradient is the mean over so many passes through a randomised model
    (expectation over transformation, Athalye et al. 2018); logits and loss are the last pass's, as
    in AutoAttack.

    Args:
        victim: the classifier.
        loss_function: function from logits to per-example losses.
        x_adv: images.
        eot_samples: passes to average over.
    """
    if eot_samples == 1:
        return _one_pass(victim, loss_function, x_adv)

    def body(sample, _logits, _loss, total):
        logits, loss, gradient = _one_pass(victim, loss_function, x_adv)
        return sample + 1, logits, loss, total + gradient

    first = _one_pass(victim, loss_function, x_adv)
    _, logits, loss, total = tf.while_loop(
        lambda sample, *_: sample < eot_samples, body, (tf.constant(1), *first)
    )
    return logits, loss, total / eot_samples


def _one_pass(victim, loss_function, x_adv):
    # Persistent: a victim may return several outputs, such as two kinds of logits.
    with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
        tape.watch(x_adv)
        logits = victim.logits(x_adv)
    loss, gradient = image_gradient(tape, loss_function, x_adv, logits, not victim.training)
    return logits, loss, usable(gradient)


def usable(gradient):
    """Returns a gradient with 0 for NaN and infinity, or says that there is none."""
    if gradient is None:
        raise ValueError(
            "This attack needs gradients; expected logits that depend differentiably on the images "
            "(else use an attack without gradients); received a model without any gradient"
        )
    return tf.where(tf.math.is_finite(gradient), gradient, tf.zeros_like(gradient))


def image_gradient(tape, loss_function, images, outputs, is_per_example: bool = True):
    """Returns per-example losses, and their gradient by the images; None where there is none.

    Args:
        tape: a tape that has recorded everything from images to outputs.
        loss_function: function from outputs to per-example losses.
        images: what to differentiate by.
        outputs: what the network returned, in float32 or better: logits or features. If there are
            several, the tape must be persistent.
        is_per_example: whether each output depends on its own image only. Otherwise, as in training
            mode, the batch has one scale.
    """
    # A tape of its own: one that knows the network would run its backward pass here, too.
    with tf.GradientTape(watch_accessed_variables=False) as loss_tape:
        loss_tape.watch(outputs)
        loss = loss_function(outputs)
    upstream = loss_tape.gradient(loss, outputs)
    if upstream is None:
        return loss, None
    return loss, pulled_back(tape, upstream, images, outputs, is_per_example)


def pulled_back(tape, upstream, images, outputs, is_per_example: bool = True):
    """Takes a gradient by the outputs back to the images, undamaged by half precision.

    The loss of a confident prediction has a tiny gradient, which float16 would round to zero within
    the network. So the network is differentiated with a scaled gradient of its outputs, and the
    scale is taken out again. All scales are powers of two: float32 gives the very same numbers.

    One scale for the whole batch would not do: the gradients of its predictions may differ by a
    factor of a million, and an overflow would leave an image unattacked. Each gradient is scaled by
    its own size, so that a confident prediction overflows no sooner than a wrong one.
    """
    upstream = tf.convert_to_tensor(upstream)
    axes = list(range(1 if is_per_example else 0, upstream.shape.rank))
    largest = tf.reduce_max(tf.abs(upstream), axis=axes, keepdims=True)
    scale = _power_of_two(tf.stop_gradient(largest)) / _LARGEST_ENTRY
    gradient = tape.gradient(outputs, images, output_gradients=upstream / scale)
    if gradient is None:
        return None
    shape = tf.concat([tf.shape(scale)[:1], tf.ones(gradient.shape.rank - 1, tf.int32)], axis=0)
    return gradient * tf.cast(tf.reshape(scale, shape), gradient.dtype)


def _power_of_two(size):
    """The largest power of two up to `size`; 1 where that is zero or infinite."""
    integer, bits = _EXPONENT_BITS[size.dtype]
    power = tf.bitcast(tf.bitwise.bitwise_and(tf.bitcast(size, integer), bits), size.dtype)
    return tf.where((power > 0.0) & tf.math.is_finite(power), power, tf.ones_like(power))
