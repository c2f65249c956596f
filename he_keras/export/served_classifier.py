"""What every signature of an exported model computes, from float images to named outputs."""

import keras
import numpy as np
import tensorflow as tf

from he_keras.attacks import Victim
from he_keras.attacks.checks import check_not_probabilities, check_positive_integer
from he_keras.layers.cosine_head import CosineHead
from he_keras.threat import ThreatModel

#: What stands for a side that the model leaves open, where one is needed to look at its answers.
_ANY_SIDE = 32
_PROBES = 4
_BOUNDS = (0.0, 1.0)


class ServedClassifier:
    """A checked model and the outputs that it is served with.

    Attributes:
        model: the `keras.Model`.
        image_shape: shape of one image; None for sides that are free.
        class_names: one name per class.
        temperature: divides the logits before the softmax.
        top_k: how many classes `scores` and `labels` hold.
        has_cosines: whether there is an output `cosines`.

    Args:
        model: a built classifier of images in [0, 1] that returns logits.
        class_names: names of the classes, in order; default: their numbers.
        temperature: see `he_keras.export.calibrate`.
        top_k: default: all classes.
    """

    def __init__(self, model, class_names=None, temperature: float = 1.0, top_k=None) -> None:
        self.model = model
        self.image_shape = _image_shape(model)
        _check_bounds(model)
        num_classes = _num_classes(model, self.image_shape)
        self.class_names = _checked_names(class_names, num_classes)
        self.temperature = float(temperature)
        self.top_k = _checked_top_k(top_k, num_classes)
        self._victim = Victim(model)
        head = self._victim.head
        self.has_cosines = (
            isinstance(head, CosineHead) and head.feature_norm and head.weight_norm
        ) and self._ends_in_head()

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        return len(self.class_names)

    def __call__(self, images) -> dict:
        """Returns the outputs by name, for float32 images."""
        cosines = {}
        if self.has_cosines:
            # One pass through the network for both.
            features = self._victim.features(images)
            cosines["cosines"] = tf.cast(self._victim.head.cosines(features), tf.float32)
            logits = self._victim.logits_of_features(features)
        else:
            logits = self.model(images, training=False)
        logits = tf.cast(logits, tf.float32)
        probabilities = self.probabilities(logits)
        # By logits: where probabilities round to the same number, these still differ.
        order = tf.math.top_k(logits, self.top_k).indices
        return {
            "logits": logits,
            "probabilities": probabilities,
            "classes": tf.argmax(logits, axis=-1),
            "scores": tf.gather(probabilities, order, batch_dims=1),
            "labels": tf.gather(tf.constant(self.class_names), order),
            **cosines,
        }

    def probabilities(self, logits):
        """The softmax of the scaled logits, calibrated where a temperature was fitted."""
        return tf.nn.softmax(logits / self.temperature)

    def _ends_in_head(self) -> bool:
        try:
            self._victim.features(_probe(self.image_shape)[:1])
        except ValueError:
            return False
        return True


def _image_shape(model) -> tuple[int | None, ...]:
    if not isinstance(model, keras.Model) or not model.built:
        raise ValueError(
            f"Nothing to export; expected a built keras.Model; received {type(model).__name__}"
        )
    network = getattr(model, "network", model)
    shape = getattr(network, "input_shape", None)
    if not isinstance(shape, tuple) or not all(side is None or side > 0 for side in shape):
        raise ValueError(
            "The model does not say which images it takes; expected one input of a known shape; "
            f"received {type(model).__name__} with input_shape={shape!r}"
        )
    return shape[1:]


def _check_bounds(model) -> None:
    threat = getattr(getattr(model, "objective", None), "threat", None)
    if isinstance(threat, ThreatModel) and tuple(threat.bounds) != _BOUNDS:
        raise ValueError(
            "The signatures take images in [0, 1]; expected a model of those, with any "
            f"normalisation inside; received bounds={tuple(threat.bounds)}"
        )


def _probe(image_shape):
    sides = [side or _ANY_SIDE for side in image_shape]
    return tf.constant(np.random.RandomState(0).rand(_PROBES, *sides), tf.float32)


def _num_classes(model, image_shape) -> int:
    logits = np.asarray(tf.cast(model(_probe(image_shape), training=False), tf.float32))
    if logits.ndim != 2 or len(logits) != _PROBES:
        raise ValueError(
            f"Not a classifier; expected logits of shape (batch, classes); received {logits.shape} "
            f"for {_PROBES} images"
        )
    check_not_probabilities(logits)
    return logits.shape[1]


def _checked_names(class_names, num_classes: int) -> tuple[str, ...]:
    names = tuple(map(str, range(num_classes) if class_names is None else class_names))
    if len(names) != num_classes:
        raise ValueError(
            f"Class names do not match the classes; expected {num_classes} names; "
            f"received {len(names)}"
        )
    broken = [name for name in names if not name.strip() or len(name.splitlines()) != 1]
    if broken:
        raise ValueError(
            "A class name is a line of a text file; expected text without line breaks; received "
            f"{broken[0]!r}"
        )
    return names


def _checked_top_k(top_k, num_classes: int) -> int:
    if top_k is None:
        return num_classes
    check_positive_integer("top_k", top_k)
    if top_k > num_classes:
        raise ValueError(
            f"More classes than there are; expected top_k of at most {num_classes}; received "
            f"top_k={top_k}"
        )
    return int(top_k)
