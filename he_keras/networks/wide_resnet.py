"""WideResNet-depth-width for small images (Zagoruyko and Komodakis, 2016).

As in the code of TRADES and HE, without their block `sub_block1`, which no forward pass uses.
"""

import keras

from he_keras.networks.blocks import BlockBuilder, pool_features, pre_activation_stage
from he_keras.networks.network import ImageShape, Statistics, image_input, register_pattern


@register_pattern(
    "wide-resnet-{depth}-{width}",
    examples=("wide-resnet-28-8", "wide-resnet-34-10", "wide-resnet-34-20"),
)
def WideResNet(
    depth: int = 34,
    width: int = 10,
    input_shape: ImageShape = (32, 32, 3),
    standardize: bool | Statistics = True,
    activation: str = "relu",
    synchronized: bool = False,
    padding: str = "symmetric",
    border: int = 0,
    name: str | None = None,
) -> keras.Model:
    """Builds a WideResNet: three stages of 16, 32 and 64 times `width` channels.

    Args:
        depth: Number of layers, 6n + 4 for n blocks of two convolutions in each stage.
        width: The factor by which the stages are wider than the original ResNet's.
        input_shape: `(height, width, channels)`, at least 4 x 4.
        standardize: See `he_keras.networks`.
        activation: See `he_keras.networks`.
        synchronized: See `he_keras.networks`.
        padding: "symmetric", or "same" as in DeepMind's code, see `blocks.BlockBuilder`.
        border: Black pixels that are added on every side of the image.
        name: Name of the model; None names it after depth and width.

    Example:
        >>> import he_keras as he
        >>> he.networks.WideResNet(10, 1).output_shape
        (None, 64)
    """
    if depth < 10 or (depth - 4) % 6:
        raise ValueError(
            "depth is not that of a WideResNet; expected 6n + 4 with n of at least 1: 10, 16, 22, "
            f"28, 34, ...; received depth={depth}"
        )
    if width < 1:
        raise ValueError(f"width is too small; expected at least 1; received width={width}")
    build = BlockBuilder(activation, synchronized, padding)
    images, x = image_input(input_shape, 4, standardize, border)
    x = build.conv(x, 16, 3, name="stem_conv")
    for stage, (filters, strides) in enumerate(((16, 1), (32, 2), (64, 2)), start=1):
        x = pre_activation_stage(
            build, x, filters * width, (depth - 4) // 6, strides, name=f"stage{stage}"
        )
    x = build.norm_activate(x, name="final")
    return keras.Model(images, pool_features(x), name=name or f"wide_resnet_{depth}_{width}")
