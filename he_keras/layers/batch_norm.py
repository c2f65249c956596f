"""Batch normalisation with the constants of the papers' code (Ioffe and Szegedy, 2015)."""

from typing import Any

import keras


@keras.saving.register_keras_serializable(package="he_keras")
class BatchNormalization(keras.layers.BatchNormalization):
    """`keras.layers.BatchNormalization` with momentum 0.9 and epsilon 1e-5.

    These are PyTorch's defaults (which writes the momentum as 0.1), and every paper reproduced here
    trained with them; Keras's own are 0.99 and 1e-3. One deviation stays: Keras tracks the biased
    batch variance, PyTorch the unbiased one, a factor n / (n - 1) over n values a channel.

    Args:
        axis: The axis that is kept; the channels.
        momentum: Share of the old moving statistics that an update keeps.
        epsilon: Added to the variance before the square root.
        synchronized: Whether to compute the batch statistics over all replicas of a
            `tf.distribute` strategy.
        **kwargs: Further arguments of `keras.layers.BatchNormalization`.

    Example:
        >>> from he_keras.layers.batch_norm import BatchNormalization
        >>> layer = BatchNormalization()
        >>> layer.momentum, layer.epsilon
        (0.9, 1e-05)
    """

    def __init__(
        self,
        axis: int = -1,
        momentum: float = 0.9,
        epsilon: float = 1e-5,
        synchronized: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            axis=axis, momentum=momentum, epsilon=epsilon, synchronized=synchronized, **kwargs
        )
