"""Finds the public layout that a model fits, and its tensors in that layout."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from he_keras.adversarial_model import HEAdversarialModel
from he_keras.layers.cosine_head import CosineHead
from he_keras.layers.input_standardization import InputStandardization
from he_keras.networks.network import Statistics
from he_keras.zoo.architecture import network_of
from he_keras.zoo.catalog import RECIPES
from he_keras.zoo.contents import HEAD, name_in_file
from he_keras.zoo.layer_names import original
from he_keras.zoo.recipe import Recipe, changed

#: The layouts of RobustBench's classes, with the options of each that no file stores.
_Candidates = tuple[tuple[str, dict[str, str]], ...]
_COSINE: _Candidates = (("robustbench/boosting", {}),)
_LINEAR: _Candidates = (
    ("robustbench/wrn", {}),
    ("robustbench/preact", {"shortcut": "activated"}),
    ("robustbench/preact", {"shortcut": "input"}),
    ("robustbench/resnet", {}),
    ("deepmind/wrn", {"activation": "swish"}),
    ("deepmind/wrn", {"activation": "relu"}),
    ("deepmind/preact", {"activation": "swish"}),
)
_BUFFERS = ("mu", "sigma")
_IMAGES = (32, 32, 3)
_TOLERANCE = 1e-5

Tensors = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Layout:
    """A model in a public layout.

    Attributes:
        recipe: the layout, with the model's options and normalisation. `load` takes both.
        network: the name of the network, for example "wide_resnet_34_10".
        tensors: the tensors by the names of the layout.
    """

    recipe: Recipe
    network: str
    tensors: Tensors


def layout_of(model: keras.Model) -> Layout:
    """Returns the layout of RobustBench's classes in which a model gives the same logits.

    Args:
        model: an `HEAdversarialModel`, or a functional model whose last layer is the head. The
            network is one of `he_keras.networks` for images of 32 x 32 pixels.

    Raises:
        ValueError: No class of RobustBench computes what this model computes.

    Example:
        >>> import he_keras as he
        >>> from he_keras.zoo.layouts import layout_of
        >>> network = he.networks.get("wide-resnet-10-1")
        >>> layout = layout_of(he.HEAdversarialModel(network, he.CosineHead(10)))
        >>> layout.recipe.name, layout.tensors["fc.weight"].shape
        ('robustbench/boosting', (10, 64))
    """
    network, head = _parts(model)
    _check_head(head)
    if tuple(network.input_shape[1:]) != _IMAGES:
        raise _unknown(f"images of shape {tuple(network.input_shape[1:])}")
    layers = {
        layer.name: {weight.name: np.asarray(weight) for weight in layer.weights}
        for layer in network.layers
        if layer.weights
    }
    for name, options in _COSINE if isinstance(head, CosineHead) else _LINEAR:
        recipe = changed(RECIPES[name], {"options": options, "statistics": _statistics(network)})
        twin = _twin(recipe, layers)
        if twin is not None and _computes_the_same(network, twin):
            head_weights = {weight.name: np.asarray(weight) for weight in head.weights}
            tensors = _tensors(recipe, {**layers, HEAD: head_weights})
            return Layout(recipe, twin.name, tensors)
    raise _unknown(f"the network {network.name}")


def _unknown(received: str) -> ValueError:
    return ValueError(
        "No class of RobustBench computes this model; expected a WideResNet, PreActResNet or "
        f"ResNet of he_keras.networks for images of 32 x 32 x 3, in float32; received {received}"
    )


def _parts(model: keras.Model) -> tuple[keras.Model, keras.layers.Layer]:
    if isinstance(model, HEAdversarialModel):
        return model.network, model.head
    try:
        head = model.layers[-1]
        return keras.Model(model.input, head.input, name=model.name), head
    except (AttributeError, IndexError, TypeError, ValueError):
        # Not a functional model, or not of one input.
        raise _unknown(type(model).__name__) from None


def _check_head(head: keras.layers.Layer) -> None:
    is_linear = isinstance(head, keras.layers.Dense) and head.use_bias
    if is_linear and head.activation is keras.activations.linear:
        return
    is_cosine = isinstance(head, CosineHead) and head.angle == "cosine"
    if not is_cosine or not (head.feature_norm and head.weight_norm):
        raise _unknown(f"a head {type(head).__name__} with settings that no class has")
    if head.num_classes != 10:
        raise _unknown(f"{head.num_classes} classes: BoostingWideResNet has 10")


def _statistics(network: keras.Model) -> Statistics | bool:
    for layer in network.layers:
        if isinstance(layer, InputStandardization):
            channels = network.input_shape[-1]
            mean, std = (np.broadcast_to(part, channels) for part in (layer.mean, layer.std))
            return tuple(mean.tolist()), tuple(std.tolist())
    return False


def _twin(recipe: Recipe, layers: Mapping[str, Mapping[str, np.ndarray]]) -> keras.Model | None:
    """Returns a network of the recipe with these weights, or None if they do not fit."""
    if any(original(name, recipe.layers) is None for name in layers):
        return None
    try:
        twin = network_of(
            recipe.network,
            layers,
            recipe.input_shape,
            standardize=recipe.statistics,
            **recipe.options,
        )
    except (ValueError, TypeError):
        return None
    wanted = {layer.name: layer for layer in twin.layers if layer.weights}
    shapes = [
        {name: {key: value.shape for key, value in each.items()} for name, each in layers.items()},
        {
            name: {each.name: tuple(each.shape) for each in layer.weights}
            for name, layer in wanted.items()
        },
    ]
    if shapes[0] != shapes[1]:
        return None
    for name, layer in wanted.items():
        for weight in layer.weights:
            weight.assign(layers[name][weight.name])
    return twin


def _computes_the_same(network: keras.Model, twin: keras.Model) -> bool:
    images = np.random.default_rng(0).uniform(size=(4, *_IMAGES)).astype("float32")
    ours, theirs = (np.asarray(each(images, training=False)) for each in (network, twin))
    size = max(1.0, float(np.abs(ours).max()))
    return bool(np.all(np.abs(ours - theirs) <= _TOLERANCE * size))


def _tensors(recipe: Recipe, layers: Mapping[str, Mapping[str, Any]]) -> Tensors:
    tensors: Tensors = {}
    has_buffers = _BUFFERS in recipe.stored_statistics
    if has_buffers and (recipe.statistics or recipe.name == "robustbench/boosting"):
        statistics: Any = recipe.statistics or ((0.0,) * 3, (1.0,) * 3)
        mean, std = statistics
        for name, values in zip(_BUFFERS, (mean, std), strict=True):
            tensors[name] = np.array(values, "float32").reshape(1, 3, 1, 1)
    for layer, weights in layers.items():
        for weight, value in weights.items():
            tensor = value.transpose(3, 2, 0, 1) if value.ndim == 4 else value.T
            tensors[name_in_file(layer, weight, recipe)] = np.ascontiguousarray(tensor)
    if recipe.name == "robustbench/boosting":
        # The class creates this block and never calls it. It refuses a file without it.
        first = {name: each for name, each in tensors.items() if name.startswith("block1.")}
        tensors.update({f"sub_{name}": np.zeros_like(each) for name, each in first.items()})
    return tensors
