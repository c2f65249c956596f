"""LeNet as in the code of PAS (Liu et al., 2020): two 5x5 convolutions and one dense layer."""

import keras

from he_keras.networks.blocks import BlockBuilder
from he_keras.networks.network import ImageShape, Statistics, image_input, register


@register("lenet")
def LeNet(
    input_shape: ImageShape = (28, 28, 1),
    width: int = 16,
    standardize: bool | Statistics = False,
    activation: str = "relu",
    synchronized: bool = False,
    name: str = "lenet",
) -> keras.Model:
    """Builds LeNet: 2 * width and 4 * width channels, then 64 * width features.

    PAS trains width 16 on MNIST, that is 32 and 64 channels and 1,024 features. It does not
    standardise its inputs. Kernels are drawn from He's normal distribution (fan-out for the
    convolutions, fan-in for the dense layer) where PAS keeps PyTorch's default.

    Args:
        input_shape: `(height, width, channels)`, at least 4 x 4.
        width: A whole number that scales all layers.
        standardize: See `he_keras.networks`.
        activation: See `he_keras.networks`.
        synchronized: Without effect, as there is no batch norm.
        name: Name of the model.
    """
    build = BlockBuilder(activation, synchronized)
    images, x = image_input(input_shape, 4, standardize)
    for index, filters in enumerate((2 * width, 4 * width), start=1):
        x = build.conv(x, filters, 5, use_bias=True, name=f"{index}_conv")
        x = build.activate(x, name=f"{index}_activation")
        x = keras.layers.MaxPooling2D(2, name=f"{index}_pool")(x)
    x = keras.layers.Flatten(name="flatten")(x)
    return keras.Model(images, build.dense(x, 64 * width, name="features"), name=name)
