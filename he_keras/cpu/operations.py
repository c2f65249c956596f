"""Operations with TensorFlow's values that take less time on a CPU, with all their derivatives.

Convolutions of small maps are matrix products. Where a map is only a few pixels wide, TensorFlow's
kernels reach a fraction of the speed of a matrix product. That is worst for the gradient of the
weights in bfloat16. The mathematics is the same. Sums are rounded in another order. ReLU and
subsampling have a cheaper gradient.
"""

import keras
import numpy as np
import tensorflow as tf

from he_keras.cpu.switch import applies

# The limits were measured, see docs/research/performance.md.
#: Convolutions to maps of at most this width are products.
_PRODUCT_WIDTH = 4
#: In half precision, gradients of kernels are products up to this width.
_GRADIENT_WIDTH = 8
#: A kernel is large from so many input times output channels.
_LARGE_KERNEL = 256 * 256
#: The same for gradients in half precision.
_LARGE_GRADIENT = 128 * 256


def is_plain(layer: keras.layers.Conv2D) -> bool:
    """Whether a layer is a dense convolution of images with their channels last."""
    is_dense = tuple(layer.dilation_rate) == (1, 1) and layer.groups == 1
    is_last = layer.data_format == "channels_last"
    return is_dense and is_last and layer.padding in ("same", "valid")


def is_strided_1x1(layer: keras.layers.Conv2D) -> bool:
    """Whether a plain convolution reads one pixel for each output and leaves others out."""
    rows, columns = layer.strides
    return tuple(layer.kernel_size) == (1, 1) and rows == columns > 1


def has_product_values(size, kernel_shape, strides, padding: str) -> bool:
    """Whether the values of a convolution are faster as a product of matrices.

    Args:
        size: height and width of the images, None where unknown.
        kernel_shape: (height, width, in, out).
        strides: of the convolution.
        padding: "same" or "valid".
    """
    settings = size, kernel_shape, strides, padding
    return _is_product_faster(*settings, _PRODUCT_WIDTH, _LARGE_KERNEL)


def has_product_gradient(size, kernel, strides, padding: str) -> bool:
    """Whether the gradient of a convolution's kernel is faster as a product of matrices.

    Args:
        size: height and width of the images, None where unknown.
        kernel: the tensor of the kernel.
        strides: of the convolution.
        padding: "same" or "valid".
    """
    settings = size, kernel.shape, strides, padding
    if kernel.dtype in (tf.bfloat16, tf.float16):
        return _is_product_faster(*settings, _GRADIENT_WIDTH, _LARGE_GRADIENT)
    return _is_product_faster(*settings, _PRODUCT_WIDTH, _LARGE_KERNEL)


def _is_product_faster(size, kernel_shape, strides, padding, widest: int, large: int) -> bool:
    """Whether the kernel is large, the map of outputs narrow, and the case one that is covered."""
    height, width, channels_in, channels_out = kernel_shape
    if None in tuple(size) or height * width == 1 or channels_in * channels_out < large:
        return False
    if padding.lower() == "same" and (strides[0] > 1 or height % 2 == 0 or width % 2 == 0):
        return False
    output_width = _output_size(size, kernel_shape, strides[0], padding)[1]
    return strides[0] == strides[1] and 0 < output_width <= widest and applies("matrix_products")


def transposed_kernel(kernel):
    """Returns the kernel whose convolution is the gradient of this one's by its input.

    It is turned by 180 degrees, with input and output channels exchanged.

    Example:
        >>> import tensorflow as tf
        >>> from he_keras.cpu.operations import transposed_kernel
        >>> transposed_kernel(tf.ones([3, 3, 2, 7])).shape
        TensorShape([3, 3, 7, 2])
    """
    return tf.transpose(tf.reverse(kernel, [0, 1]), [0, 1, 3, 2])


@tf.custom_gradient
def product_convolution(inputs, kernel, transposed):
    """Convolves with stride 1 and "same" padding by one product of matrices.

    The gradient of the inputs is also such a product, of the transposed kernel. That kernel is an
    argument, so that many passes make it only once. Derivatives of any order are right, also
    by the variable that both kernels come from.

    Args:
        inputs: images `(n, h, w, c)` of known height and width.
        kernel: `(kh, kw, c, k)` of odd height and width.
        transposed: `transposed_kernel(kernel)`.

    Example:
        >>> import tensorflow as tf
        >>> from he_keras.cpu.operations import product_convolution, transposed_kernel
        >>> kernel = tf.ones([3, 3, 1, 1])
        >>> images, transposed = tf.ones([1, 2, 2, 1]), transposed_kernel(kernel)
        >>> product_convolution(images, kernel, transposed).numpy().ravel()
        array([4., 4., 4., 4.], dtype=float32)
    """

    def gradient(upstream):
        to_inputs = product_convolution(upstream, transposed, kernel)
        return to_inputs, _kernel_gradient(columns, upstream, kernel.shape), None

    columns = _columns(inputs, kernel.shape, 1, "same")
    return _product(columns, kernel, inputs.shape[1:3]), gradient


