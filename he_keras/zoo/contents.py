"""What a checkpoint file contains, sorted by a recipe: weights of our layers, and what is left."""

import fnmatch
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from he_keras.networks.network import Statistics
from he_keras.zoo.checkpoint_files import read_checkpoint
from he_keras.zoo.layer_names import original, translate
from he_keras.zoo.recipe import Recipe

HEAD = "head"
_SHOWN = 5
#: For each name of a tensor in the file, the name of our weight.
_WEIGHTS = {
    "weight": "kernel",
    "bias": "bias",
    "running_mean": "moving_mean",
    "running_var": "moving_variance",
}
_NORM_WEIGHTS = {**_WEIGHTS, "weight": "gamma", "bias": "beta"}
_JAX_FIELDS = {"w": "weight", "b": "bias", "scale": "weight", "offset": "bias"}
_JAX_AVERAGES = {"mean_ema": "running_mean", "var_ema": "running_var"}


class Contents(NamedTuple):
    """What a file contains.

    Attributes:
        layers: for each of our layers its weights, with kernels in the layout of Keras.
        statistics: mean and standard deviation of the pixels, or False.
        ignored: the names of tensors that no forward pass uses, by the recipe's patterns.
        beside: what else is in the file, for example an accuracy that the authors measured.
    """

    layers: dict[str, dict[str, np.ndarray]]
    statistics: Statistics | bool
    ignored: dict[str, list[str]]
    beside: dict[str, Any]


def read_contents(recipe: Recipe, path: str | pathlib.Path) -> Contents:
    """Reads a file and sorts what is in it.

    Raises:
        ValueError: The file is not of this layout: a name is unknown or missing.
    """
    content = read_checkpoint(path)
    tensors, beside = _tensors(recipe, content, path)
    state: dict[str, np.ndarray] = {}
    ignored: dict[str, list[str]] = {}
    for name, tensor in tensors.items():
        short = _without_prefixes(name, recipe.prefixes)
        pattern = next((each for each in recipe.ignored if fnmatch.fnmatch(short, each)), None)
        if pattern is not None:
            ignored.setdefault(pattern, []).append(name)
        elif short in state:
            raise wrong_names("repeated", [short], recipe, path)
        else:
            state[short] = tensor
    statistics = _statistics(recipe, state, path)
    return Contents(_layers(recipe, state, path), statistics, ignored, beside)


def name_in_file(layer: str, weight: str, recipe: Recipe) -> str:
    """Returns the name that one of our weights has in files of this layout."""
    fields = _NORM_WEIGHTS if layer.endswith("_bn") else _WEIGHTS
    field = next(theirs for theirs, ours in fields.items() if ours == weight)
    name = recipe.head[0] if layer == HEAD else original(layer, recipe.layers)
    return f"{name or layer}.{field}"


def wrong_names(kind: str, names: Iterable[str], recipe: Recipe, path) -> ValueError:
    """Returns the error about names that a file has or lacks."""
    names = list(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ValueError(
        f"The file has {kind} names; expected the layout of {recipe.name}; received "
        f"{', '.join(names[:_SHOWN])}{more} in {path}: choose another recipe"
    )


def _tensors(recipe: Recipe, content: Mapping[str, Any], path):
    """Returns the tensors of a file by their names, and what else is there."""
    if recipe.is_jax:
        return _jax_tensors(recipe, content, path), {}
    held = next((key for key in recipe.containers if isinstance(content.get(key), dict)), None)
    tensors = content if held is None else content[held]
    strange = [str(name) for name, each in tensors.items() if not isinstance(each, np.ndarray)]
    if strange:
        raise ValueError(
            f"Not the layout of {recipe.name}; expected tensors only; received {strange[0]!r} in "
            f"{path}: choose another recipe"
        )
    return tensors, {} if held is None else {key: content[key] for key in content if key != held}


def _jax_tensors(recipe: Recipe, content: Mapping[str, Any], path) -> dict[str, np.ndarray]:
    """Returns the nested mappings of Haiku under flat names like those of PyTorch."""
    if set(content) != {"params", "state"}:
        raise ValueError(
            f"Not the layout of {recipe.name}; expected JAX parameters and state; received {path}: "
            "choose another recipe"
        )
    try:
        tensors = {
            f"{_plain(module)}.{_JAX_FIELDS.get(field, field)}": value
            for module, values in content["params"].items()
            for field, value in values.items()
        }
        for module, values in content["state"].items():
            norm, _, which = module.rpartition("/~/")
            # `hidden` is the value before the correction for its start at zero: it is not used.
            tensors[f"{_plain(norm)}.{_JAX_AVERAGES[which]}"] = values["average"]
    except (AttributeError, KeyError) as error:
        raise ValueError(
            f"Not the layout of {recipe.name}; expected modules of arrays; received {path} without "
            f"{error}: choose another recipe"
        ) from error
    return tensors


def _plain(module: str) -> str:
    return module.replace("/~/", ".").partition(".")[2]


def _without_prefixes(name: str, prefixes: Iterable[str]) -> str:
    for prefix in prefixes:
        name = name.removeprefix(prefix)
    return name


def _statistics(recipe: Recipe, state: dict[str, np.ndarray], path) -> Statistics | bool:
    """Takes mean and deviation out of the tensors, if they are there."""
    for pair in recipe.stored_statistics:
        found = [name for name in pair if name in state]
        if len(found) == 1:
            raise wrong_names("missing", set(pair) - set(found), recipe, path)
        if found:
            mean, std = (state.pop(name).ravel() for name in pair)
            return mean, std
    if recipe.statistics is None:
        raise wrong_names("missing", recipe.stored_statistics[0], recipe, path)
    return recipe.statistics


def _layers(recipe: Recipe, state: Mapping[str, np.ndarray], path):
    layers: dict[str, dict[str, np.ndarray]] = {}
    unknown = []
    for name, tensor in state.items():
        layer, _, field = name.rpartition(".")
        ours = HEAD if layer in recipe.head else translate(layer, recipe.layers)
        weights = _NORM_WEIGHTS if ours is not None and ours.endswith("_bn") else _WEIGHTS
        if ours is None or field not in weights:
            unknown.append(name)
            continue
        layers.setdefault(ours, {})[weights[field]] = _as_keras(tensor, recipe.is_jax)
    if unknown:
        raise wrong_names("unknown", unknown, recipe, path)
    if "kernel" not in layers.get(HEAD, {}):
        raise wrong_names("missing", [f"{recipe.head[0]}.weight"], recipe, path)
    return layers


def _as_keras(tensor: np.ndarray, is_jax: bool) -> np.ndarray:
    """Returns a tensor in the layout of Keras, in at least float32."""
    if tensor.dtype.itemsize < 4:
        tensor = tensor.astype(np.float32)
    if is_jax:
        return tensor.reshape(-1) if tensor.ndim == 4 and tensor.shape[:3] == (1, 1, 1) else tensor
    if tensor.ndim == 4:
        return tensor.transpose(2, 3, 1, 0)
    return tensor.T
