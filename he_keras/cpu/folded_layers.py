"""What a convolution and a batch norm compute in inference mode, from tensors prepared beforehand.

The kernel of a convolution can also carry the scale of the batch norm before it, in the gradient
of the images only. For norm, ReLU and convolution, with the kernel k, the norm's scale s and ReLU's
mask m, a pass back is s * (m * (k' g)). That is also m * ((s k)' g), which is one pass over the
images less.
"""

from typing import NamedTuple

import tensorflow as tf

from he_keras.cpu.cheaper_gradients import subsample, with_gradient
from he_keras.cpu.convolution import (
    column_convolution,
    is_strided_1x1,
    product_convolution,
    transposed_kernel,
)
from he_keras.cpu.switch import applies
from he_keras.layers.batch_norm import inference_scale_and_shift, scale_and_shift


class FoldedNorm(NamedTuple):
    """A batch norm in inference mode.

    Attributes:
        scale: for each channel, in float32.
        shift: for each channel, in float32.
        is_passed: whether the convolutions after it multiply the gradient by the scale.
    """

    scale: tf.Tensor
    shift: tf.Tensor
    is_passed: bool = False

    @classmethod
    def of(cls, norm) -> "FoldedNorm":
        """Reads a built batch norm."""
        return cls(*inference_scale_and_shift(norm))

    def __call__(self, images):
        """Scales and shifts."""
        if not self.is_passed:
            return scale_and_shift(images, self.scale, self.shift)
        return with_gradient(self._forward, lambda upstream: upstream, images)

    def _forward(self, images):
        if images.dtype != tf.float32 or not applies("depthwise_norms"):
            return scale_and_shift(images, self.scale, self.shift)
        # One pass over the images, in place of three: TensorFlow fuses it with the ReLU after it.
        kernel = tf.reshape(self.scale, [1, 1, -1, 1])
        scaled = tf.nn.depthwise_conv2d(images, kernel, [1, 1, 1, 1], "VALID")
        return tf.nn.bias_add(scaled, self.shift)


class FoldedConvolution(NamedTuple):
    """A convolution in inference mode, in its layer's dtype.

    Attributes:
        kernel: `(kh, kw, c, k)`.
        bias: for each output channel, or None.
        backward: kernel of the gradient of the images, where it is not `kernel`, or None.
        transposed: the backward kernel transposed, where both passes are matrix products, or None.
        is_product: whether the pass forward is a product of matrices.
    """

    kernel: tf.Tensor
    bias: tf.Tensor | None
    backward: tf.Tensor | None = None
    transposed: tf.Tensor | None = None
    is_product: bool = False

    @classmethod
    def of(cls, layer, after: FoldedNorm | None = None) -> "FoldedConvolution":
        """Reads a convolution and the batch norm after it, rounded only once.

        Args:
            layer: a built convolution.
            after: the batch norm that is to go into the kernel and the bias.
        """
        kernel, bias = _with_norm(layer, after)
        dtype = layer.compute_dtype
        return cls(tf.cast(kernel, dtype), None if bias is None else tf.cast(bias, dtype))

    def prepared(
        self, layer, after: FoldedNorm | None, before: FoldedNorm | None, is_product: bool
    ):
        """Returns what many passes forward and backward use.

        Args:
            layer: the convolution.
            after: see `of`.
            before: the batch norm before ReLU whose scale the gradient of the images takes over.
            is_product: whether products of matrices are faster.
        """
        backward = None
        if before is not None:
            wide = tf.cast(_with_norm(layer, after)[0], tf.float32)
            backward = tf.cast(wide * before.scale[:, tf.newaxis], layer.compute_dtype)
        transposed = None
        if is_product and layer.padding == "same":
            transposed = transposed_kernel(self.kernel if backward is None else backward)
        return self._replace(backward=backward, transposed=transposed, is_product=is_product)

    def __call__(self, layer, images):
        """Convolves."""
        images = tf.cast(images, self.kernel.dtype)
        strides = layer.strides
        if is_strided_1x1(layer) and applies("subsampling"):
            images, strides = subsample(images, strides[0]), (1, 1)
        if self.backward is None:
            outputs = self._forward(images, layer, strides)
        else:
            outputs = with_gradient(
                lambda images: self._forward(images, layer, strides),
                lambda upstream: self._gradient(upstream, images, layer, strides),
                images,
            )
        return outputs if self.bias is None else tf.nn.bias_add(outputs, self.bias)

    def _forward(self, images, layer, strides):
        if self.transposed is not None:
            return product_convolution(images, self.kernel, self.transposed)
        if self.is_product:
            return column_convolution(images, self.kernel, strides[0], layer.padding)
        return tf.nn.conv2d(images, self.kernel, strides, layer.padding.upper())

    def _gradient(self, upstream, images, layer, strides):
        if self.transposed is not None:
            return product_convolution(upstream, self.transposed, self.backward)
        shape, padding = tf.shape(images), layer.padding.upper()
        gradient = tf.nn.conv2d_transpose(upstream, self.backward, shape, strides, padding)
        return tf.ensure_shape(gradient, images.shape)


def _with_norm(layer, after: FoldedNorm | None):
    """The kernel and the bias or None, with the batch norm after them, not yet rounded."""
    kernel = tf.convert_to_tensor(layer.kernel)
    bias = tf.convert_to_tensor(layer.bias) if layer.use_bias else None
    if after is None:
        return kernel, bias
    shift = after.shift
    if bias is not None:
        shift = tf.cast(bias, tf.float32) * after.scale + shift
    return tf.cast(kernel, tf.float32) * after.scale, shift
