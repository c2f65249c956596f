"""Pre-activation ResNets for small images (He et al., 2016, "Identity mappings ...").

This is PreActResNet-18 of "Fast is better than free" (Wong et al., 2020), which HE's FastAT and
FreeAT results use. Its stem is a single 3x3 convolution, and a batch norm and an activation come
before the pooling. One deviation: a shortcut that changes the shape takes the activated input, as
in the paper and in WideResNet. Copies of that code differ here; the number of parameters is the
same.
"""

from collections.abc import Sequence

import keras

from he_keras.networks.blocks import BlockBuilder, check_stages, pool_features, pre_activation_stage
from he_keras.networks.network import ImageShape, Statistics, image_input, register


@register("preact-resnet")
@register("preact-resnet-small", stage_widths=(32, 64, 128), blocks_per_stage=(1, 1, 1))
def PreActResNet(
    input_shape: ImageShape = (32, 32, 3),
    stage_widths: Sequence[int] = (64, 128, 256, 512),
    blocks_per_stage: Sequence[int] = (2, 2, 2, 2),
    standardize: bool | Statistics = True,
    activation: str = "relu",
    synchronized: bool = False,
    stem_width: int | None = None,
    padding: str = "symmetric",
    shortcut: str = "activated",
    final_norm: bool = True,
    name: str = "preact_resnet",
) -> keras.Model:
    """Builds a pre-activation ResNet; each stage after the first halves the resolution.

    "preact-resnet-small" takes 47 million multiply-accumulates an image, little enough for a CPU.

    Args:
        input_shape: `(height, width, channels)`, at least 1 x 1 at the last stage.
        stage_widths: Channels of each stage.
        blocks_per_stage: Blocks of two convolutions in each stage.
        standardize: See `he_keras.networks`.
        activation: See `he_keras.networks`.
        synchronized: See `he_keras.networks`.
        stem_width: Channels of the first convolution; None for those of the first stage.
        padding: "symmetric", or "same" as in DeepMind's code, see `blocks.BlockBuilder`.
        shortcut: What a shortcut that changes the shape convolves: the block's "activated" input,
            or the "input" (Wong et al.), by 3x3 kernels with "input-3x3" (DeepMind).
        final_norm: Whether a batch norm and an activation stand before the pooling.
        name: Name of the model.

    Example:
        >>> import he_keras as he
        >>> he.networks.PreActResNet((8, 8, 1), (4, 8), (1, 1)).output_shape
        (None, 8)
    """
    check_stages(stage_widths, blocks_per_stage)
    build = BlockBuilder(activation, synchronized, padding)
    images, x = image_input(input_shape, 2 ** (len(stage_widths) - 1), standardize)
    x = build.conv(x, stem_width or stage_widths[0], 3, name="stem_conv")
    for stage, (width, blocks) in enumerate(
        zip(stage_widths, blocks_per_stage, strict=True), start=1
    ):
        strides = 1 if stage == 1 else 2
        sizes = width, blocks, strides
        x = pre_activation_stage(build, x, *sizes, shortcut=shortcut, name=f"stage{stage}")
    if final_norm:
        x = build.norm_activate(x, name="final")
    return keras.Model(images, pool_features(x), name=name)


@register("preact-resnet-18")
def PreActResNet18(
    input_shape: ImageShape = (32, 32, 3),
    standardize: bool | Statistics = True,
    activation: str = "relu",
    synchronized: bool = False,
    name: str = "preact_resnet_18",
) -> keras.Model:
    """Builds PreActResNet-18: four stages of two blocks, 64 to 512 channels, 512 features.

    Args:
        input_shape: `(height, width, channels)`, at least 8 x 8.
        standardize: See `he_keras.networks`.
        activation: See `he_keras.networks`.
        synchronized: See `he_keras.networks`.
        name: Name of the model.

    Example:
        >>> import he_keras as he
        >>> he.networks.PreActResNet18(input_shape=(32, 32, 3)).output_shape
        (None, 512)
    """
    return PreActResNet(
        input_shape,
        standardize=standardize,
        activation=activation,
        synchronized=synchronized,
        name=name,
    )
