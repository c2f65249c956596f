"""Recipes, which describe a layout of checkpoint files, and entries, which describe one file.

Both are data. A recipe maps the layers of the file to those of our network. It also says what no
file stores: normalisation, activation and shortcut. An entry is a published file of a layout.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from he_keras.networks.network import Statistics

_DRIVE = "drive:"


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
        cosine: whether the last layer normalises features and weights: "never", "always", or
            "without bias" if only the bias in the file tells.
        statistics: the mean that the network subtracts and the standard deviation that it divides
            by. False for no standardisation; None if the file must contain them.
        stored_statistics: pairs of names that mean and standard deviation may have in the file. If
            the file contains a pair, it replaces `statistics`.
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
    cosine: str = "never"
    statistics: Statistics | bool | None = False
    stored_statistics: tuple[tuple[str, str], ...] = ()
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
        norm: the norm of the threat model in training, or of the published robust accuracy.
        epsilon: the radius of that threat model, as published; None if there is none.
        clean: the published accuracy in percent on clean test images.
        robust: the published accuracy in percent under AutoAttack, or None.
        remark: what else was published.
        changes: fields of the recipe that are different for this file. Options are added.
        sha256: the digest of the file, if it is known.
        scale: the scale of a cosine head in training, which no file stores; None for a linear head.
        margin: the margin of a cosine head in training, which no file stores.
    """

    name: str
    file: str
    network: str
    licence: str
    data: str = "cifar10"
    norm: str = "linf"
    epsilon: str | None = "8/255"
    clean: float | None = None
    robust: float | None = None
    remark: str = ""
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sha256: str | None = None
    scale: float | None = None
    margin: float | None = None

    def description(self) -> list[str]:
        """Returns lines for people: what it is, what was published about it, and where it is."""
        threat = "no adversary" if self.epsilon is None else f"{self.norm} {self.epsilon}"
        figures = [
            *([f"clean {self.clean:.2f} %"] if self.clean is not None else []),
            *([f"AutoAttack {self.robust:.2f} %"] if self.robust is not None else []),
            *([self.remark] if self.remark else []),
        ]
        return [
            f"{self.name}: {self.network}, {self.data}, {threat}, "
            f"{', '.join(figures) or 'no published figures'}, licence {self.licence}",
            f"  {self.page}",
        ]

    @property
    def page(self) -> str:
        """The address at which a person finds the file."""
        if self.file.startswith(_DRIVE):
            return f"https://drive.google.com/file/d/{self.file.removeprefix(_DRIVE)}/view"
        return self.file

    @property
    def address(self) -> str | None:
        """The address that answers with the file itself; None for a folder."""
        if self.file.startswith(_DRIVE):
            query = f"export=download&confirm=t&id={self.file.removeprefix(_DRIVE)}"
            return f"https://drive.usercontent.google.com/download?{query}"
        return self.file if self.file_name else None

    @property
    def file_name(self) -> str:
        """The file's own name, with the ending that it is published with; empty for a folder."""
        if self.file.startswith(_DRIVE):
            return f"{self.name.rpartition('/')[2]}.pt"
        last = self.file.partition("?")[0].rpartition("/")[2]
        return last if last.endswith((".pt", ".pth", ".npy", ".safetensors")) else ""


def changed(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """Returns a recipe with some fields replaced. Options are added to those of the recipe."""
    fields = {field.name for field in dataclasses.fields(Recipe)}
    unknown = sorted(set(changes) - fields)
    if unknown:
        raise TypeError(
            f"A recipe has no such field; expected some of {sorted(fields)}; received "
            f"{unknown[0]}={changes[unknown[0]]!r}"
        )
    options = {**recipe.options, **changes.get("options", {})}
    return dataclasses.replace(recipe, **{**changes, "options": options})
