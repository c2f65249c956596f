"""Batch normalisation with the papers' constants, on TensorFlow's fused kernel.

Paper: Ioffe and Szegedy, 2015, "Batch normalization: accelerating deep network training".

Keras's layer computes moments, differences and products as separate operations, on every device.
It does so in float32, also for half-precision inputs. Here one kernel reads the image once. In
training mode that is TensorFlow's fused batch norm, whose statistics are float32 for inputs of any
dtype. In inference mode it is a scale and a shift for each channel, computed beforehand in float32.
For half precision they go through the same kernel, which rounds only once.

The values are Keras's, up to rounding, and so are the weights, by name and shape. A `.keras` file
names this class, so that reading the file takes `import he_keras`.
"""

from typing import Any

import keras
import tensorflow as tf

FUSED_DTYPES = ("float32", "bfloat16", "float16")


@keras.saving.register_keras_serializable(package="he_keras")
class BatchNormalization(keras.layers.BatchNormalization):
    """`keras.layers.BatchNormalization`, faster, with momentum 0.9 and epsilon 1e-5.

    These are PyTorch's defaults (which writes the momentum as 0.1), and every paper reproduced here
    trained with them. Keras's own are 0.99 and 1e-3. One deviation stays: Keras tracks the biased
    batch variance and PyTorch the unbiased one. They differ by a factor n / (n - 1) for n values of
    a channel.

    Keras's layer does what the fused kernel cannot do: masks, renormalisation, float64, and
    statistics over several replicas. It also takes inputs that are not images with their channels
    last.

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

    #: Keras before 3.14 has no renormalisation, and does not set this.
    renorm = False

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

    def call(self, inputs, training=None, mask=None):
        """Normalises by the batch's statistics in training mode, else by the moving ones."""
        with_batch_statistics = training and self.trainable
        if with_batch_statistics and self._is_recorded(mask):
            return self._normalized_by_operations(inputs)
        if not self._is_fusable(inputs, mask):
            return super().call(inputs, training=training, mask=mask)
        if not with_batch_statistics:
            return scale_and_shift(inputs, *inference_scale_and_shift(self))
        if self._spans_replicas():
            return super().call(inputs, training=training, mask=mask)
        return self._normalized_by_batch(inputs)

    def _is_fusable(self, inputs, mask) -> bool:
        is_last = self.axis in (-1, len(inputs.shape) - 1)
        is_plain = mask is None and not self.renorm
        return is_plain and is_last and len(inputs.shape) == 4 and inputs.dtype in FUSED_DTYPES

    def _spans_replicas(self) -> bool:
        return self.synchronized and tf.distribute.get_strategy().num_replicas_in_sync > 1

    def _is_recorded(self, mask) -> bool:
        """Whether a `keras.StatelessScope` has given the moving averages other values.

        Then the caller wants the values that the layer would assign to them, with their gradients.
        """
        is_plain = mask is None and not self.renorm and not self._spans_replicas()
        return is_plain and not isinstance(self.moving_mean.value, tf.Variable)

    def _normalized_by_batch(self, inputs):
        channels = inputs.shape[-1]
        outputs, mean, variance = tf.raw_ops.FusedBatchNormV3(
            x=inputs,
            scale=tf.ones([channels]) if self.gamma is None else _float32(self.gamma),
            offset=tf.zeros([channels]) if self.beta is None else _float32(self.beta),
            mean=tf.zeros([0]),
            variance=tf.zeros([0]),
            epsilon=self.epsilon,
            is_training=True,
        )[:3]
        # The kernel returns the unbiased variance, Keras tracks the biased one.
        count = tf.cast(tf.size(inputs) // channels, tf.float32)
        _track(self.moving_mean, mean, self.momentum)
        _track(self.moving_variance, variance * (count - 1.0) / count, self.momentum)
        return outputs

    def _normalized_by_operations(self, inputs):
        """Normalises in training mode, differentiable any number of times, statistics included.

        The fused kernel passes no gradient to the mean and the variance that it returns. Keras's
        moments hold the mean constant inside the variance. That is right for a gradient, and wrong
        for the gradient of a gradient.
        """
        channels = self.axis % len(inputs.shape)
        axes = [axis for axis in range(len(inputs.shape)) if axis != channels]
        wide = inputs if inputs.dtype == tf.float64 else tf.cast(inputs, tf.float32)
        mean = tf.reduce_mean(wide, axes, keepdims=True)
        variance = tf.reduce_mean(tf.square(wide - mean), axes, keepdims=True)
        for moving, value in ((self.moving_mean, mean), (self.moving_variance, variance)):
            old = tf.cast(tf.convert_to_tensor(moving), wide.dtype) * self.momentum
            moving.assign(old + tf.reshape(value, [-1]) * (1.0 - self.momentum))
        gamma, beta = (
            None if each is None else tf.reshape(tf.cast(each, wide.dtype), tf.shape(mean))
            for each in (self.gamma, self.beta)
        )
        return tf.cast(
            tf.nn.batch_normalization(wide, mean, variance, beta, gamma, self.epsilon),
            self.compute_dtype,
        )


def inference_scale_and_shift(norm: keras.layers.BatchNormalization):
    """Returns the scale and the shift of a batch norm in inference mode, in float32.

    For each channel they are `gamma / sqrt(variance + epsilon)` and `beta - mean * scale`, with the
    moving statistics.

    Args:
        norm: a built batch norm, Keras's or ours.

    Example:
        >>> import keras
        >>> from he_keras.layers.batch_norm import inference_scale_and_shift
        >>> norm = keras.layers.BatchNormalization(epsilon=3.0)
        >>> norm.build((None, 4, 4, 1))
        >>> [each.numpy().item() for each in inference_scale_and_shift(norm)]
        [0.5, 0.0]
    """
    scale = tf.math.rsqrt(_float32(norm.moving_variance) + norm.epsilon)
    if norm.gamma is not None:
        scale = scale * _float32(norm.gamma)
    shift = -_float32(norm.moving_mean) * scale
    return scale, shift if norm.beta is None else shift + _float32(norm.beta)


def scale_and_shift(inputs, scale, shift):
    """Returns `inputs * scale + shift` by channel, in the inputs' dtype, rounded once.

    Args:
        inputs: images `(n, h, w, c)` in float32 or half precision.
        scale: float32 factors `(c,)`.
        shift: float32 summands `(c,)`.

    Example:
        >>> import tensorflow as tf
        >>> from he_keras.layers.batch_norm import scale_and_shift
        >>> pixel = tf.ones([1, 1, 1, 1])
        >>> scale_and_shift(pixel, tf.constant([2.0]), tf.constant([0.5])).numpy().item()
        2.5
    """
    if inputs.dtype == tf.float32:
        return inputs * scale + shift
    return _half_precision_scale_and_shift(inputs, scale, shift)


@tf.custom_gradient
def _half_precision_scale_and_shift(inputs, scale, shift):
    """Takes one pass over the image instead of two, and one for the gradient of the inputs."""

    def gradient(upstream):
        wide = tf.cast(upstream, tf.float32)
        axes = [0, 1, 2]
        return (
            _half_precision_scale_and_shift(upstream, scale, tf.zeros_like(shift)),
            tf.reduce_sum(wide * tf.cast(inputs, tf.float32), axes),
            tf.reduce_sum(wide, axes),
        )

    outputs = tf.raw_ops.FusedBatchNormV3(
        x=inputs,
        scale=scale,
        offset=shift,
        mean=tf.zeros_like(scale),
        variance=tf.ones_like(scale),
        epsilon=0.0,
        is_training=False,
    )[0]
    return outputs, gradient


def _float32(variable):
    return tf.cast(tf.convert_to_tensor(variable), tf.float32)


def _track(moving, batch_value, momentum: float) -> None:
    moving.assign(_float32(moving) * momentum + batch_value * (1.0 - momentum))
