"""Takes a classifier apart, and copies parts of it onto other images.

A Keras model of known structure is a graph. Functional and sequential models have one. Many
subclassed models give one when their `call` runs on a symbolic tensor. The graph says where the
last Dense layer is, which activation follows it, and what is done to the pixels at its beginning.
"""

import inspect
from typing import Any, NamedTuple

import keras
import numpy as np

from he_keras.layers.cosine_head import CosineHead
from he_keras.networks.checks import PROBABILITIES, last_activation

#: Where a size of the images is open.
_ANY_SIDE = 32
#: A first layer that squeezes 0..1 below this width was made for 0..255.
_SQUEEZED = 0.1
#: One that stretches 0..1 to more than this width was made for 0..1.
_STRETCHED = 1.5
#: What 0..255 becomes has a width between these: 1 for 1/255, 2 for 1/127.5, 4 for deviations.
_USUAL_WIDTHS = (0.3, 30.0)


class Parts(NamedTuple):
    """A classifier in two parts.

    Attributes:
        body: the classifier's own layers, from images to what `head` or the activation takes.
        head: the last layer, if that is a Dense layer, whose activation is the classifier's.
        activation: the last activation by name: "linear" for logits, "" where it is unknown.
    """

    body: keras.Model
    head: keras.layers.Dense | None
    activation: str


class _Ending(NamedTuple):
    tensor: keras.KerasTensor
    head: keras.layers.Dense | None
    activation: str


def graph_of(model) -> keras.Model | None:
    """Returns a model's own layers as a functional model, or None where it does not show them.

    Example:
        >>> import keras
        >>> from he_keras.networks.surgery import graph_of
        >>> graph_of(keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])).output_shape
        (None, 3)
    """
    if getattr(model, "outputs", None):
        return keras.Model(model.inputs[0], model.outputs[0])
    return _traced(model)


def _traced(model, **options) -> keras.Model | None:
    """Runs a subclassed model's `call` on a symbolic tensor; some only run on numbers."""
    shape: Any = (model.get_build_config() or {}).get("input_shape")
    try:
        images = keras.Input(shape[1:], dtype="float32")
        return keras.Model(images, model.call(images, **options))
    except Exception:  # noqa: BLE001
        return None


def take_apart(model) -> Parts | None:
    """Returns the parts of a classifier with one input and one output; None where it is opaque.

    Example:
        >>> import keras
        >>> from he_keras.networks.surgery import take_apart
        >>> layers = [keras.Input((2,)), keras.layers.Dense(3), keras.layers.Softmax()]
        >>> parts = take_apart(keras.Sequential(layers))
        >>> parts.body.output_shape, parts.head.units, parts.activation
        ((None, 2), 3, 'softmax')
    """
    graph = graph_of(model)
    if graph is None or len(graph.outputs) != 1:
        return None
    ending = _ending(graph.outputs[0])
    return Parts(keras.Model(graph.inputs[0], ending.tensor), ending.head, ending.activation)


def _ending(tensor) -> _Ending:
    """What a tensor of a graph is made of, from its end on."""
    operation, index, _ = tensor._keras_history
    node = operation._inbound_nodes[index]
    if isinstance(operation, keras.Model):
        return _ending_inside(tensor, operation, node)
    if isinstance(operation, CosineHead):
        return _Ending(tensor, None, "linear")
    activation = last_activation(operation) or _operation_name(operation)
    if type(operation) is keras.layers.Dense and len(tensor.shape) == 2:
        return _Ending(node.input_tensors[0], operation, activation)
    is_plain = not getattr(operation, "weights", ()) and len(node.input_tensors) == 1
    if is_plain and activation in ("linear", *PROBABILITIES):
        before = _ending(node.input_tensors[0])
        if before.activation == "linear":
            return before._replace(activation=activation)
        return _Ending(node.input_tensors[0], None, activation)
    return _Ending(tensor, None, activation)


def _ending_inside(tensor, model, node) -> _Ending:
    """The ending of a model inside the model, whose rest stays a model inside."""
    unknown = _Ending(tensor, None, "")
    if len(getattr(model, "outputs", None) or ()) != 1 or len(model.inputs) != 1:
        return unknown
    inner = _ending(model.outputs[0])
    if not inner.activation or inner.tensor is model.outputs[0]:
        return unknown._replace(activation=inner.activation)
    rest = keras.Model(model.inputs[0], inner.tensor, name=model.name)
    training = node.arguments.kwargs.get("training")
    options = {} if training is None else {"training": training}
    return inner._replace(tensor=rest(node.input_tensors[0], **options))


def _operation_name(operation) -> str:
    """The name of an operation without a layer, such as `keras.ops.log_softmax`."""
    names = {"LogSoftmax": "log_softmax", "Identity": "linear"}
    return names.get(type(operation).__name__, "")


