"""Recipes, which describe a layout of checkpoint files, and entries, which describe one file.

Both are data. A recipe maps the layers of the file to those of our network. It also says what no
file stores: normalisation, activation and shortcut. An entry is a published file of a layout.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from he_keras.networks.network import Statistics


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A layout of checkpoint files.

    Attributes:
        name: the name that `load` finds it by.
        source: who publishes files of this layout.
        network: the family of our networks: "wide-resnet", "preact-resnet" or "resnet".
        layers: for each pattern of names in the file, the name of our layer. In a pattern,
            `{stage}` stands for a number that counts from 1, and `{stage-}` for one that counts
            from 0.
        head: the names that the last layer may have in the file.
        containers: the keys that may contain the tensors. The first one in the file is taken.
        prefixes: beginnings that are cut off the names, in this order.
        ignored: patterns, with `*`, of names that no forward pass uses.
        cosine: whether the last layer normalises features and weights. If the file has a bias for
            this layer, it does not.
        statistics: the mean that the network subtracts and the standard deviation that it divides
            by; a pair of names if they are tensors in the file; False for no standardisation.
        options: further arguments of the network.
        input_shape: height, width and channels of the images.
        is_jax: whether the file contains JAX parameters and state.
    """

    name: str
    source: str
    network: str
    layers: Mapping[str, str]
    head: tuple[str, ...]
    containers: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ("module.",)
    ignored: tuple[str, ...] = ("*.num_batches_tracked",)
    cosine: bool = False
    statistics: Statistics | tuple[str, str] | bool = False
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    input_shape: tuple[int, int, int] = (32, 32, 3)
    is_jax: bool = False


@dataclasses.dataclass(frozen=True)
class Entry:
    """A published file.

    Attributes:
        name: the recipe's name, a slash, and the file's own name.
        file: where it is published: an address, or a Google Drive id after "drive:".
        network: the name of the network in the file, for example "wide_resnet_34_10".
        licence: the licence of the weights.
        data: the data set.
        norm: the norm of the threat model in training.
        epsilon: the radius of the threat model in training, as published.
        clean: the published accuracy in percent on clean test images.
        robust: the published accuracy in percent under AutoAttack, or None.
        changes: fields of the recipe that are different for this file. Options are added.
        sha256: the digest of the file, if it is known.
        scale: the scale of a cosine head in training, which no file stores.
        margin: the margin of a cosine head in training, which no file stores.
    """

    name: str
    file: str
    network: str
    licence: str
    data: str = "cifar10"
    norm: str = "linf"
    epsilon: str = "8/255"
    clean: float | None = None
    robust: float | None = None
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sha256: str | None = None
    scale: float | None = None
    margin: float | None = None


def changed(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """Returns a recipe with some fields replaced. Options are added to those of the recipe."""
    options = {**recipe.options, **changes.get("options", {})}
    return dataclasses.replace(recipe, **{**changes, "options": options})
