"""The layers that the families stack, with PyTorch's symmetric paddings and He initialisation.

Keras's `padding="same"` pads a strided convolution at the bottom and on the right only. The papers'
code pads it on all four sides, so here every strided layer has a padding layer before it.
"""

from collections.abc import Sequence

import keras

from he_keras.arguments import check_choice
from he_keras.layers.batch_norm import BatchNormalization

ACTIVATIONS = ("relu", "softplus", "swish")
PADDINGS = ("symmetric", "same")
#: Kinds of shortcuts that change the shape. The first entry says whether the shortcut convolves the
#: activated input of its block or the input itself. The second is the width of its kernel.
SHORTCUTS = {"activated": (True, 1), "input": (False, 1), "input-3x3": (False, 3)}


def he_normal() -> keras.initializers.Initializer:
    """Returns a new initialiser N(0, 2 / (k * k * c_out)) (He et al., 2015, fan-out mode).

    New for each layer: one Keras initialiser draws the same numbers at each call.
    """
    return keras.initializers.VarianceScaling(
        2.0, mode="fan_out", distribution="untruncated_normal"
    )


class BlockBuilder:
    """Adds layers to a tensor, with one activation and one kind of batch norm for a whole network.

    Args:
        activation: "relu", "softplus" or "swish".
        synchronized: Whether batch statistics are taken over all replicas.
        padding: "symmetric" pads all four sides alike, as PyTorch does. "same" pads a strided
            convolution at the bottom and on the right, as JAX and TensorFlow do.
    """

    def __init__(
        self, activation: str = "relu", synchronized: bool = False, padding: str = "symmetric"
    ) -> None:
        check_choice("activation", activation, ACTIVATIONS)
        check_choice("padding", padding, PADDINGS)
        self.activation = activation
        self.synchronized = synchronized
        self.padding = padding

    def conv(
        self,
        x: keras.KerasTensor,
        filters: int,
        kernel_size: int,
        strides: int = 1,
        *,
        padding: int | None = None,
        use_bias: bool = False,
        name: str,
    ) -> keras.KerasTensor:
        """Adds a convolution that pads `padding` pixels on every side; None pads kernel_size // 2.

        There is no bias by default, because the batch norm that follows has one.
        """
        if self.padding == "same":
            mode = "same"
        else:
            x, mode = _pad(x, kernel_size, strides, padding, name)
        return keras.layers.Conv2D(
            filters,
            kernel_size,
            strides,
            padding=mode,
            use_bias=use_bias,
            kernel_initializer=he_normal(),
            name=name,
        )(x)

    def depthwise_conv(
        self, x: keras.KerasTensor, kernel_size: int, strides: int = 1, *, name: str
    ) -> keras.KerasTensor:
        """Adds a convolution of each channel by itself, padded by kernel_size // 2.

        An input value reaches k * k outputs. So the kernel is drawn from N(0, 2 / (k * k)).
        """
        x, mode = _pad(x, kernel_size, strides, None, name)
        return keras.layers.DepthwiseConv2D(
            kernel_size,
            strides,
            padding=mode,
            use_bias=False,
            depthwise_initializer=he_normal(),
            name=name,
        )(x)

    def norm(self, x: keras.KerasTensor, *, name: str) -> keras.KerasTensor:
        """Adds a batch norm."""
        return BatchNormalization(synchronized=self.synchronized, name=name)(x)

    def activate(self, x: keras.KerasTensor, *, name: str) -> keras.KerasTensor:
        """Adds the activation."""
        return keras.layers.Activation(self.activation, name=name)(x)

    def dense(self, x: keras.KerasTensor, units: int, *, name: str) -> keras.KerasTensor:
        """Adds a dense layer with bias, N(0, 2 / inputs), and the activation."""
        initializer = keras.initializers.VarianceScaling(2.0, distribution="untruncated_normal")
        x = keras.layers.Dense(units, kernel_initializer=initializer, name=name)(x)
        return self.activate(x, name=f"{name}_activation")

    def norm_activate(self, x: keras.KerasTensor, *, name: str) -> keras.KerasTensor:
        """Adds a batch norm and the activation."""
        return self.activate(self.norm(x, name=f"{name}_bn"), name=f"{name}_activation")

    def conv_norm(
        self, x: keras.KerasTensor, filters: int, kernel_size: int, strides: int = 1, *, name: str
    ) -> keras.KerasTensor:
        """Adds a convolution and a batch norm."""
        x = self.conv(x, filters, kernel_size, strides, name=f"{name}_conv")
        return self.norm(x, name=f"{name}_bn")

    def conv_norm_activate(
        self, x: keras.KerasTensor, filters: int, kernel_size: int, strides: int = 1, *, name: str
    ) -> keras.KerasTensor:
        """Adds a convolution, a batch norm and the activation."""
        x = self.conv_norm(x, filters, kernel_size, strides, name=name)
        return self.activate(x, name=f"{name}_activation")