def column_convolution(inputs, kernel, stride: int, padding: str):
    """Convolves; the gradient of the kernel is a product of matrices.

    The values are such a product where `has_product_values`. The gradient of the inputs is
    TensorFlow's.

    Args:
        inputs: images `(n, h, w, c)` of known height and width.
        kernel: `(kh, kw, c, k)`.
        stride: of the convolution, in both directions.
        padding: "valid", or, with stride 1 and a kernel of odd height and width, "same".

    Example:
        >>> import tensorflow as tf
        >>> from he_keras.cpu.operations import column_convolution
        >>> images, kernel = tf.ones([1, 5, 5, 1]), tf.ones([3, 3, 1, 1])
        >>> column_convolution(images, kernel, 2, "valid").numpy().ravel()
        array([9., 9., 9., 9.], dtype=float32)
    """
    size, mode = inputs.shape[1:3], padding.upper()

    @tf.custom_gradient
    def convolve(inputs, kernel):
        def gradient(upstream):
            to_inputs = tf.nn.conv2d_transpose(upstream, kernel, tf.shape(inputs), stride, mode)
            seen = _columns(inputs, kernel.shape, stride, padding) if columns is None else columns
            return to_inputs, _kernel_gradient(seen, upstream, kernel.shape)

        columns = None
        if not has_product_values(size, kernel.shape, (stride, stride), padding):
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
    """Returns a row for each output pixel: what the kernel sees there, zeros beyond the edge."""
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
        >>> from he_keras.cpu.operations import _pixels_seen
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


def relu(images):
    """Returns ReLU; in bfloat16 its gradient takes half as long as TensorFlow's.

    Example:
        >>> import tensorflow as tf
        >>> from he_keras.cpu.operations import relu
        >>> relu(tf.constant([-1.0, 2.0])).numpy()
        array([0., 2.], dtype=float32)
    """
    if images.dtype != tf.bfloat16 or not applies("bfloat16_relu"):
        return tf.nn.relu(images)

    @tf.custom_gradient
    def run(images):
        outputs = tf.nn.relu(images)
        return outputs, lambda upstream: _where_positive(upstream, outputs)

    return run(images)


@tf.custom_gradient
def _where_positive(upstream, outputs):
    """Returns `upstream` where `outputs` are positive, and zero elsewhere, both in bfloat16.

    TensorFlow widens bfloat16 for this, and has a faster kernel for float16. The choice needs only
    the signs and passes the bits on, and the same bits read as float16 have the same sign. The
    result is equal for normal numbers below 2 to the power of 121. Beyond that, float16 reads
    infinity or no number. Numbers smaller than normal are not flushed to zero.
    """
    chosen = tf.raw_ops.ReluGrad(
        gradients=tf.bitcast(upstream, tf.float16), features=tf.bitcast(outputs, tf.float16)
    )
    return tf.bitcast(chosen, tf.bfloat16), lambda second: (_where_positive(second, outputs), None)


def subsample(images, stride: int):
    """Returns every `stride`-th pixel of both directions; the gradient of the others is zero.

    A strided 1x1 convolution is this and a convolution without strides. It is also safer: oneDNN 3
    was seen to corrupt memory in the weight gradient of strided 1x1 convolutions with fewer than 16
    input channels. Average pooling over one pixel has the same values and a slower gradient.

    Args:
        images: `(n, h, w, c)`.
        stride: at least 1.

    Example:
        >>> import tensorflow as tf
        >>> from he_keras.cpu.operations import subsample
        >>> subsample(tf.reshape(tf.range(16.0), [1, 4, 4, 1]), 2).numpy().ravel()
        array([ 0.,  2.,  8., 10.], dtype=float32)
    """
    height, width, channels = images.shape[1:]

    def forward(images):
        return tf.nn.avg_pool2d(images, 1, stride, "VALID")

    def gradient(upstream):
        rows = tf.reshape(upstream, [-1, 1, width // stride, channels])
        gaps = [[0, 0], [0, stride - 1], [0, 0], [0, (stride - 1) * channels]]
        return tf.reshape(tf.pad(rows, gaps), [-1, height, width, channels])

    if any(size is None or size % stride for size in (height, width)):
        return forward(images)
    return with_gradient(forward, gradient, images)


def with_gradient(function, gradient, images):
    """Returns `function(images)`, whose gradient is the linear function `gradient(upstream)`."""

    @tf.custom_gradient
    def run(images):
        return function(images), gradient

    return run(images)
