"""MobileNetV2 (Sandler et al., 2018), in the variant for 32 x 32 that RAT's code takes.

It differs from the ImageNet network in three ways. The stem and the second stage have strides 1.
If a block without strides changes the channels, its shortcut is a 1x1 convolution. ReLU replaces
ReLU6.
"""

import keras

from he_keras.networks.blocks import BlockBuilder, pool_features
from he_keras.networks.network import ImageShape, Statistics, image_input, register

# expansion, channels, blocks, strides of the first block
STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 1),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


@register("mobilenet-v2")
def MobileNetV2(
    input_shape: ImageShape = (32, 32, 3),
    standardize: bool | Statistics = True,
    activation: str = "relu",
    synchronized: bool = False,
    name: str = "mobilenet_v2",
) -> keras.Model:
    """Builds MobileNetV2 with 1,280 features.

    Args:
        input_shape: `(height, width, channels)`, at least 8 x 8.
        standardize: See `he_keras.networks`.
        activation: See `he_keras.networks`.
        synchronized: See `he_keras.networks`.
        name: Name of the model.
    """
    build = BlockBuilder(activation, synchronized)
    images, x = image_input(input_shape, 8, standardize)
    x = build.conv_norm_activate(x, 32, 3, name="stem")
    for stage, (expansion, filters, blocks, strides) in enumerate(STAGES, start=1):
        for block in range(1, blocks + 1):
            block_strides = strides if block == 1 else 1
            x = _inverted_residual(
                build, x, expansion, filters, block_strides, name=f"stage{stage}_block{block}"
            )
    x = build.conv_norm_activate(x, 1280, 1, name="final")
    return keras.Model(images, pool_features(x), name=name)


def _inverted_residual(
    build: BlockBuilder,
    x: keras.KerasTensor,
    expansion: int,
    filters: int,
    strides: int,
    *,
    name: str,
) -> keras.KerasTensor:
    """Adds expansion, depthwise convolution and linear projection, and a shortcut if unstrided."""
    inputs = x
    x = build.conv_norm_activate(x, expansion * x.shape[-1], 1, name=f"{name}_expand")
    x = build.depthwise_conv(x, 3, strides, name=f"{name}_depthwise_conv")
    x = build.norm_activate(x, name=f"{name}_depthwise")
    x = build.conv_norm(x, filters, 1, name=f"{name}_project")
    if strides != 1:
        return x
    shortcut = inputs
    if inputs.shape[-1] != filters:
        shortcut = build.conv_norm(inputs, filters, 1, name=f"{name}_shortcut")
    return keras.layers.Add(name=f"{name}_add")([x, shortcut])
