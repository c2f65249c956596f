"""Loads a public checkpoint as a Keras model with the same logits."""

import fnmatch
import pathlib
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from he_keras.adversarial_model import HEAdversarialModel
from he_keras.layers.cosine_head import CosineHead
from he_keras.zoo.architecture import network_of
from he_keras.zoo.catalog import find
from he_keras.zoo.checkpoint_files import read_checkpoint
from he_keras.zoo.layer_names import translate
from he_keras.zoo.recipe import Recipe, changed

_HEAD = "head"
#: For each name of a tensor in the file, the name of our weight.
_WEIGHTS = {
    "weight": "kernel",
    "bias": "bias",
    "running_mean": "moving_mean",
    "running_var": "moving_variance",
}
_NORM_WEIGHTS = {**_WEIGHTS, "weight": "gamma", "bias": "beta"}
_SHOWN = 5


#: Scale and margin of a cosine head whose entry has none: the HE paper's choice for PGD-AT.
_SCALE = 10.0
_MARGIN = 0.2


def load(
    name: str,
    path: str | pathlib.Path,
    scale: float | None = None,
    margin: float | None = None,
    **changes: Any,
) -> keras.Model:
    """Returns a Keras model with the weights of a public checkpoint, and the same logits.

    A file with an HE head becomes an `HEAdversarialModel` with a `CosineHead`. Its `cosines` are
    what the published code returns. Every other file becomes a functional model from images in
    [0, 1] to logits. No code in the file is run.

    Args:
        name: a recipe such as "at_he", or one of its entries such as "at_he/wrn-34-20".
        path: the file.
        scale: the scale of a cosine head, which no file stores. Default: the entry's, otherwise 10.
        margin: the margin of a cosine head. Default: the entry's, otherwise 0.2.
        **changes: fields of the recipe that are different for this file: statistics, input_shape,
            and options of the network, for example `options={"activation": "relu"}`.

    Example:
        >>> import he_keras as he
        >>> # model = he.zoo.load("trades", "model_cifar_wrn.pt")
    """
    recipe, entry = find(name)
    recipe = changed(changed(recipe, entry.changes if entry else {}), changes)
    layers, statistics = _layers(recipe, _state(recipe, read_checkpoint(path), path), path)
    head = layers.pop(_HEAD)
    network = network_of(
        recipe.network,
        layers,
        recipe.input_shape,
        standardize=_in_float32(statistics),
        **recipe.options,
    )
    _set_all_weights(network, layers, path)
    if recipe.cosine and "bias" not in head:
        chosen = _first(scale, entry and entry.scale, _SCALE)
        subtracted = _first(margin, entry and entry.margin, _MARGIN)
        last = CosineHead(len(head["kernel"].T), scale=chosen, margin=subtracted, name=_HEAD)
        model = HEAdversarialModel(network, last, name=network.name)
    else:
        last = keras.layers.Dense(len(head["kernel"].T), name=_HEAD)
        model = keras.Model(network.input, last(network.output), name=network.name)
    _set_weights(last, head, path)
    return model


def _first(*values):
    return next(value for value in values if value is not None)


def _in_float32(statistics):
    """Rounds mean and standard deviation to float32, as PyTorch does."""
    if statistics is False:
        return False
    return tuple(tuple(float(np.float32(each)) for each in part) for part in statistics)


def _state(recipe: Recipe, content: Mapping, path) -> dict[str, np.ndarray]:
    """Returns the tensors of a file by name, without prefixes and without ignored tensors."""
    if recipe.is_jax:
        return _jax_state(recipe, content, path)
    for container in recipe.containers:
        if isinstance(content.get(container), dict):
            content = content[container]
            break
    state = {}
    for name, value in content.items():
        for prefix in recipe.prefixes:
            name = name.removeprefix(prefix)
        if not any(fnmatch.fnmatch(name, pattern) for pattern in recipe.ignored):
            state[name] = value
    strange = [name for name, value in state.items() if not isinstance(value, np.ndarray)]
    if strange:
        raise ValueError(
            f"Not the layout of {recipe.name}; expected tensors only; received {strange[0]!r} in "
            f"{path}: choose another recipe"
        )
    return state


