"""The small convolutional network of TRADES (Zhang et al., 2019) for MNIST."""

import keras

from he_keras.networks.blocks import BlockBuilder
from he_keras.networks.network import ImageShape, Statistics, image_input, register


@register("small-cnn")
def SmallCNN(
    input_shape: ImageShape = (28, 28, 1),
    dropout_rate: float = 0.5,
    standardize: bool | Statistics = False,
    activation: str = "relu",
    synchronized: bool = False,
    name: str = "small_cnn",
) -> keras.Model:
    """Builds four unpadded 3x3 convolutions (32, 32, 64, 64) and two dense layers of 200 units.

    Dropout stands between the dense layers and acts in training only. Kernels are drawn from He's
    normal distribution (fan-out for the convolutions, fan-in for the dense layers). TRADES keeps
    PyTorch's default for the dense layers.

    Args:
        input_shape: `(height, width, channels)`, at least 16 x 16.
        dropout_rate: Share of the first dense layer's units that training drops; 0 for none.
        standardize: See `he_keras.networks`.
        activation: See `he_keras.networks`.
        synchronized: Without effect, as there is no batch norm.
        name: Name of the model.
    """
    build = BlockBuilder(activation, synchronized)
    images, x = image_input(input_shape, 16, standardize)
    for stage, filters in enumerate((32, 64), start=1):
        for index in (1, 2):
            prefix = f"stage{stage}_{index}"
            x = build.conv(x, filters, 3, padding=0, use_bias=True, name=f"{prefix}_conv")
            x = build.activate(x, name=f"{prefix}_activation")
        x = keras.layers.MaxPooling2D(2, name=f"stage{stage}_pool")(x)
    x = keras.layers.Flatten(name="flatten")(x)
    x = build.dense(x, 200, name="hidden")
    if dropout_rate:
        x = keras.layers.Dropout(dropout_rate, name="dropout")(x)
    return keras.Model(images, build.dense(x, 200, name="features"), name=name)
