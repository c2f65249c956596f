"""What a classifier's parts must be: a network from images to features, a head to logits.

Also: no layer may change images in training only, as `keras.layers.RandomTranslation` does. An
adversary attacks the network in inference mode, where such a layer does nothing. In training the
layer would then move the perturbation away from the pixels that it was crafted for. The network
would see hardly any adversarial images, and its robust accuracy would stay near that of clean
training.
"""

import inspect

import keras
import numpy as np
import tensorflow as tf

from he_keras.arguments import reason_of
from he_keras.layers.call_context import call_context

#: Side of the images that a network is tried with where it leaves theirs open.
_ANY_SIDE = 32
#: Last activations whose values are probabilities, of one class or of each.
PROBABILITIES = ("softmax", "sigmoid", "hard_sigmoid", "sparsemax", "sparse_sigmoid")
_DISTRIBUTIONS = ("softmax", "sparsemax")
_LOGITS = ("linear", "log_softmax")
#: Random images that a layer is tried with, to see whether it augments them.
_PROBES = 8
# What all of Keras's image layers have in common has no public name.
_IMAGE_LAYER = keras.layers.RandomFlip.__mro__[1]
# These do the same in training and in inference.
_SAME_IN_BOTH = (
    keras.layers.Resizing,
    keras.layers.CenterCrop,
    keras.layers.AutoContrast,
    keras.layers.MaxNumBoundingBoxes,
)
#: What the refusals say of parts that cannot make a classifier.
NO_FEATURES = (
    "The network ends in probabilities; expected features: leave out its last layer, the head "
    "makes logits of what comes before it"
)
NO_LOGITS = (
    "The head does not return logits; expected Dense(classes) without activation (or with "
    "log_softmax): the losses apply their own"
)
ONE_UNIT = (
    "The head has one unit; expected one logit for each class: Dense(2) for two classes, with "
    "labels 0 and 1"
)
_OURS = ("keras", "he_keras")
#: These hand on in inference mode what they get.
_HANDING_ON = (
    keras.layers.ActivityRegularization,
    keras.layers.AlphaDropout,
    keras.layers.Dropout,
    keras.layers.Flatten,
    keras.layers.GaussianDropout,
    keras.layers.GaussianNoise,
    keras.layers.Identity,
)


def check_single(model, name: str) -> None:
    """Raises a ValueError for a Keras model of known structure with several inputs or outputs.

    Args:
        model: a Keras layer; others, and models without a symbolic graph, pass.
        name: what the message calls the model.
    """
    for kind, remedy in (
        ("inputs", "wrap the model in one that takes the images and holds the rest fixed"),
        ("outputs", "take the one with the logits: keras.Model(model.inputs, model.outputs[0])"),
    ):
        tensors = (getattr(model, kind, None) if isinstance(model, keras.Model) else None) or []
        if len(tensors) > 1:
            raise ValueError(
                f"The {name} has several {kind}; expected images in and one tensor out: {remedy}; "
                f"received {len(tensors)} {kind}"
            )


def check_parts(network, head) -> None:
    """Raises an error unless a network and a head can make a classifier."""
    for name, part in (("network", network), ("head", head)):
        if not isinstance(part, keras.layers.Layer):
            raise TypeError(
                f"Invalid {name}; expected a keras.Model or layer; received {name}={part!r}"
            )
    check_single(network, "network")
    activation = last_activation(network)
    if activation in _DISTRIBUTIONS:
        raise ValueError(f"{NO_FEATURES}; received activation={activation!r}")
    activation = last_activation(head)
    if activation not in (None, *_LOGITS):
        raise ValueError(f"{NO_LOGITS}; received activation={activation!r}")
    if getattr(_last_layer(head), "units", None) == 1:
        raise ValueError(f"{ONE_UNIT}; received units=1")


def last_activation(model) -> str | None:
    """Returns the name of the activation that a Keras model ends in; None where none is known.

    Example:
        >>> import keras
        >>> from he_keras.networks.checks import last_activation
        >>> last_activation(keras.Sequential([keras.layers.Dense(2), keras.layers.Softmax()]))
        'softmax'
    """
    last = _last_layer(model)
    # A layer of somebody else's may use its `activation` anywhere.
    if last is None or not type(last).__module__.startswith("keras."):
        return None
    activation = getattr(last, "activation", None)
    if activation is not None and not isinstance(activation, keras.Operation):
        return activation.__name__
    name = type(activation or last).__name__.lower()
    return name if name in PROBABILITIES else None


def _last_layer(model):
    """Returns the layer or operation that gives a model's values; None where that is unknown.

    Layers that hand on what they get in inference mode are passed over.
    """
    if isinstance(model, keras.Model):
        outputs = getattr(model, "outputs", None)
        if outputs:
            return _last_layer(_source(outputs[0]))
        if type(model) is keras.Sequential:
            layers = [each for each in model.layers if not isinstance(each, _HANDING_ON)]
            return _last_layer(layers[-1]) if layers else None
        return None
    return model if isinstance(model, keras.Operation) else None


def _source(tensor):
    """Returns the operation of a functional model that computes a symbolic tensor's values."""
    operation, call_number, _ = tensor._keras_history
    while isinstance(operation, _HANDING_ON):
        tensor = operation._inbound_nodes[call_number].input_tensors[0]
        operation, call_number, _ = tensor._keras_history
    return operation


