"""Finds the network that a file's tensors belong to, with depth and widths from their shapes."""

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence

import keras
import numpy as np

from he_keras import networks
from he_keras.arguments import check_choice
from he_keras.networks.resnet import EXPANSION

_BLOCK = re.compile(r"stage(\d+)_block(\d+)_")
#: Networks for ImageNet have a first convolution of this width.
_LARGE_STEM = 7
_WIDE_STEM = 16
_FAMILIES = {
    "wide-resnet": networks.WideResNet,
    "preact-resnet": networks.PreActResNet,
    "resnet": networks.ResNet,
}
_STAGES = [64, 128, 256, 512]
#: The usual names of networks with these stages: blocks per stage, and the width of bottlenecks.
_PREACT_NAMES: dict[tuple[int, ...], str] = {(2, 2, 2, 2): "preact_resnet_18"}
_RESNET_NAMES: dict[tuple[tuple[int, ...], int | None], str] = {
    ((2, 2, 2, 2), None): "resnet_18",
    ((3, 4, 6, 3), 1): "resnet_50",
    ((3, 8, 36, 3), 1): "resnet_152",
    ((3, 4, 6, 3), 2): "wide_resnet_50_2",
    ((3, 4, 23, 3), 2): "wide_resnet_101_2",
}

Tensors = Mapping[str, Mapping[str, np.ndarray]]


class NoConvolutionError(ValueError):
    """A convolution that every network has is not in the file.

    Args:
        layer: our name of it.
    """

    def __init__(self, layer: str) -> None:
        super().__init__(f"The file has no convolution; expected {layer}; received none")
        self.layer = layer


def network_of(family: str, layers: Tensors, input_shape, **options) -> keras.Model:
    """Builds the network whose weights these are. It needs no more memory than they do.

    Args:
        family: "wide-resnet", "preact-resnet" or "resnet".
        layers: the weights of each layer, with kernels in the layout of Keras.
        input_shape: height, width and channels of the images.
        **options: further arguments of the network.
    """
    _check_options(family, options)
    stem = _kernel(layers, "stem_conv")
    blocks = _blocks_per_stage(layers)
    widths = [_filters(layers, f"stage{stage}_block1_1_conv") for stage in _numbered(blocks)]
    if family == "wide-resnet":
        return _wide_resnet(layers, blocks, widths, input_shape, options)
    if family == "preact-resnet":
        _check_sizes(layers, blocks, [(width, width) for width in widths])
        return networks.PreActResNet(
            input_shape,
            widths,
            blocks,
            stem_width=stem.shape[-1],
            final_norm="final_bn" in layers,
            name=_PREACT_NAMES.get(_usual(widths, blocks), "preact_resnet"),
            **options,
        )
    options = {
        **options,
        "stem": "imagenet" if stem.shape[0] == _LARGE_STEM else "small",
        "stem_width": stem.shape[-1],
    }
    if "stage1_block1_3_conv" not in layers:
        _check_sizes(layers, blocks, [(width, width) for width in widths])
        name = _RESNET_NAMES.get((_usual(widths, blocks), None), "resnet")
        return networks.ResNet(input_shape, widths, blocks, block="basic", name=name, **options)
    outer = [_filters(layers, f"stage{stage}_block1_3_conv") for stage in _numbered(blocks)]
    # A bottleneck's output is four times its nominal width. Its inner layers may be wider.
    factor = EXPANSION * widths[0] // outer[0]
    nominal = [each // EXPANSION for each in outer]
    sizes = [(each * factor, each * factor, each * EXPANSION) for each in nominal]
    _check_sizes(layers, blocks, sizes)
    name = _RESNET_NAMES.get((_usual(nominal, blocks), factor), "resnet")
    return networks.ResNet(input_shape, nominal, blocks, factor, name=name, **options)


def _check_options(family: str, options: Mapping[str, object]) -> None:
    check_choice("network", family, tuple(_FAMILIES))
    known = sorted(inspect.signature(_FAMILIES[family]).parameters)
    for name, value in options.items():
        if name not in known:
            raise TypeError(
                f"A {family} has no such option; expected some of {known}; received "
                f"{name}={value!r}"
            )


def _wide_resnet(layers: Tensors, blocks, widths, input_shape, options) -> keras.Model:
    depth, width = 6 * blocks[0] + 4, widths[0] // _WIDE_STEM
    expected = [_WIDE_STEM * width * 2**stage for stage in range(3)]
    if blocks != [blocks[0]] * 3 or widths != expected:
        raise ValueError(
            "The file is not of a WideResNet; expected three stages with equally many blocks, and "
            f"16, 32 and 64 times the width; received {blocks} blocks of {widths} channels"
        )
    _check_sizes(layers, blocks, [(each, each) for each in widths])
    return networks.WideResNet(depth, width, input_shape, **options)


def _usual(widths: list[int], blocks: list[int]) -> tuple[int, ...]:
    """Returns the blocks per stage if the stages have the usual widths, otherwise nothing."""
    return tuple(blocks) if widths == _STAGES else ()


def _numbered(items: list) -> Iterator[int]:
    return iter(range(1, len(items) + 1))


def _kernel(layers: Tensors, name: str) -> np.ndarray:
    kernel = layers.get(name, {}).get("kernel", np.zeros(()))
    if kernel.ndim != 4 or not kernel.size:
        raise NoConvolutionError(name)
    return kernel


def _filters(layers: Tensors, name: str) -> int:
    return _kernel(layers, name).shape[-1]


def _check_sizes(layers: Tensors, blocks: list[int], sizes: Sequence[tuple[int, ...]]) -> None:
    """Raises a ValueError unless every block has the channels of its stage.

    Otherwise a small file with one wide layer could ask for a network of any size.

    Args:
        layers: the weights of each layer.
        blocks: the number of blocks of each stage.
        sizes: for each stage, the channels that each convolution of a block returns.
    """
    channels = _filters(layers, "stem_conv")
    for stage, (count, widths) in enumerate(zip(blocks, sizes, strict=True), start=1):
        for block in range(1, count + 1):
            for number, width in enumerate(widths, start=1):
                name = f"stage{stage}_block{block}_{number}_conv"
                shape = _kernel(layers, name).shape[2:]
                if shape != (channels, width):
                    raise ValueError(
                        f"A convolution has another shape; expected {channels} and {width} "
                        f"channels in {name}; received {shape[0]} and {shape[1]}"
                    )
                channels = width


def _blocks_per_stage(layers: Tensors) -> list[int]:
    found: dict[int, set[int]] = {}
    for match in filter(None, map(_BLOCK.match, layers)):
        found.setdefault(int(match[1]), set()).add(int(match[2]))
    counts = [len(found[stage]) for stage in sorted(found)]
    numbers = [found[stage] == set(range(1, len(found[stage]) + 1)) for stage in found]
    if not found or sorted(found) != list(range(1, len(found) + 1)) or not all(numbers):
        raise ValueError(
            "The file does not have the recipe's layers; expected stages and blocks numbered "
            f"without a gap; received stages {sorted(found)} of {counts} blocks: choose another "
            "recipe"
        )
    return counts
