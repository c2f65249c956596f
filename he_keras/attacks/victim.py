"""What an attack sees of a classifier: images in, logits out, and the head where there is one."""

import copy
import math
import numbers
from collections.abc import Callable

import keras
import tensorflow as tf

from he_keras.attacks.streams import in_streams, worthwhile_streams
from he_keras.layers.cosine_head import CosineHead


class Victim:
    """Wraps a `keras.Model` or a callable `images -> logits` for an attack.

    The wrapped model always runs with an explicit `training` flag (False unless asked otherwise):
    leaving the flag out can put batch normalisation in training mode in Keras 3. A model's head is
    its attribute `head`, else its last layer.

    Args:
        model: a `keras.Model`, an `HEAdversarialModel`, or any callable from images to logits.
        logit_scale: "model" takes the logits as they are; "unit" divides the scale of a cosine head
            out (the HE paper's protocol, which weakens cross-entropy attacks); a number sets the
            scale of a cosine head, or multiplies the logits of any other classifier.
        training: run the model in training mode (only some training objectives want that).
        streams: into how many parts a batch is cut that the processor works on side by side, see
            `he_keras.attacks.streams`; None for as many as it gains from.
    """

    def __init__(
        self,
        model,
        logit_scale: float | str = "model",
        training: bool = False,
        streams: int | None = 1,
    ) -> None:
        check_logit_scale(logit_scale)
        if not callable(model):
            raise TypeError(
                "Cannot attack this object; expected a keras.Model or a callable images -> logits; "
                f"received {type(model).__name__}"
            )
        self.model = model
        self.training = training
        self.streams = _own_streams(model, training) if streams is None else streams
        self.head = _head_of(model)
        head_scale = self.head.scale if isinstance(self.head, CosineHead) else 1.0
        self.scale = head_scale if logit_scale == "model" else _as_number(logit_scale)
        self._factor = self.scale / head_scale
        self._body: keras.Model | None = None
        self._fixed_logits: Callable | None = None

    def with_fixed_weights(self) -> "Victim":
        """Returns a victim that reads the model's variables once, now, where the model can do that.

        For many passes while the variables stand still, in the graph in which it is made.
        """
        fix = getattr(self.model, "with_fixed_weights", None)
        if self.training or fix is None:
            return self
        fixed = copy.copy(self)
        fixed._fixed_logits = fix()
        return fixed

    def logits(self, images):
        """Returns the logits that the attack works on, in float32 or better."""
        return self._scaled(in_streams(self._raw_logits, images, self.streams))

    def _raw_logits(self, images):
        if self._fixed_logits is not None:
            logits = self._fixed_logits(images)
        elif isinstance(self.model, keras.layers.Layer):
            logits = self.model(images, training=self.training)
        else:
            logits = self.model(images)
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

    def features(self, images):
        """Returns the feature vectors in front of the head, in float32 or better.

        They come from the model's own method `features`, else they are the input of the last layer
        of a functional or sequential model.
        """
        features = in_streams(self._raw_features, images, self.streams)
        if not tf.is_tensor(features) or features.shape.rank != 2:
            raise ValueError(
                "The head's input is not a feature vector; expected a tensor of shape (n, "
                f"features): add global pooling or Flatten; received {features!r:.100}"
            )
        return _at_least_float32(features)

    def _raw_features(self, images):
        if hasattr(self.model, "features"):
            return self.model.features(images, training=self.training)
        return self._body_of_model()(images, training=self.training)

    def logits_of_features(self, features):
        """Returns the logits that the head makes of features.

        An attack that needs features and logits spends one pass on both.
        """
        if hasattr(self.model, "features") and not callable(getattr(self.model, "head", None)):
            raise ValueError(
                "This attack works on features; expected a model that has the layer behind its "
                f"method `features` as attribute `head`; received {type(self.model).__name__}"
            )
        if isinstance(self.head, keras.layers.Layer):
            return self._scaled(self.head(features, training=self.training))
        return self._scaled(self.head(features))

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
        kernel = _at_least_float32(tf.convert_to_tensor(kernel))
        return kernel, None if bias is None else _at_least_float32(tf.convert_to_tensor(bias))

    def head_margin(self) -> float:
        """The margin that the head was trained with; 0 for heads without one."""
        return float(getattr(self.head, "margin", 0.0))

    def _scaled(self, logits):
        logits = _at_least_float32(logits)
        return logits if self._factor == 1.0 else logits * self._factor

    def _body_of_model(self):
        """The model up to its last layer, as a model of the same layers; built once."""
        if self._body is None:
            # The first call may come from within a `tf.function`.
            with tf.init_scope():
                self._body = _without_head(self.model, self.head)
        return self._body


def _own_streams(model, training: bool) -> int:
    # In training mode the statistics are those of the whole batch; replicas keep the cores busy.
    is_alone = tf.distribute.get_strategy().num_replicas_in_sync == 1
    return worthwhile_streams(model) if is_alone and not training else 1


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


def _at_least_float32(tensor):
    """Eight bits of mantissa would tie the losses that an attack compares."""
    return tf.cast(tensor, tf.float32) if tensor.dtype.size < tf.float32.size else tensor


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
