"""ReLU and subsampling with TensorFlow's values and a cheaper gradient."""

import tensorflow as tf

from he_keras.cpu.switch import applies


def relu(images):
    """Returns ReLU; in bfloat16 its gradient takes half as long as TensorFlow's.

    Example:
        >>> import tensorflow as tf
        >>> from he_keras.cpu.cheaper_gradients import relu
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
        >>> from he_keras.cpu.cheaper_gradients import subsample
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
