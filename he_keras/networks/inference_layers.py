"""What a convolution and a batch norm compute in inference mode, from tensors prepared beforehand.

The gradient of the images can have the scale of the batch norm before ReLU in the kernel of the
convolution after it. Written with the layer's own kernel k, the norm's scale s and ReLU's mask m, a
pass back is s * (m * (k' g)); it is also m * ((s k)' g), which is one pass over the images less.
"""

from typing import NamedTuple

import tensorflow as tf

from he_keras.layers.batch_norm import inference_scale_and_shift, scale_and_shift
from he_keras.layers.convolution import (
    column_convolution,
    on_processor,
    product_convolution,
    turned,
)


class Affine(NamedTuple):
    """A batch norm in inference mode.

    Attributes:
        scale: for each channel, in float32.
        shift: for each channel, in float32.
        is_passed: whether the gradient of the images is multiplied by the scale somewhere else.
    """

    scale: tf.Tensor
    shift: tf.Tensor
    is_passed: bool = False

    @classmethod
    def of(cls, norm) -> "Affine":
        """Reads a built batch norm."""
        return cls(*inference_scale_and_shift(norm))

    def __call__(self, images):
        """Scales and shifts."""
        if not self.is_passed:
            return scale_and_shift(images, self.scale, self.shift)
        return _with_gradient(self._forward, lambda upstream: upstream, images)

    def _forward(self, images):
        if images.dtype != tf.float32 or not on_processor():
            return scale_and_shift(images, self.scale, self.shift)
        # One pass over the images, ReLU included, in place of three.
        kernel = tf.reshape(self.scale, [1, 1, -1, 1])
        scaled = tf.nn.depthwise_conv2d(images, kernel, [1, 1, 1, 1], "VALID")
        return tf.nn.bias_add(scaled, self.shift)


class Kernels(NamedTuple):
    """A convolution in inference mode, in its layer's dtype.

    Attributes:
        kernel: `(kh, kw, c, k)`.
        bias: for each output channel, or None.
        backward: kernel of the gradient of the images, where it is not `kernel`, or None.
        turned: the backward kernel turned, where both passes are products of matrices, or None.
        is_product: whether the pass forward is a product of matrices.
    """

    kernel: tf.Tensor
    bias: tf.Tensor | None
    backward: tf.Tensor | None = None
    turned: tf.Tensor | None = None
    is_product: bool = False

    @classmethod
    def of(cls, layer, after: Affine | None = None) -> "Kernels":
        """Reads a convolution, and the batch norm after it, rounded once.

        Args:
            layer: a built convolution.
            after: the batch norm that is to go into the kernel and the bias.
        """
        kernel, bias = _with_norm(layer, after)
        dtype = layer.compute_dtype
        return cls(tf.cast(kernel, dtype), None if bias is None else tf.cast(bias, dtype))

    def prepared(self, layer, after: Affine | None, before: Affine | None, is_small: bool):
        """Returns what many passes forward and backward use.

        Args:
            layer: the convolution.
            after: see `of`.
            before: the batch norm before ReLU whose scale the gradient of the images takes over.
            is_small: whether products of matrices are faster.
        """
        backward = None
        if before is not None:
            wide = tf.cast(_with_norm(layer, after)[0], tf.float32)
            backward = tf.cast(wide * before.scale[:, tf.newaxis], layer.compute_dtype)
        is_turned = is_small and layer.padding == "same"
        around = turned(self.kernel if backward is None else backward) if is_turned else None
        return self._replace(backward=backward, turned=around, is_product=is_small)

    def __call__(self, layer, images):
        """Convolves."""
        images = tf.cast(images, self.kernel.dtype)
        if self.backward is None:
            outputs = self._forward(layer, images)
        else:
            outputs = _with_gradient(
                lambda images: self._forward(layer, images),
                lambda upstream: self._gradient(layer, upstream, tf.shape(images), images.shape),
                images,
            )
        return outputs if self.bias is None else tf.nn.bias_add(outputs, self.bias)

    def _forward(self, layer, images):
        if self.turned is not None:
            return product_convolution(images, self.kernel, self.turned)
        if self.is_product:
            return column_convolution(images, self.kernel, layer.strides[0], layer.padding)
        return tf.nn.conv2d(images, self.kernel, layer.strides, layer.padding.upper())

    def _gradient(self, layer, upstream, shape, static_shape):
        if self.turned is not None:
            return product_convolution(upstream, self.turned, self.backward)
        images = tf.nn.conv2d_transpose(
            upstream, self.backward, shape, layer.strides, layer.padding.upper()
        )
        return tf.ensure_shape(images, static_shape)