def copied(body: keras.Model, images, entering, left_out=()):
    """Copies a body's layers with their weights, and applies them.

    Layers without weights that cannot be copied, such as a Lambda, are shared.

    Args:
        body: a functional model.
        images: the symbolic input of the new graph.
        entering: what the copies take in place of the body's own input; made of `images`.
        left_out: operations of the body that return what they take.

    Returns:
        The symbolic output.
    """
    pairs = []

    def clone(operation):
        if any(operation is each for each in left_out):
            return operation
        try:
            copy = type(operation).from_config(operation.get_config())
        except Exception:
            if getattr(operation, "weights", ()):
                raise
            return operation
        pairs.append((operation, copy))
        return copy

    def call(operation, *args, **kwargs):
        args, kwargs = keras.tree.map_structure(
            lambda value: entering if value is images else value, (args, kwargs)
        )
        if any(operation is each for each in left_out):
            return args[0]
        return operation(*args, **kwargs)

    if body.outputs[0] is body.inputs[0]:
        return entering
    graph = keras.models.clone_model(
        body, input_tensors=images, clone_function=clone, call_function=call
    )
    for operation, copy in pairs:
        if isinstance(operation, keras.layers.Layer):
            copy_state(operation, copy)
    return graph.outputs[0]


def copy_state(source, target) -> None:
    """Gives a layer the weights and the state of another one of the same structure."""
    layers = zip(source._flatten_layers(), target._flatten_layers(), strict=True)
    for one, other in layers:
        store: dict = {}
        one.save_own_variables(store)
        if store:
            other.load_own_variables(store)


def linear_copy(head: keras.layers.Dense) -> keras.layers.Dense:
    """Returns a copy of a Dense layer without its activation.

    A layer of one unit, whose logit z speaks for class 1, becomes one of two units with the logits
    (0, z). Softmax of these is sigmoid of z.
    """
    weights = head.get_weights()
    units = head.units
    if units == 1:
        weights = [np.concatenate([np.zeros_like(each), each], axis=-1) for each in weights]
        units = 2
    config = {**head.get_config(), "activation": "linear", "units": units}
    copy = keras.layers.Dense.from_config(config)
    copy.build((None, head.kernel.shape[0]))
    copy.set_weights(weights)
    return copy


def pixels_of_layers(body: keras.Model) -> str | None:
    """Returns "0..1" or "0..255" where the first layers show the pixels that they were made for.

    The layers before the first one with weights, such as Rescaling or an adapted Normalization, are
    shown a black and a white image. What they make of the difference tells the range.

    Example:
        >>> import keras
        >>> from he_keras.networks.surgery import pixels_of_layers
        >>> layers = [keras.Input((2, 2, 1)), keras.layers.Rescaling(1 / 255)]
        >>> pixels_of_layers(keras.Model(layers[0], layers[1](layers[0])))
        '0..255'
    """
    gain = _gain_before_weights(body)
    low, high = _USUAL_WIDTHS
    if gain is None or gain == 0:
        return None
    if gain < _SQUEEZED and low < 255 * gain < high:
        return "0..255"
    return "0..1" if _STRETCHED < gain < high else None


def _gain_before_weights(body: keras.Model) -> float | None:
    """How far white moves away from black, in units of their distance; None without such layers."""
    tensor, found = body.inputs[0], None
    while True:
        following = only_consumer(body, tensor)
        if following is None:
            return found
        operation, tensor = following
        if _has_learned(operation):
            inside = _gain_inside(operation)
            return inside if found is None else found * (inside or 1.0)
        try:
            found = _gain(keras.Model(body.inputs[0], tensor))
        except Exception:  # noqa: BLE001
            # Layers may be any code, of which some do not run on such images.
            return found


def _gain_inside(operation) -> float | None:
    """The gain of the first layers of a model inside the model."""
    graph = graph_of(operation) if isinstance(operation, keras.Model) else None
    return None if graph is None else _gain_before_weights(graph)


def _has_learned(operation) -> bool:
    """Whether a layer has weights, frozen ones too, other than the statistics of the pixels."""
    if not isinstance(operation, keras.layers.Layer):
        return False
    return any(
        layer.weights and not isinstance(layer, keras.layers.Normalization)
        for layer in operation._flatten_layers()
        if not any(True for _ in layer._flatten_layers(include_self=False))
    )


def only_consumer(body: keras.Model, tensor):
    """The operation that takes a tensor, and what it makes of it, if there is just one."""
    found = []
    for operation in body.operations:
        for node in operation._inbound_nodes:
            if any(each is tensor for each in node.input_tensors):
                found.append((operation, node.output_tensors))
    # A layer may have been called in other models too.
    inside = {id(each) for each in body.operations}
    found = [each for each in found if id(each[0]) in inside and len(each[1]) == 1]
    return (found[0][0], found[0][1][0]) if len(found) == 1 else None


def _gain(first_layers: keras.Model) -> float:
    shape = [side or _ANY_SIDE for side in first_layers.input_shape[1:]]
    black = np.zeros((1, *shape), "float32")
    outputs = [
        np.asarray(keras.ops.cast(first_layers(black + white, training=False), "float32"))
        for white in (0.0, 255.0)
    ]
    return float(np.abs(outputs[1] - outputs[0]).mean() / 255.0)


def is_traced_alike(model) -> bool:
    """Whether a subclassed model has the same layers in training as the graph that was read."""
    if getattr(model, "outputs", None):
        return True
    kinds = []
    for options in ({}, {"training": True}):
        graph = _traced(model, **options)
        kinds.append(graph and [type(each.operation) for each in _calls(graph)])
    has_mode = "training" in inspect.signature(model.call).parameters
    return not has_mode or kinds[0] == kinds[1]


def _calls(graph: keras.Model) -> list:
    """The calls of all operations: a layer may be called twice."""
    return [node for _, nodes in sorted(graph._nodes_by_depth.items()) for node in nodes]
