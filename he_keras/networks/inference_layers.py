"""What a convolution and a batch norm compute in inference mode, from tensors prepared beforehand.

The gradient of the images can have the scale of the batch norm before ReLU in the kernel of the
convolution after it. Written with the layer's own kernel k, the norm's scale s and ReLU's mask m, a
pass back is s * (m * (k' g)); it is also m * ((s k)' g), which is one pass over the images less.
"""

from typing import NamedTuple

import tensorflow as tf

from he_keras.layers.batch_norm import inference_scale_and_shift, scale_and_shift
from he_keras.layers.convolution import column_convolution, product_convolution, turned


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
        return _with_gradient(
            lambda images: scale_and_shift(images, self.scale, self.shift),
            lambda upstream: upstream,
            images,
        )


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
