"""What an attack sees of a classifier: images in, logits out, and the head where there is one."""

import math
import numbers

import keras
import tensorflow as tf

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
    """

    def __init__(self, model, logit_scale: float | str = "model", training: bool = False) -> None:
        check_logit_scale(logit_scale)
        if not callable(model):
            raise TypeError(
                "Cannot attack this object; expected a keras.Model or a callable images -> logits; "
                f"received {type(model).__name__}"
            )
        self.model = model
        self.training = training
        self.head = _head_of(model)
        head_scale = self.head.scale if isinstance(self.head, CosineHead) else 1.0
        self.scale = head_scale if logit_scale == "model" else _as_number(logit_scale)
        self._factor = self.scale / head_scale

    def logits(self, images):
        """Returns the logits that the attack works on, in float32 or better."""
        if isinstance(self.model, keras.layers.Layer):
            logits = self.model(images, training=self.training)
        else:
            logits = self.model(images)
        if not tf.is_tensor(logits) or not logits.dtype.is_floating:
            raise TypeError(
                "The model does not return logits; expected one floating-point TensorFlow tensor "
                "(n, classes); wrap other code in tf.numpy_function for attacks that need no "
                f"gradient; received {logits!r:.100}"
            )
        if logits.dtype.size < tf.float32.size:
            # Eight bits of mantissa would tie the losses that an attack compares.
            logits = tf.cast(logits, tf.float32)
        return logits if self._factor == 1.0 else logits * self._factor

    def features(self, images):
        """Returns the feature vectors in front of the head, where the model offers them."""
        if not hasattr(self.model, "features"):
            raise ValueError(
                "This attack works on features; expected a model with a method `features(images)` "
                f"such as HEAdversarialModel; received {type(self.model).__name__}"
            )
        return self.model.features(images, training=self.training)

    def head_margin(self) -> float:
        """The margin that the head was trained with; 0 for heads without one."""
        return float(getattr(self.head, "margin", 0.0))


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
