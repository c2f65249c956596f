"""The network inside a classifier of one's own: up to its last Dense layer, ready to be attacked.

An adversary moves pixels within the bounds of the threat model. So rescaling becomes the network's
first layer, computed in float32, and takes these pixels. Augmentation leaves the network: it would
move the perturbed pixels, see `he_keras.networks.checks`.
"""

import warnings
from typing import NamedTuple

import keras
import numpy as np

from he_keras.arguments import check_choice
from he_keras.layers.cosine_head import CosineHead
from he_keras.layers.input_standardization import InputStandardization
from he_keras.networks import surgery
from he_keras.networks.checks import augmentation_layers, check_attackable, check_single

HEADS = ("he", "m-he", "linear")
PIXELS = ("auto", "0..1", "0..255")
_RESCALING = (keras.layers.Rescaling, keras.layers.Normalization)
_NUM_PROBES, _ANY_SIDE = 4, 32
#: The features of the network may differ by this share of their spread; more under half precision.
_SAME, _HALF_SAME = 1e-3, 5e-2
_REMEDY = "pass its parts: HEAdversarialModel(network, head, objective)"


class OwnNetwork(NamedTuple):
    """What `own_network` returns.

    Attributes:
        network: a copy of the classifier's layers, from images within the bounds to features.
        head: the classifier's own last layer.
        augmentation: copies of the layers that augment, as a model of images within the bounds.
    """

    network: keras.Model
    head: keras.layers.Dense
    augmentation: keras.Sequential | None


class _Front(NamedTuple):
    """The first layers of a network that rescale or augment, as one map `gain * pixels + shift`."""

    operations: list
    augmentation: list
    gain: np.ndarray
    shift: np.ndarray


def own_network(model, bounds=(0.0, 1.0), pixels: str = "auto") -> OwnNetwork:
    """Takes the network and the head out of a classifier.

    Args:
        model: a `keras.Model`: sequential, functional, or subclassed with a `call` that runs on
            symbolic tensors. It is copied, not changed.
        bounds: the pixel bounds of the images that the network shall take.
        pixels: what the classifier takes: "0..1", "0..255" or "auto". "auto" is what its first
            layers show; where they show nothing, pixels within the bounds.

    Example:
        >>> import keras
        >>> from he_keras.networks.own_network import own_network
        >>> layers = [keras.Input((4, 4, 1)), keras.layers.RandomFlip()]
        >>> layers += [keras.layers.Rescaling(1 / 255), keras.layers.Flatten()]
        >>> own = own_network(keras.Sequential([*layers, keras.layers.Dense(3, "softmax")]))
        >>> [type(layer).__name__ for layer in own.network.layers], own.head.units
        (['InputLayer', 'Flatten'], 3)
        >>> [type(layer).__name__ for layer in own.augmentation.layers]
        ['Rescaling', 'RandomFlip', 'Rescaling', 'ReLU']
    """
    check_choice("pixels", pixels, PIXELS)
    parts = _parts(model)
    low, high = bounds
    taken = surgery.pixels_of_layers(parts.body) if pixels == "auto" else pixels
    # From images within the bounds to those that the classifier takes.
    gain = {"0..1": 1.0, "0..255": 255.0}.get(taken or "", high - low) / (high - low)
    shift = -low * gain if taken else 0.0
    front = _front(parts.body, np.float64(gain), np.float64(shift))
    images = keras.Input(parts.body.input_shape[1:], dtype="float32", name="images")
    features = surgery.copied(parts.body, images, _standardized(images, front), front.operations)
    network = keras.Model(images, features, name=model.name)
    _check_same(parts.body, network, bounds, (gain, shift))
    check_attackable(network)
    augmentation = _augmentation(front, bounds)
    if augmentation is not None:
        names = ", ".join(layer.name for layer, *_ in front.augmentation)
        warnings.warn(
            f"Augmentation was taken out of the network ({names}): map it over the data, "
            "train.map(lambda images, labels: (model.augmentation(images, training=True), labels))",
            stacklevel=3,
        )
    return OwnNetwork(network, parts.head, augmentation)


def _parts(model) -> surgery.Parts:
    """The body and the last Dense layer, or a sentence that says why there are none."""
    kind = type(model).__name__
    if not isinstance(model, keras.Model):
        raise TypeError(f"Invalid model; expected a trained or built keras.Model; received {kind}")
    check_single(model, "model")
    if not model.built:
        raise ValueError(
            "The model has no weights yet; expected one that was built or called on images; "
            f"received {kind}"
        )
    parts = surgery.take_apart(model)
    if parts is None or not surgery.is_traced_alike(model):
        raise ValueError(
            "The model does not show its layers; expected a sequential or functional model, or one "
            "whose call runs on symbolic tensors and does the same in training: else "
            f"{_REMEDY}; received {kind}"
        )
    if parts.head is None:
        raise ValueError(
            "The model does not end in a Dense layer of a feature vector; expected one, with or "
            f"without softmax after it: else {_REMEDY}; received {kind}, which ends in "
            f"{parts.activation or 'something else'}"
        )
    return parts


def _front(body: keras.Model, gain, shift) -> _Front:
    """Follows the images through the layers that rescale or augment them."""
    operations: list = []
    augmentation: list = []
    tensor = body.inputs[0]
    while True:
        following = surgery.only_consumer(body, tensor)
        if following is None:
            break
        operation, tensor = following
        layers = _plain_layers(operation)
        if layers is None:
            break
        for layer in layers:
            if isinstance(layer, _RESCALING):
                gain, shift = _rescaled(layer, gain, shift)
            else:
                augmentation.append((layer, gain, shift))
        operations.append(operation)
    return _Front(operations, augmentation, np.ravel(gain), np.ravel(shift))


