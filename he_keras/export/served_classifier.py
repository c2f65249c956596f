"""What every signature of an exported model computes, from float images to named outputs."""

import keras
import numpy as np
import tensorflow as tf

from he_keras import cpu
from he_keras.arguments import check_positive_integer
from he_keras.attacks import Victim
from he_keras.attacks.framework.victim import check_not_probabilities
from he_keras.data.augmentation import to_unit_float
from he_keras.layers.cosine_head import CosineHead
from he_keras.threat import bounds_of, from_unit

#: What stands for a side that the model leaves open, where one is needed to look at its answers.
_ANY_SIDE = 32
_PROBES = 4


class ServedClassifier:
    """A checked model and the outputs that it is served with.

    Attributes:
        model: the `keras.Model`.
        image_shape: shape of one image; None for sides of any length.
        class_names: one name per class.
        temperature: divides the logits before the softmax.
        top_k: how many classes `scores` and `labels` hold.
        has_cosines: whether the model has an output `cosines`.

    Args:
        model: a built classifier that returns logits.
        class_names: names of the classes, in order; default: their numbers.
        temperature: see `he_keras.export.calibrate`.
        top_k: default: all classes.
        bounds: the bounds of the model's images; default: those of its training, otherwise [0, 1].
    """

    def __init__(
        self, model, class_names=None, temperature: float = 1.0, top_k=None, bounds=None
    ) -> None:
        self.model = model
        self.image_shape = _image_shape(model)
        self.bounds = bounds_of(model, bounds)
        num_classes = _num_classes(model, self.image_shape, self.bounds)
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

    def of_bytes(self, images) -> dict:
        """Returns the outputs by name, for uint8 images."""
        return self(from_unit(to_unit_float(images), self.bounds))

    def __call__(self, images) -> dict:
        """Returns the outputs by name, for float32 images within the bounds."""
        # The graph may be served on other devices than this one.
        return cpu.plainly(self._outputs, images)

    def _outputs(self, images) -> dict:
        cosines = {}
        if self.has_cosines:
            # One pass through the network serves both outputs.
            features = self._victim.features(images)
            cosines["cosines"] = tf.cast(self._victim.head.cosines(features), tf.float32)
            logits = self._victim.logits_of_features(features)
        else:
            logits = self.model(images, training=False)
        logits = tf.cast(logits, tf.float32)
        probabilities = self.probabilities(logits)
        # Sorted by logits, which still differ if probabilities round to the same number.
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
        """The softmax of the scaled logits, calibrated if a temperature was fitted."""
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
    # A subclassed network has no shape of its own. Keras remembers the one it was built for.
    built_for = (model.get_build_config() or {}).get("input_shape")
    shape = getattr(network, "input_shape", None) or built_for
    shape = tuple(shape) if isinstance(shape, list) else shape
    if not isinstance(shape, tuple) or not all(side is None or side > 0 for side in shape):
        raise ValueError(
            "The model does not say which images it takes; expected one input of a known shape; "
            f"received {type(model).__name__} with input_shape={shape!r}"
        )
    return shape[1:]


def _probe(image_shape):
    sides = [side or _ANY_SIDE for side in image_shape]
    return tf.constant(np.random.RandomState(0).rand(_PROBES, *sides), tf.float32)


def _num_classes(model, image_shape, bounds) -> int:
    images = from_unit(_probe(image_shape), bounds)
    logits = np.asarray(tf.cast(model(images, training=False), tf.float32))
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