def check_stages(stage_widths: Sequence[int], blocks_per_stage: Sequence[int]) -> None:
    """Raises a ValueError unless there is a width and a number of blocks for each stage."""
    lengths = {len(stage_widths), len(blocks_per_stage)}
    if len(lengths) != 1 or lengths == {0} or min(*stage_widths, *blocks_per_stage) < 1:
        raise ValueError(
            "stage_widths and blocks_per_stage do not fit; expected one positive number for each "
            f"stage in both; received stage_widths={stage_widths}, "
            f"blocks_per_stage={blocks_per_stage}"
        )


def pre_activation_stage(
    build: BlockBuilder,
    x: keras.KerasTensor,
    filters: int,
    num_blocks: int,
    strides: int,
    *,
    shortcut: str = "activated",
    name: str,
) -> keras.KerasTensor:
    """Adds pre-activation basic blocks, the first of them with the strides.

    Args:
        build: What adds the layers.
        x: The input.
        filters: Channels of each block.
        num_blocks: Number of blocks.
        strides: Of the first block.
        shortcut: A key of `SHORTCUTS`.
        name: Beginning of the layers' names.
    """
    check_choice("shortcut", shortcut, tuple(SHORTCUTS))
    for block in range(1, num_blocks + 1):
        block_strides = strides if block == 1 else 1
        block_name = f"{name}_block{block}"
        x = _pre_activation_block(build, x, filters, block_strides, shortcut, name=block_name)
    return x


def _pre_activation_block(
    build: BlockBuilder,
    x: keras.KerasTensor,
    filters: int,
    strides: int,
    shortcut_kind: str,
    *,
    name: str,
) -> keras.KerasTensor:
    """Adds (norm, activation, 3x3 convolution) twice and the shortcut.

    He et al., 2016, figure 4e.
    """
    activated = build.norm_activate(x, name=f"{name}_1")
    shortcut = x
    if strides != 1 or x.shape[-1] != filters:
        is_activated, kernel_size = SHORTCUTS[shortcut_kind]
        source = activated if is_activated else x
        shortcut = build.conv(source, filters, kernel_size, strides, name=f"{name}_shortcut_conv")
    x = build.conv(activated, filters, 3, strides, name=f"{name}_1_conv")
    x = build.norm_activate(x, name=f"{name}_2")
    x = build.conv(x, filters, 3, name=f"{name}_2_conv")
    return keras.layers.Add(name=f"{name}_add")([x, shortcut])


def pool_features(x: keras.KerasTensor) -> keras.KerasTensor:
    """Adds the mean over all positions, which gives the feature vector."""
    return keras.layers.GlobalAveragePooling2D(name="features")(x)


def _pad(
    x: keras.KerasTensor, kernel_size: int, strides: int, padding: int | None, name: str
) -> tuple[keras.KerasTensor, str]:
    """Returns the tensor, padded on every side alike, and Keras's padding mode to go with it."""
    padding = kernel_size // 2 if padding is None else padding
    if padding == 0:
        return x, "valid"
    if strides == 1 and kernel_size == 2 * padding + 1:
        return x, "same"  # without strides, "same" pads an odd kernel symmetrically
    return keras.layers.ZeroPadding2D(padding, name=f"{name}_pad")(x), "valid"