def _plain_layers(operation) -> list | None:
    """The layers of an operation that only rescale or augment; None for any other operation."""
    if isinstance(operation, keras.Sequential):
        inside = [_plain_layers(layer) for layer in operation.layers]
        found = [layers for layers in inside if layers is not None]
        return sum(found, []) if len(found) == len(inside) else None
    if type(operation) in _RESCALING:
        return [operation] if _can_fold(operation) else None
    is_layer = isinstance(operation, keras.layers.Layer)
    return [operation] if is_layer and augmentation_layers(operation) else None


def _can_fold(layer) -> bool:
    """Whether the constants belong to all pixels or to channels, and keep dark below light."""
    if isinstance(layer, keras.layers.Rescaling):
        scale, offset = np.asarray(layer.scale), np.asarray(layer.offset)
        return max(scale.ndim, offset.ndim) <= 1 and bool((scale > 0).all())
    return not layer.invert and np.size(layer.mean) in (1, np.shape(layer.mean)[-1])


def _rescaled(layer, gain, shift):
    if isinstance(layer, keras.layers.Rescaling):
        scale = np.asarray(layer.scale, "float64")
        return gain * scale, shift * scale + np.asarray(layer.offset, "float64")
    mean = np.ravel(np.asarray(layer.mean, "float64"))
    deviation = np.maximum(
        np.sqrt(np.ravel(np.asarray(layer.variance, "float64"))), keras.config.epsilon()
    )
    return gain / deviation, (shift - mean) / deviation


def _standardized(images, front: _Front):
    """Images as the rest of the network takes them."""
    gain, shift = np.broadcast_arrays(front.gain, front.shift)
    if np.allclose(gain, 1.0) and np.allclose(shift, 0.0, atol=1e-6):
        return images
    return InputStandardization(-shift / gain, 1.0 / gain, name="standardization")(images)


def _augmentation(front: _Front, bounds) -> keras.Sequential | None:
    """The augmentation as a model of images within the bounds, each layer in its own pixels."""
    if not front.augmentation:
        return None
    layers: list = []
    now = (1.0, 0.0)
    for layer, gain, shift in front.augmentation:
        if np.size(gain) > 1 or np.size(shift) > 1:
            raise ValueError(
                "The network augments images after their channels were normalised; expected "
                "augmentation before Normalization, or in the data: train.map(...); received "
                f"layer {layer.name}"
            )
        wanted = (float(np.ravel(gain)[0]), float(np.ravel(shift)[0]))
        layers += _change(now, wanted)
        layers.append(type(layer).from_config({**layer.get_config(), "dtype": "float32"}))
        now = wanted
    layers += _change(now, (1.0, 0.0))
    low, high = bounds
    clip = [
        keras.layers.Rescaling(1.0, -low),
        keras.layers.ReLU(high - low),
        keras.layers.Rescaling(1.0, low),
    ]
    return keras.Sequential([*layers, *(clip if low else clip[1:2])], name="augmentation")


def _change(now: tuple[float, float], wanted: tuple[float, float]) -> list:
    """The layer, if one is needed, from pixels `gain * x + shift` to those of another pair."""
    gain = wanted[0] / now[0]
    shift = wanted[1] - gain * now[1]
    is_same = np.isclose(gain, 1.0) and np.isclose(shift, 0.0, atol=1e-6)
    return [] if is_same else [keras.layers.Rescaling(gain, shift)]


def head_for(own: keras.layers.Dense, kind: str, scale=None, margin=None) -> keras.layers.Layer:
    """Returns the head for a network that ended in the layer `own`.

    Args:
        own: the classifier's last layer. One unit becomes two classes.
        kind: "he", "m-he" or "linear"; the last keeps the weights.
        scale: of the cosine head; default: that of `CosineHead`.
        margin: of the cosine head; default: that of `CosineHead`.
    """
    check_choice("head", kind, HEADS)
    given = {"scale": scale, "margin": margin}
    given = {name: value for name, value in given.items() if value is not None}
    if kind == "linear":
        if given:
            raise ValueError(
                "A linear head has no scale and no margin; expected head='he' or 'm-he' with "
                f"these; received {', '.join(f'{name}={value}' for name, value in given.items())}"
            )
        return surgery.linear_copy(own)
    angle = "arc" if kind == "m-he" else "cosine"
    return CosineHead(max(own.units, 2), angle=angle, **given)


def _check_same(body, network, bounds, entrance: tuple[float, float]) -> None:
    """Raises a ValueError unless the network answers as the classifier's own layers do."""
    if network.output_shape != body.output_shape:
        raise ValueError(
            "The augmentation changes the size of the images; expected one that keeps it, such as "
            f"padding before RandomCrop; received features of shape {body.output_shape} with it, "
            f"{network.output_shape} without it"
        )
    low, high = bounds
    sides = [side or _ANY_SIDE for side in body.input_shape[1:]]
    images = low + (high - low) * np.random.RandomState(0).rand(_NUM_PROBES, *sides)
    expected = body((images * entrance[0] + entrance[1]).astype("float32"), training=False)
    received = network(images.astype("float32"), training=False)
    is_half = "float32" not in keras.backend.standardize_dtype(expected.dtype)
    expected, received = (np.asarray(keras.ops.cast(x, "float32")) for x in (expected, received))
    limit = (_HALF_SAME if is_half else _SAME) * max(float(np.abs(expected).max()), 1e-6)
    if not np.all(np.abs(expected - received) <= limit):
        raise ValueError(
            "The network cannot be taken out; expected layers that compute the same when copied: "
            f"else {_REMEDY}; received features that differ by "
            f"{float(np.abs(expected - received).max()):.3g}"
        )
