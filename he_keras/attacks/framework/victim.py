"""What an attack sees of a classifier, images in and logits out, and the checks of logits."""

import copy
import math
import numbers

import keras
import numpy as np
import tensorflow as tf

from he_keras import cpu
from he_keras.attacks.framework.pass_counter import COUNTER
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
from he_keras.precision import HALF_PRECISIONS, UNITS, at_least_float32

#: AutoAttack's: how far a row of probabilities may be from the sum 1.
_PROBABILITY_TOLERANCE = 1e-5
#: Units in the last place by which the rounded values of a softmax may miss the sum 1.
_SUM_UNITS = 4
#: Random examples that a network and a head are tried with.
_NUM_TRIED = 4


class Victim:
    """Wraps a `keras.Model` or a callable `images -> logits` for an attack.

    The wrapped model, a plain callable included, always runs inside a Keras call with an explicit
    `training` flag, False unless asked otherwise. Without the flag, Keras 3 can put layers in
    training mode. A model's head is its attribute `head`, else its last layer.

    Args:
        model: a `keras.Model`, an `HEAdversarialModel`, or any callable from images to logits.
        logit_scale: "model" takes the logits as they are. "unit" divides the scale of a cosine head
            out, which is the HE paper's protocol and weakens cross-entropy attacks. A number sets
            the scale of a cosine head, or multiplies the logits of any other classifier.
        training: run the model in training mode (only some training objectives want that).
    """

    def __init__(self, model, logit_scale: float | str = "model", training: bool = False) -> None:
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
        self.head = _head_of(model)
        head_scale = self.head.scale if isinstance(self.head, CosineHead) else 1.0
        self.scale = head_scale if logit_scale == "model" else _as_number(logit_scale)
        self._factor = self.scale / head_scale
        self._body: keras.Model | None = None
        self._passes = cpu.ClassifierPasses(
            self._model_logits, self._model_features, self._head_logits
        )
        self._is_counted = False

    def counted(self) -> "Victim":
        """Returns a victim whose passes are counted, see `pass_counter`."""
        COUNTER.prepare()
        counted = copy.copy(self)
        counted._is_counted = True
        return counted

    def _watched(self, outputs):
        return COUNTER.watched(outputs) if self._is_counted else outputs

    def for_many_passes(self) -> "Victim":
        """Returns a victim with the same values that takes less time; itself where there is none.

        It is for passes while the model's variables stand still, and belongs to the graph in which
        it is made.
        """
        # In training mode the statistics are those of the whole batch.
        passes = self._passes if self.training else cpu.faster_passes(self._passes, self.model)
        if passes is self._passes:
            return self
        faster = copy.copy(self)
        faster._passes = passes
        return faster

    def logits(self, images):
        """Returns the logits that the attack works on, in float32 or better."""
        return self.scaled(self._watched(self._passes.logits(images)))

    def _model_logits(self, images):
        return _checked(self._called(self.model, images), self.model)

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
        features = self._passes.features(images)
        if not tf.is_tensor(features) or features.shape.rank != 2:
            raise ValueError(
                "The head's input is not a feature vector; expected a tensor of shape (n, "
                f"features): add global pooling or Flatten; received {features!r:.100}"
            )
        return at_least_float32(self._watched(features))

    def _model_features(self, images):
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
        return self.scaled(self._passes.logits_of_features(features))

    def _head_logits(self, features):
        return self._called(self.head, features)

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
