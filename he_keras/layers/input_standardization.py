"""Per-channel standardisation of images inside the network, so that attacks see [0, 1]."""

import math
from collections.abc import Iterable
from typing import Any

import keras

Constants = float | Iterable[float]


@keras.saving.register_keras_serializable(package="he_keras")
class InputStandardization(keras.layers.Layer):
    """Computes `(images - mean) / std` for each channel, with constants and without weights.

    The subtraction happens in float32 under every dtype policy (float64 under float64), and only
    the result is cast to the compute dtype. Just below 1, bfloat16 has steps of 1/256, as wide as a
    grey level. If the image itself were cast, a perturbation would be rounded away.

    Args:
        mean: The mean of each channel, or one number for all channels.
        std: The standard deviation of each channel, or one number for all channels.
        **kwargs: Further arguments of `keras.layers.Layer`.

    Call arguments:
        images: Channels-last images, `(..., channels)`.

    Example:
        >>> import numpy as np
        >>> from he_keras.layers.input_standardization import InputStandardization
        >>> layer = InputStandardization(mean=0.25, std=0.5)
        >>> np.asarray(layer(np.ones((1, 1, 1, 3), "float32"))).ravel().tolist()
        [1.5, 1.5, 1.5]
    """

    def __init__(self, mean: Constants, std: Constants, **kwargs: Any) -> None:
        kwargs["autocast"] = False  # Keras would cast the images to the compute dtype before `call`
        super().__init__(**kwargs)
        self.mean = _per_channel("mean", mean)
        self.std = _per_channel("std", std)
        if len(self.mean) != len(self.std):
            raise ValueError(
                "mean and std differ in length; expected one number for each channel in both; "
                f"received mean={mean}, std={std}"
            )
        if min(self.std) <= 0:
            raise ValueError(f"std is not positive; expected numbers above 0; received std={std}")

    def build(self, input_shape: tuple) -> None:
        """Checks that there is one mean for each channel, or one for all."""
        if len(self.mean) not in (1, input_shape[-1]):
            raise ValueError(
                f"mean and std do not fit the images; expected 1 or {input_shape[-1]} numbers; "
                f"received mean={self.mean}"
            )

    def call(self, images: keras.KerasTensor) -> keras.KerasTensor:
        """Returns the standardised images in the compute dtype."""
        precise_dtype = keras.backend.result_type(self.compute_dtype, "float32")
        images = keras.ops.cast(images, precise_dtype)
        mean = keras.ops.convert_to_tensor(self.mean, precise_dtype)
        std = keras.ops.convert_to_tensor(self.std, precise_dtype)
        return keras.ops.cast((images - mean) / std, self.compute_dtype)

    def compute_output_shape(self, input_shape: tuple) -> tuple:
        """Returns the shape of the images, which does not change."""
        return input_shape

    def get_config(self) -> dict:
        """Returns the constants as plain lists."""
        return {**super().get_config(), "mean": list(self.mean), "std": list(self.std)}


def _per_channel(argument: str, value: Constants) -> tuple[float, ...]:
    """Returns a number or a sequence of numbers as a tuple of floats."""
    sequence = value if isinstance(value, Iterable) else (value,)
    numbers = tuple(float(number) for number in sequence)
    if not numbers or not all(math.isfinite(number) for number in numbers):
        raise ValueError(
            f"{argument} is not finite; expected a number or one number for each channel; "
            f"received {argument}={value}"
        )
    return numbers
