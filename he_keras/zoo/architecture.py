"""Finds the network that a file's tensors belong to, with depth and widths from their shapes."""

import re
from collections.abc import Mapping

import keras
import numpy as np

from he_keras import networks
from he_keras.networks.resnet import EXPANSION

_BLOCK = re.compile(r"stage(\d+)_block(\d+)_")
#: Networks for ImageNet have a first convolution of this width.
_LARGE_STEM = 7

Tensors = Mapping[str, Mapping[str, np.ndarray]]


def network_of(family: str, layers: Tensors, input_shape, **options) -> keras.Model:
    """Builds the network whose weights these are.

    Args:
        family: "wide-resnet", "preact-resnet" or "resnet".
        layers: the weights of each layer, with kernels in the layout of Keras.
        input_shape: height, width and channels of the images.
        **options: further arguments of the network.
    """
    blocks = _blocks_per_stage(layers)
    widths = [
        _filters(layers, f"stage{stage}_block1_1_conv") for stage in range(1, len(blocks) + 1)
    ]
    stem_width = _filters(layers, "stem_conv")
    if family == "wide-resnet":
        depth, width = 6 * blocks[0] + 4, widths[0] // 16
        return networks.WideResNet(depth, width, input_shape, **options)
    if family == "preact-resnet":
        return networks.PreActResNet(
            input_shape,
            widths,
            blocks,
            stem_width=stem_width,
            final_norm="final_bn" in layers,
            **options,
        )
    if "stage1_block1_3_conv" not in layers:
        return _resnet(layers, input_shape, widths, blocks, block="basic", **options)
    outer = [_filters(layers, f"stage{stage}_block1_3_conv") for stage in range(1, len(blocks) + 1)]
    # A bottleneck's output is four times its nominal width. Its inner layers may be wider.
    factor = EXPANSION * widths[0] // outer[0]
    inner = [each // EXPANSION for each in outer]
    return _resnet(layers, input_shape, inner, blocks, width_factor=factor, **options)


def _resnet(layers: Tensors, input_shape, widths, blocks, **options) -> keras.Model:
    kernel = layers["stem_conv"]["kernel"]
    return networks.ResNet(
        input_shape,
        widths,
        blocks,
        stem="imagenet" if kernel.shape[0] == _LARGE_STEM else "small",
        stem_width=kernel.shape[-1],
        **options,
    )


def _filters(layers: Tensors, name: str) -> int:
    if name not in layers:
        raise ValueError(
            f"The file does not have the recipe's layers; expected a layer {name}; "
            f"received {len(layers)} layers without it"
        )
    return layers[name]["kernel"].shape[-1]


def _blocks_per_stage(layers: Tensors) -> list[int]:
    found: dict[int, int] = {}
    for match in filter(None, map(_BLOCK.match, layers)):
        stage, block = int(match[1]), int(match[2])
        found[stage] = max(block, found.get(stage, 0))
    if not found or sorted(found) != list(range(1, len(found) + 1)):
        raise ValueError(
            "The file does not have the recipe's layers; expected stages from 1 on; "
            f"received stages {sorted(found)}: choose another recipe"
        )
    return [found[stage] for stage in sorted(found)]
