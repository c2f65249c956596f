"""Loads a public checkpoint as a Keras model with the same logits."""

import pathlib
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from he_keras.adversarial_model import HEAdversarialModel
from he_keras.data import FACTS
from he_keras.layers.cosine_head import CosineHead
from he_keras.zoo.architecture import NoConvolutionError, network_of
from he_keras.zoo.catalog import find
from he_keras.zoo.contents import HEAD, Contents, name_in_file, read_contents, wrong_names
from he_keras.zoo.recipe import Entry, Recipe, changed

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

    Raises:
        ValueError: The file is unreadable, of another layout, or not the entry's network.

    Example:
        >>> import he_keras as he
        >>> # model = he.zoo.load("trades", "model_cifar_wrn.pt")
    """
    recipe, entry = chosen(name, changes)
    return model_of(recipe, entry, read_contents(recipe, path), path, scale, margin)


def inspect(name: str, path: str | pathlib.Path, **changes: Any) -> Contents:
    """Returns what a file contains: weights, mean and deviation, and the names that are ignored.

    Args:
        name: a recipe, or one of its entries.
        path: the file.
        **changes: fields of the recipe that are different for this file.

    Example:
        >>> import he_keras as he
        >>> # he.zoo.inspect("trades", "model_cifar_wrn.pt").ignored
    """
    return read_contents(chosen(name, changes)[0], path)


def chosen(name: str, changes: Mapping[str, Any]) -> tuple[Recipe, Entry | None]:
    """Returns the recipe of a name with the changes of its entry and the caller's, and the entry.

    Args:
        name: a recipe, or one of its entries.
        changes: fields of the recipe that are different.
    """
    recipe, entry = find(name)
    return changed(changed(recipe, entry.changes if entry else {}), changes), entry


def model_of(
    recipe: Recipe,
    entry: Entry | None,
    contents: Contents,
    path: str | pathlib.Path,
    scale: float | None = None,
    margin: float | None = None,
) -> keras.Model:
    """Returns the model of what was read from a file; see `load`."""
    layers = dict(contents.layers)
    head = layers.pop(HEAD)
    is_cosine = recipe.cosine == "always" or (
        recipe.cosine == "without bias" and "bias" not in head
    )
    try:
        network = network_of(
            recipe.network,
            layers,
            recipe.input_shape,
            standardize=_in_float32(contents.statistics),
            **recipe.options,
        )
    except NoConvolutionError as error:
        name = name_in_file(error.layer, "kernel", recipe)
        raise wrong_names("missing", [name], recipe, path) from error
    num_classes = _classes_of(head, network, recipe, path)
    if entry is not None:
        _check_is_published(entry, network.name, num_classes, is_cosine, path)
    last: keras.layers.Layer
    if is_cosine:
        scales = scale, entry and entry.scale, _SCALE
        margins = margin, entry and entry.margin, _MARGIN
        last = CosineHead(num_classes, scale=_first(scales), margin=_first(margins), name=HEAD)
        model = HEAdversarialModel(network, last, name=network.name)
    else:
        last = keras.layers.Dense(num_classes, name=HEAD)
        model = keras.Model(network.input, last(network.output), name=network.name)
    ours = {layer.name: layer for layer in (*network.layers, last) if layer.weights}
    _set_weights(ours, {**layers, HEAD: head}, recipe, path)
    return model


def _classes_of(head: Mapping[str, np.ndarray], network: keras.Model, recipe: Recipe, path) -> int:
    """Returns the number of classes of a head whose kernel takes the network's features."""
    shape, features = head["kernel"].shape, network.output_shape[-1]
    if len(shape) != 2 or shape[0] != features or not shape[1]:
        raise ValueError(
            f"A weight has another shape; expected (classes, {features}) for "
            f"{name_in_file(HEAD, 'kernel', recipe)}; received {shape[::-1]} in {path}"
        )
    return shape[1]


def _first(values) -> float:
    return next(value for value in values if value is not None)


def _in_float32(statistics):
    """Rounds mean and standard deviation to float32, as PyTorch does."""
    if statistics is False:
        return False
    with np.errstate(over="ignore"):
        return tuple(tuple(float(np.float32(each)) for each in part) for part in statistics)


def _check_is_published(entry: Entry, network: str, num_classes: int, is_cosine: bool, path):
    facts = FACTS.get(entry.data)
    expected = (
        entry.network,
        facts.num_classes if facts else num_classes,
        "an HE head" if entry.scale is not None else "a linear head",
    )
    found = network, num_classes, "an HE head" if is_cosine else "a linear head"
    if found != expected:
        texts = [
            f"{name} with {count} classes and {head}" for name, count, head in (expected, found)
        ]
        raise ValueError(
            f"Not the network of {entry.name}; expected {texts[0]}; received {texts[1]} in {path}"
        )


def _set_weights(ours: Mapping[str, keras.layers.Layer], theirs: Mapping, recipe, path) -> None:
    """Sets the weights of every layer. None may be missing in the file or left over."""
    wanted = {(layer, weight.name): weight for layer in ours for weight in ours[layer].weights}
    values = {(layer, name): theirs[layer][name] for layer in theirs for name in theirs[layer]}
    for kind, pairs in (
        ("missing", [pair for pair in wanted if pair not in values]),
        ("unknown", [pair for pair in values if pair not in wanted]),
    ):
        if pairs:
            names = [name_in_file(layer, weight, recipe) for layer, weight in pairs]
            raise wrong_names(kind, names, recipe, path)
    for pair, value in values.items():
        name = name_in_file(pair[0], pair[1], recipe)
        shape = tuple(wanted[pair].shape)
        if shape != value.shape:
            raise ValueError(
                f"A weight has another shape; expected {shape} in the layout of Keras for "
                f"{name}; received {value.shape} in {path}"
            )
        with np.errstate(over="ignore"):
            value = value.astype(wanted[pair].dtype, copy=False)
        if not np.all(np.isfinite(value)):
            raise ValueError(
                f"A weight is not finite; expected numbers in {name}; received NaN or "
                f"infinity in {path}"
            )
        wanted[pair].assign(value)
