"""Convolutions of small maps by matrix products: several times faster on a processor.

Where a map is only a few pixels wide, TensorFlow's kernels reach a fraction of the speed of a
matrix product, above all for the gradient of the weights in bfloat16. The mathematics is the same;
sums are rounded in another order. On a GPU or TPU everything is left to TensorFlow.
"""

import keras
import numpy as np
import tensorflow as tf

#: Convolutions to maps of at most this width are products; measured, see docs/performance.md.
_PRODUCT_WIDTH = 4
#: In half precision the gradient of a large kernel is, up to this width.
_GRADIENT_WIDTH = 8
#: Input times output channels from which a kernel is large; of gradients in half precision.
_LARGE_KERNEL = 256 * 256
_LARGE_GRADIENT = 128 * 256


@keras.saving.register_keras_serializable(package="he_keras")
class Conv2D(keras.layers.Conv2D):
    """`keras.layers.Conv2D`, faster on small maps, above all the gradient of the kernel.

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
            return column_convolution(inputs, tensor, self.strides[0], self.padding)
        return super().convolution_op(inputs, kernel)


def is_plain(layer: keras.layers.Conv2D) -> bool:
    """Whether a layer is a dense convolution of images with their channels last."""
    is_dense = tuple(layer.dilation_rate) == (1, 1) and layer.groups == 1
    is_last = layer.data_format == "channels_last"
    return is_dense and is_last and layer.padding in ("same", "valid")


def is_small(
    size,
    kernel_shape,
    strides,
    padding: str,
    widest: int = _PRODUCT_WIDTH,
    large: int | None = None,
) -> bool:
    """Whether a convolution to maps of this width is faster as a product of matrices.

    Args:
        size: height and width of the images, None where unknown.
        kernel_shape: (height, width, in, out).
        strides: of the convolution.
        padding: "same" or "valid".
        widest: maps that count as small.
        large: input times output channels from which the kernel is large enough.
    """
    is_large = kernel_shape[2] * kernel_shape[3] >= (_LARGE_KERNEL if large is None else large)
    if not is_large or kernel_shape[0] * kernel_shape[1] == 1 or None in tuple(size):
        return False
    is_even = kernel_shape[0] % 2 == 0 or kernel_shape[1] % 2 == 0
    if strides[0] != strides[1] or (padding.lower() == "same" and (strides[0] > 1 or is_even)):
        return False
    return 0 < _output_size(size, kernel_shape, strides[0], padding)[1] <= widest and on_processor()


def has_product_gradient(inputs, kernel, strides, padding: str) -> bool:
    """Whether the gradient of this convolution's kernel is faster as a product of matrices."""
    size = inputs.shape[1:3]
    if kernel.dtype in (tf.bfloat16, tf.float16):
        limits = _GRADIENT_WIDTH, _LARGE_GRADIENT
        return is_small(size, kernel.shape, strides, padding, *limits)
    return is_small(size, kernel.shape, strides, padding)


def on_processor() -> bool:
    """Whether there is neither a GPU nor a TPU."""
    return not any(tf.config.list_logical_devices(kind) for kind in ("GPU", "TPU"))


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
        inputs: images `(n, h, w, c)` of known height and width.
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

    columns = _columns(inputs, kernel.shape, 1, "same")
    return _product(columns, kernel, inputs.shape[1:3]), gradient


def column_convolution(inputs, kernel, stride: int, padding: str):
    """Convolves; the gradient of the kernel is a product of matrices.

    So are the values where `is_small`; the gradient of the inputs is TensorFlow's.

    Args:
        inputs: images `(n, h, w, c)` of known height and width.
        kernel: `(kh, kw, c, k)`.
        stride: of the convolution, in both directions.
        padding: "valid", or, with stride 1 and a kernel of odd height and width, "same".

    Example:
        >>> import tensorflow as tf
        >>> from he_keras.layers.convolution import column_convolution
        >>> images, kernel = tf.ones([1, 5, 5, 1]), tf.ones([3, 3, 1, 1])
        >>> column_convolution(images, kernel, 2, "valid").numpy().ravel()
        array([9., 9., 9., 9.], dtype=float32)
    """
    size, mode = inputs.shape[1:3], padding.upper()

    @tf.custom_gradient
    def convolve(inputs, kernel):
        def gradient(upstream):
            to_inputs = tf.nn.conv2d_transpose(upstream, kernel, tf.shape(inputs), stride, mode)
            read = _columns(inputs, kernel.shape, stride, padding) if columns is None else columns
            return to_inputs, _kernel_gradient(read, upstream, kernel.shape)

        columns = None
        if not is_small(size, kernel.shape, (stride, stride), padding):
            return tf.nn.conv2d(inputs, kernel, stride, mode), gradient
        columns = _columns(inputs, kernel.shape, stride, padding)
        output_size = _output_size(size, kernel.shape, stride, padding)
        return _product(columns, kernel, output_size), gradient

    return convolve(inputs, kernel)


def _product(columns, kernel, output_size):
    outputs = tf.matmul(columns, tf.reshape(kernel, [-1, kernel.shape[3]]))
    return tf.reshape(outputs, [-1, *output_size, kernel.shape[3]])


def _kernel_gradient(columns, upstream, kernel_shape):
    rows = tf.reshape(upstream, [-1, kernel_shape[3]])
    return tf.reshape(tf.matmul(columns, rows, transpose_a=True), kernel_shape)


def _output_size(size, kernel_shape, stride: int, padding: str) -> tuple[int, int]:
    if padding.lower() == "same":
        return size[0], size[1]
    return (
        (size[0] - kernel_shape[0]) // stride + 1,
        (size[1] - kernel_shape[1]) // stride + 1,
    )


def _columns(images, kernel_shape, stride: int, padding: str):
    """For each output pixel, in a row, all that the kernel sees there; zeros beyond the edge."""
    (height, width), channels = images.shape[1:3], kernel_shape[2]
    pixels = _pixels_seen((height, width), kernel_shape, stride, padding)
    rows = tf.reshape(images, [-1, height * width, channels])
    if pixels.max() == height * width:
        rows = tf.pad(rows, [[0, 0], [0, 1], [0, 0]])
    # One copy of each row of channels; slices of the image would be copied twice.
    return tf.reshape(tf.gather(rows, pixels.ravel(), axis=1), [-1, pixels.shape[1] * channels])


def _pixels_seen(size, kernel_shape, stride: int, padding: str) -> np.ndarray:
    """Returns which pixel each tap of each output reads; the number after the last is the edge's.

    Example:
        >>> from he_keras.layers.convolution import _pixels_seen
        >>> _pixels_seen((1, 3), (1, 3), 1, "same").tolist()
        [[3, 0, 1], [0, 1, 2], [1, 2, 3]]
    """
    lines, is_inside = [], []
    for length, outputs, taps in zip(
        size, _output_size(size, kernel_shape, stride, padding), kernel_shape, strict=False
    ):
        margin = taps // 2 if padding.lower() == "same" else 0
        seen = stride * np.arange(outputs)[:, None] + np.arange(taps) - margin
        lines.append(seen)
        is_inside.append((seen >= 0) & (seen < length))
    rows, columns = lines[0][:, None, :, None], lines[1][None, :, None, :]
    both_inside = is_inside[0][:, None, :, None] & is_inside[1][None, :, None, :]
    pixels = np.where(both_inside, rows * size[1] + columns, size[0] * size[1])
    return pixels.reshape(-1, kernel_shape[0] * kernel_shape[1]).astype("int32")