def feature_shape(network, input_shape) -> tuple:
    """Builds a network for images of this shape and returns the shape of its features.

    A subclassed network need not say its shapes: it is run symbolically, or, where that fails, on
    one image of zeros.

    Args:
        network: a Keras layer.
        input_shape: shape of a batch, None where a size is open.

    Example:
        >>> import keras
        >>> from he_keras.networks.checks import feature_shape
        >>> feature_shape(keras.layers.Flatten(), (None, 2, 2, 3))
        (None, 12)
    """
    shape = _shape_of_answer(network, input_shape)
    if not _is_vector(shape):
        raise ValueError(
            "The network must end in a feature vector; expected one output of shape (batch, "
            f"features): add global pooling or Flatten; received output shape {shape}"
        )
    return (None, shape[1])


def number_of_classes(head, shape) -> int:
    """Builds a head for features of this shape and returns the number of its logits.

    Args:
        head: a Keras layer.
        shape: shape of a batch of feature vectors.

    Example:
        >>> import keras
        >>> from he_keras.networks.checks import number_of_classes
        >>> number_of_classes(keras.layers.Dense(3), (None, 12))
        3
    """
    answer = _shape_of_answer(head, shape)
    if not _is_vector(answer):
        raise ValueError(f"{NO_LOGITS}; received output shape {answer}")
    if answer[1] == 1:
        raise ValueError(f"{ONE_UNIT}; received 1 logit")
    return answer[1]


def _is_vector(shape) -> bool:
    return isinstance(shape, tuple) and len(shape) == 2 and isinstance(shape[1], int)


def _shape_of_answer(layer, input_shape):
    """Builds a layer and returns the shape of what it answers, or shapes if it is several."""
    is_default = type(layer).build in (keras.layers.Layer.build, keras.Model.build)
    if not layer.built and not is_default:
        layer.build(input_shape)
    inputs = keras.KerasTensor(input_shape, dtype="float32")
    try:
        with call_context(training=False):
            outputs = layer.compute_output_spec(inputs)
    except Exception:  # noqa: BLE001
        # A layer may be any code, of which only some runs on symbols.
        outputs = _answer_to_zeros(layer, input_shape)
    return keras.tree.map_structure(lambda tensor: tuple(tensor.shape), outputs)


def _answer_to_zeros(network, input_shape):
    images = np.zeros([1, *sides_of(input_shape)], "float32")
    try:
        with tf.init_scope():
            return network(tf.constant(images), training=False)
    # It may be any code, in which anything can go wrong.
    except Exception as error:
        raise ValueError(
            "The network does not run on images; expected one that takes a batch of images, here "
            f"of shape {images.shape}; received {type(network).__name__}: {reason_of(error)}"
        ) from error


def sides_of(input_shape) -> tuple:
    """Returns the shape of one image of this kind, with some size where it is open."""
    return tuple(side or _ANY_SIDE for side in input_shape[1:])


def augmentation_layers(network) -> list[str]:
    """Returns the names of the layers, however deep, that augment images in training.

    Keras's own are known by their class. A custom layer is run on random images where nothing with
    trainable weights comes before it: it augments if training changes what it returns.

    Example:
        >>> import keras
        >>> from he_keras.networks.checks import augmentation_layers
        >>> layers = [keras.Input((8, 8, 1)), keras.layers.RandomFlip(name="flip")]
        >>> augmentation_layers(keras.Sequential(layers))
        ['flip']
    """
    before_weights = True
    found = []
    for layer in network._flatten_layers():
        if not (_computes(layer) or _is_custom(layer)):
            continue
        if isinstance(layer, _IMAGE_LAYER):
            is_augmentation = not isinstance(layer, _SAME_IN_BOTH)
        else:
            is_augmentation = before_weights and _acts_in_training(layer, network)
        if is_augmentation:
            found.append(layer.name)
        if _computes(layer) and layer.trainable_weights:
            before_weights = False
    return found


def check_attackable(network) -> None:
    """Raises a ValueError where training would change images after they were attacked."""
    found = augmentation_layers(network)
    if found:
        raise ValueError(
            "The network augments images in training, but they are attacked without that; expected "
            "augmentation before the attack, in the data: train.map(lambda images, labels: "
            "(augment(images, training=True), labels)), followed by the network; received "
            f"layers {', '.join(found)}"
        )


def _computes(layer) -> bool:
    """Whether a layer holds no other layers, or is one of Keras's image layers."""
    holds_others = any(True for _ in layer._flatten_layers(include_self=False))
    return isinstance(layer, _IMAGE_LAYER) or not holds_others


def _is_custom(layer) -> bool:
    return type(layer).__module__.partition(".")[0] not in _OURS


def _acts_in_training(layer, network) -> bool:
    has_mode = "training" in inspect.signature(layer.call).parameters
    if not _is_custom(layer) or not has_mode or layer.trainable_weights:
        return False
    shape = _input_shape(layer) or _input_shape(network)
    if shape is None:
        return False
    images = np.random.RandomState(0).rand(_PROBES, *(side or 8 for side in shape[1:]))
    images = images.astype("float32")
    probed = _copy(layer)
    states = [(each, each.numpy()) for each in probed.non_trainable_variables]
    try:
        trained, inferred = (np.asarray(probed(images, training=mode)) for mode in (True, False))
    except Exception:  # It takes something else than images.
        return False
    finally:
        for variable, value in states:
            variable.assign(value)
    return trained.shape != inferred.shape or not np.allclose(trained, inferred, atol=1e-6)


def _copy(layer):
    """Returns a copy, so that the layer keeps its random numbers, or the layer itself."""
    try:
        return type(layer).from_config(layer.get_config())
    except Exception:  # A layer of one's own need not have a configuration.
        return layer


def _input_shape(layer) -> tuple | None:
    """Returns the shape of the single input of a layer in a functional model, or None."""
    try:
        shape = layer.input.shape
    except (AttributeError, ValueError):
        return None
    return tuple(shape) if len(shape) > 1 else None
