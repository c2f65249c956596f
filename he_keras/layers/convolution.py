"""Convolutions of small maps by matrix products: several times faster on a processor.

Where a map is only a few pixels wide, TensorFlow's kernels reach a fraction of the speed of a
matrix product, above all for the gradient of the weights in bfloat16. The mathematics is the same;
sums are rounded in another order. On a GPU everything is left to TensorFlow.
"""

import keras
import tensorflow as tf

#: Maps of at most this width are convolved by products; measured, see docs/performance.md.
_PRODUCT_WIDTH = 4
#: In half precision the gradient of a large kernel is, up to this width.
_GRADIENT_WIDTH = 8
#: Input times output channels from which a kernel is large.
_LARGE_KERNEL = 256 * 256


@keras.saving.register_keras_serializable(package="he_keras")
class Conv2D(keras.layers.Conv2D):
    """`keras.layers.Conv2D` with a faster gradient of the kernel on small maps.

    Values, weights and files are Keras's; what the layer cannot speed up it leaves to Keras's.

    Example:
        >>> import keras, numpy as np
        >>> from he_keras.layers.convolution import Conv2D
        >>> layer = Conv2D(5, 3, padding="same")
        >>> layer(np.ones((2, 4, 4, 3), "float32")).shape
        TensorShape([2, 4, 4, 5])
    """

    def convolution_op(self, inputs, kernel):
        """Convolves; Keras adds the bias and applies the activation."""
        tensor = tf.convert_to_tensor(kernel)
        if is_plain(self) and has_product_gradient(inputs, tensor, self.strides, self.padding):
            return _with_product_gradient(inputs, tensor)
        return super().convolution_op(inputs, kernel)


def is_plain(layer: keras.layers.Conv2D) -> bool:
    """Whether a layer is a dense convolution of images with their channels last."""
    is_dense = tuple(layer.dilation_rate) == (1, 1) and layer.groups == 1
    is_last = layer.data_format == "channels_last"
    return is_dense and is_last and layer.padding in ("same", "valid")


def is_small(
    width: int | None, kernel_shape, strides, padding: str, widest: int = _PRODUCT_WIDTH
) -> bool:
    """Whether a convolution of maps of this width is faster as a product of matrices.

    Args:
        width: of the maps, None if unknown.
        kernel_shape: (height, width, in, out).
        strides: of the convolution.
        padding: "same" or "valid".
        widest: maps that count as small.
    """
    is_odd = kernel_shape[0] % 2 == kernel_shape[1] % 2 == 1
    is_wide_kernel = kernel_shape[0] * kernel_shape[1] > 1
    is_same = padding.lower() == "same" and tuple(strides) == (1, 1)
    is_large = kernel_shape[2] * kernel_shape[3] >= _LARGE_KERNEL
    if not (is_odd and is_wide_kernel and is_same and is_large and width):
        return False
    return width <= widest and on_processor()


def has_product_gradient(inputs, kernel, strides, padding: str) -> bool:
    """Whether the gradient of this convolution's kernel is faster as a product of matrices."""
    is_half_precision = kernel.dtype in (tf.bfloat16, tf.float16)
    widest = _GRADIENT_WIDTH if is_half_precision else _PRODUCT_WIDTH
    return is_small(inputs.shape[2], kernel.shape, strides, padding, widest)


def on_processor() -> bool:
    """Whether there is no GPU."""
    return not tf.config.list_logical_devices("GPU")


def turned(kernel):
    """The kernel whose convolution is the gradient of this one's with respect to its input.

    Example:
        >>> import tensorflow as tf
        >>> from he_keras.layers.convolution import turned
        >>> turned(tf.ones([3, 3, 2, 7])).shape
        TensorShape([3, 3, 7, 2])
    """
    return tf.transpose(tf.reverse(kernel, [0, 1]), [0, 1, 3, 2])


@tf.custom_gradient
def product_convolution(inputs, kernel, turned_kernel):
    """Convolves with stride 1 and "same" padding by one product of matrices.

    The gradient of the inputs is such a product, too, of the turned kernel. As that is an argument,
    many passes turn it only once; derivatives of any order with respect to the variable behind both
    kernels are right.

    Args:
        inputs: images `(n, h, w, c)`.
        kernel: `(kh, kw, c, k)` of odd height and width.
        turned_kernel: `turned(kernel)`.

    Example:
        >>> import tensorflow as tf
        >>> from he_keras.layers.convolution import product_convolution, turned
        >>> kernel = tf.ones([3, 3, 1, 1])
        >>> product_convolution(tf.ones([1, 2, 2, 1]), kernel, turned(kernel)).numpy().ravel()
        array([4., 4., 4., 4.], dtype=float32)
    """

    def gradient(upstream):
        to_inputs = product_convolution(upstream, turned_kernel, kernel)
        return to_inputs, _kernel_gradient(columns, upstream, kernel.shape), None

    columns = _columns(inputs, kernel.shape)
    outputs = tf.matmul(columns, tf.reshape(kernel, [-1, kernel.shape[-1]]))
    shape = tf.shape(inputs)
    outputs = tf.reshape(outputs, [shape[0], shape[1], shape[2], kernel.shape[-1]])
    return tf.ensure_shape(outputs, [*inputs.shape[:3], kernel.shape[-1]]), gradient


@tf.custom_gradient
def _with_product_gradient(inputs, kernel):
    """A convolution with stride 1 and "same" padding; of its own is only the kernel's gradient."""

    def gradient(upstream):
        to_inputs = tf.nn.conv2d_transpose(upstream, kernel, tf.shape(inputs), 1, "SAME")
        columns = _columns(inputs, kernel.shape)
        return to_inputs, _kernel_gradient(columns, upstream, kernel.shape)

    return tf.nn.conv2d(inputs, kernel, 1, "SAME"), gradient


def _kernel_gradient(columns, upstream, kernel_shape):
    rows = tf.reshape(upstream, [-1, kernel_shape[3]])
    return tf.reshape(tf.matmul(columns, rows, transpose_a=True), kernel_shape)


def _columns(images, kernel_shape):
    """For each output pixel, in a row, all that the kernel sees there; zeros beyond the edge."""
    kernel_height, kernel_width, channels = kernel_shape[:3]
    margins = [[0, 0], [kernel_height // 2] * 2, [kernel_width // 2] * 2, [0, 0]]
    padded, shape = tf.pad(images, margins), tf.shape(images)
    # Known sizes make fewer operations, and so a shorter time to the first step.
    height, width = images.shape[1] or shape[1], images.shape[2] or shape[2]
    taps = [
        padded[:, top : top + height, left : left + width]
        for top in range(kernel_height)
        for left in range(kernel_width)
    ]
    return tf.reshape(tf.concat(taps, axis=-1), [-1, kernel_height * kernel_width * channels])
