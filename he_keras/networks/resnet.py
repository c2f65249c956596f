"""ResNets with the activation last (He et al., 2016), also wide (Zagoruyko and Komodakis, 2016).

The ImageNet results of FreeAT and HE use torchvision's architecture. The 3x3 convolution of a block
has the strides. A wide network has wider blocks, but not wider outputs.
"""

import math
from collections.abc import Sequence

import keras

from he_keras.arguments import check_choice
from he_keras.networks.blocks import BlockBuilder, check_stages, pool_features
from he_keras.networks.network import ImageShape, Statistics, image_input, register

EXPANSION = 4
BLOCKS = ("bottleneck", "basic")
STEMS = ("imagenet", "small")


@register("resnet-18", blocks_per_stage=(2, 2, 2, 2), block="basic")
@register("resnet-50", blocks_per_stage=(3, 4, 6, 3))
@register("resnet-152", blocks_per_stage=(3, 8, 36, 3))
@register("wide-resnet-50-2", blocks_per_stage=(3, 4, 6, 3), width_factor=2)
@register("wide-resnet-101-2", blocks_per_stage=(3, 4, 23, 3), width_factor=2)
def ResNet(
    input_shape: ImageShape = (224, 224, 3),
    stage_widths: Sequence[int] = (64, 128, 256, 512),
    blocks_per_stage: Sequence[int] = (3, 4, 6, 3),
    width_factor: int = 1,
    standardize: bool | Statistics = True,
    activation: str = "relu",
    synchronized: bool = False,
    block: str = "bottleneck",
    stem: str = "imagenet",
    stem_width: int | None = None,
    name: str = "resnet",
) -> keras.Model:
    """Builds a ResNet; with bottlenecks it has four times the last of `stage_widths` as features.

    Args:
        input_shape: `(height, width, channels)`, at least 32 x 32.
        stage_widths: Channels of the 3x3 convolutions of each stage, before `width_factor`; the
            stages with bottlenecks give four times as many.
        blocks_per_stage: Blocks of three convolutions in each stage; (3, 4, 6, 3) is ResNet-50.
        width_factor: The factor by which the inner convolutions of a block are widened.
        standardize: See `he_keras.networks`.
        activation: See `he_keras.networks`.
        synchronized: See `he_keras.networks`.
        block: "bottleneck" (1x1, 3x3 and 1x1 convolutions) or "basic" (two of 3x3).
        stem: "imagenet" (7x7, strided, and max pooling) or "small", a 3x3 convolution.
        stem_width: Channels of the stem; None for those of the first stage.
        name: Name of the model.

    Example:
        >>> import he_keras as he
        >>> he.networks.ResNet((32, 32, 3), (4, 8), (1, 1)).output_shape
        (None, 32)
    """
    check_stages(stage_widths, blocks_per_stage)
    check_choice("block", block, BLOCKS)
    check_choice("stem", stem, STEMS)
    build = BlockBuilder(activation, synchronized)
    images, x = image_input(input_shape, 32, standardize)
    x = _stem(build, x, stem_width or stage_widths[0], stem)
    for stage, (width, blocks) in enumerate(
        zip(stage_widths, blocks_per_stage, strict=True), start=1
    ):
        for number in range(1, blocks + 1):
            strides = 2 if number == 1 and stage > 1 else 1
            add = _bottleneck if block == "bottleneck" else _basic_block
            x = add(build, x, width, width_factor, strides, name=f"stage{stage}_block{number}")
    return keras.Model(images, pool_features(x), name=name)


def _stem(build: BlockBuilder, x: keras.KerasTensor, width: int, stem: str) -> keras.KerasTensor:
    """Adds the first convolution, and for large images the pooling after it."""
    if stem == "small":
        return build.conv_norm_activate(x, width, 3, name="stem")
    x = build.conv_norm_activate(x, width, 7, 2, name="stem")
    x = NegativeInfinityPadding2D(1, name="stem_pool_pad")(x)
    return keras.layers.MaxPooling2D(3, 2, name="stem_pool")(x)


def _basic_block(
    build: BlockBuilder,
    x: keras.KerasTensor,
    width: int,
    width_factor: int,
    strides: int,
    *,
    name: str,
) -> keras.KerasTensor:
    """Adds two 3x3 convolutions with batch norm, and the shortcut."""
    filters = width * width_factor
    shortcut = x
    if strides != 1 or x.shape[-1] != filters:
        shortcut = build.conv_norm(x, filters, 1, strides, name=f"{name}_shortcut")
    x = build.conv_norm_activate(x, filters, 3, strides, name=f"{name}_1")
    x = build.conv_norm(x, filters, 3, name=f"{name}_2")
    x = keras.layers.Add(name=f"{name}_add")([x, shortcut])
    return build.activate(x, name=f"{name}_activation")


def _bottleneck(
    build: BlockBuilder,
    x: keras.KerasTensor,
    width: int,
    width_factor: int,
    strides: int,
    *,
    name: str,
) -> keras.KerasTensor:
    """Adds 1x1, 3x3 and 1x1 convolutions with batch norm, and the shortcut."""
    inner_filters, outer_filters = width * width_factor, width * EXPANSION
    shortcut = x
    if strides != 1 or x.shape[-1] != outer_filters:
        shortcut = build.conv_norm(x, outer_filters, 1, strides, name=f"{name}_shortcut")
    x = build.conv_norm_activate(x, inner_filters, 1, name=f"{name}_1")
    x = build.conv_norm_activate(x, inner_filters, 3, strides, name=f"{name}_2")
    x = build.conv_norm(x, outer_filters, 1, name=f"{name}_3")
    x = keras.layers.Add(name=f"{name}_add")([x, shortcut])
    return build.activate(x, name=f"{name}_activation")


@keras.saving.register_keras_serializable(package="he_keras")
class NegativeInfinityPadding2D(keras.layers.ZeroPadding2D):
    """Pads with minus infinity, which no max-pool returns; zeros are larger than swish's minima.

    Args:
        padding: As in `keras.layers.ZeroPadding2D`.
        **kwargs: Further arguments of `keras.layers.ZeroPadding2D`.
    """

    def call(self, inputs: keras.KerasTensor) -> keras.KerasTensor:
        """Returns the padded channels-last inputs."""
        widths = ((0, 0), *self.padding, (0, 0))
        return keras.ops.pad(inputs, widths, constant_values=-math.inf)
