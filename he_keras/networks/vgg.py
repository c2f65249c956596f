"""VGG-16 with batch norm (Simonyan and Zisserman, 2015), as in the code of PAS for 32 x 32."""

import keras

from he_keras.networks.blocks import BlockBuilder, pool_features
from he_keras.networks.network import ImageShape, Statistics, image_input, register

STAGES = ((4, 4), (8, 8), (16, 16, 16), (32, 32, 32), (32, 32, 32))


@register("vgg-16-bn")
def VGG16BN(
    input_shape: ImageShape = (32, 32, 3),
    width: int = 16,
    standardize: bool | Statistics = True,
    activation: str = "relu",
    synchronized: bool = False,
    name: str = "vgg_16_bn",
) -> keras.Model:
    """Builds VGG-16-BN: thirteen 3x3 convolutions in five stages, each closed by a max-pool.

    Width 16 gives the usual 64 to 512 channels and 512 features. PAS trains width 8, that is 32 to
    256 channels, on images that are not standardised. Its convolutions have a bias, which the batch
    norm cancels. These have none.

    Args:
        input_shape: `(height, width, channels)`, at least 32 x 32.
        width: A whole number: the stages have 4, 8, 16, 32 and 32 times as many channels.
        standardize: See `he_keras.networks`.
        activation: See `he_keras.networks`.
        synchronized: See `he_keras.networks`.
        name: Name of the model.
    """
    build = BlockBuilder(activation, synchronized)
    images, x = image_input(input_shape, 32, standardize)
    for stage, factors in enumerate(STAGES, start=1):
        for index, factor in enumerate(factors, start=1):
            x = build.conv_norm_activate(x, factor * width, 3, name=f"stage{stage}_{index}")
        x = keras.layers.MaxPooling2D(2, name=f"stage{stage}_pool")(x)
    return keras.Model(images, pool_features(x), name=name)