def rectified(images):
    """ReLU; on a processor in bfloat16, its gradient takes half as long as TensorFlow's.

    Example:
        >>> import tensorflow as tf
        >>> from he_keras.networks.inference_layers import rectified
        >>> rectified(tf.constant([-1.0, 2.0])).numpy()
        array([0., 2.], dtype=float32)
    """
    if images.dtype != tf.bfloat16 or not on_processor():
        return tf.nn.relu(images)

    @tf.custom_gradient
    def run(images):
        outputs = tf.nn.relu(images)
        return outputs, lambda upstream: _where_positive(upstream, outputs)

    return run(images)


def picked(images, stride: int):
    """Returns every `stride`-th pixel of both directions; the gradient is the others' zeros.

    Average pooling over one pixel has the same values and a slower gradient.

    Args:
        images: `(n, h, w, c)` of known height and width, multiples of the stride.
        stride: at least 1.

    Example:
        >>> import tensorflow as tf
        >>> from he_keras.networks.inference_layers import picked
        >>> picked(tf.reshape(tf.range(16.0), [1, 4, 4, 1]), 2).numpy().ravel()
        array([ 0.,  2.,  8., 10.], dtype=float32)
    """
    height, width, channels = images.shape[1:]

    def gradient(upstream):
        rows = tf.reshape(upstream, [-1, 1, width // stride, channels])
        gaps = [[0, 0], [0, stride - 1], [0, 0], [0, (stride - 1) * channels]]
        return tf.reshape(tf.pad(rows, gaps), [-1, height, width, channels])

    return _with_gradient(
        lambda images: tf.nn.avg_pool2d(images, 1, stride, "VALID"), gradient, images
    )


@tf.custom_gradient
def _where_positive(upstream, outputs):
    """Returns `upstream` where `outputs` are positive, and zero elsewhere, both in bfloat16.

    TensorFlow widens bfloat16 for this, and has a faster kernel for float16. A choice needs the
    signs and passes the bits on, and the same bits read as float16 have the same sign. Equal for
    normal numbers below 2 to the power of 121, beyond which float16 reads infinity or no number;
    smaller ones than normal are not flushed to zero.
    """
    chosen = tf.raw_ops.ReluGrad(
        gradients=tf.bitcast(upstream, tf.float16), features=tf.bitcast(outputs, tf.float16)
    )
    return tf.bitcast(chosen, tf.bfloat16), lambda second: (_where_positive(second, outputs), None)


def _with_norm(layer, after: Affine | None):
    """The kernel and the bias or None, with the batch norm after them, not yet rounded."""
    kernel = tf.convert_to_tensor(layer.kernel)
    bias = tf.convert_to_tensor(layer.bias) if layer.use_bias else None
    if after is None:
        return kernel, bias
    shift = after.shift
    if bias is not None:
        shift = tf.cast(bias, tf.float32) * after.scale + shift
    return tf.cast(kernel, tf.float32) * after.scale, shift


def _with_gradient(function, gradient, images):
    """Returns `function(images)`, whose gradient is the linear function `gradient(upstream)`."""

    @tf.custom_gradient
    def run(images):
        return function(images), gradient

    return run(images)