def _layers(recipe: Recipe, state: dict[str, np.ndarray], path):
    """Returns the weights of each of our layers, and the mean and standard deviation."""
    state = dict(state)
    statistics: Any = recipe.statistics
    if statistics and isinstance(statistics[0], str):
        missing = [name for name in statistics if name not in state]
        if missing:
            raise _wrong_names("missing", missing, recipe, path)
        statistics = tuple(state.pop(name).ravel() for name in statistics)
    layers: dict[str, dict[str, np.ndarray]] = {}
    unknown = []
    for name, tensor in state.items():
        layer, _, field = name.rpartition(".")
        ours = _HEAD if layer in recipe.head else translate(layer, recipe.layers)
        weights = _NORM_WEIGHTS if ours is not None and ours.endswith("_bn") else _WEIGHTS
        if ours is None or field not in weights:
            unknown.append(name)
            continue
        layers.setdefault(ours, {})[weights[field]] = _as_keras(tensor, recipe.is_jax)
    if unknown:
        raise _wrong_names("unknown", unknown, recipe, path)
    if "kernel" not in layers.get(_HEAD, {}):
        raise _wrong_names("missing", [f"{recipe.head[0]}.weight"], recipe, path)
    return layers, statistics


def _as_keras(tensor: np.ndarray, is_jax: bool) -> np.ndarray:
    """Returns a tensor in the layout of Keras, in at least float32."""
    if tensor.dtype.itemsize < 4:
        tensor = tensor.astype(np.float32)
    if is_jax:
        return tensor.reshape(-1) if tensor.ndim == 4 and tensor.shape[:3] == (1, 1, 1) else tensor
    if tensor.ndim == 4:
        return tensor.transpose(2, 3, 1, 0)
    return tensor.T


def _jax_state(recipe: Recipe, content: Mapping[str, Any], path) -> dict[str, np.ndarray]:
    """Returns the nested mappings of Haiku under flat names like those of PyTorch."""
    if set(content) != {"params", "state"}:
        raise ValueError(
            f"Not the layout of {recipe.name}; expected JAX parameters and state; received {path}: "
            "choose another recipe"
        )
    fields = {"w": "weight", "b": "bias", "scale": "weight", "offset": "bias"}
    averages = {"mean_ema": "running_mean", "var_ema": "running_var"}
    state = {}
    for module, values in content["params"].items():
        for field, value in values.items():
            state[f"{_plain(module)}.{fields.get(field, field)}"] = value
    for module, values in content["state"].items():
        norm, _, which = module.rpartition("/~/")
        # `hidden` is the value before the correction for its start at zero, so it is not used.
        state[f"{_plain(norm)}.{averages[which]}"] = values["average"]
    return state


def _plain(module: str) -> str:
    return module.replace("/~/", ".").partition(".")[2]


def _wrong_names(kind: str, names: list[str], recipe: Recipe, path) -> ValueError:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ValueError(
        f"The file has {kind} names; expected the layout of {recipe.name}; received "
        f"{', '.join(names[:_SHOWN])}{more} in {path}: choose another recipe"
    )


def _set_all_weights(network: keras.Model, layers: dict, path) -> None:
    """Sets the weights of every layer. No layer may be missing in the file or left over."""
    with_weights = {layer.name: layer for layer in network.layers if layer.weights}
    for kind, names in (
        ("without", sorted(set(with_weights) - set(layers))),
        ("beyond", sorted(set(layers) - set(with_weights))),
    ):
        if names:
            raise ValueError(
                f"The file is {kind} layers of the network; expected {len(with_weights)} layers; "
                f"received a file {kind} {', '.join(names[:_SHOWN])}: {path}"
            )
    for name, layer in with_weights.items():
        _set_weights(layer, layers[name], path)


def _set_weights(layer: keras.layers.Layer, weights: Mapping[str, np.ndarray], path) -> None:
    ours = {weight.name: weight for weight in layer.weights}
    if set(ours) != set(weights):
        raise ValueError(
            f"The file's layer {layer.name} has other weights; expected {sorted(ours)}; received "
            f"{sorted(weights)} in {path}"
        )
    for name, value in weights.items():
        if tuple(ours[name].shape) != value.shape:
            raise ValueError(
                f"A weight has another shape; expected {tuple(ours[name].shape)} for {name} of "
                f"{layer.name}; received {value.shape} in {path}"
            )
        if not np.all(np.isfinite(value)):
            raise ValueError(
                f"A weight is not finite; expected numbers in {name} of {layer.name}; received "
                f"NaN or infinity in {path}"
            )
        ours[name].assign(value)
