"""What the convolutions of a network alone cost, and how fast this machine multiplies matrices.

No framework that calls the same kernels can be faster than the sum of its convolutions: the bound
that a training step is measured against.
"""

import math
import time
from typing import NamedTuple

import numpy as np

#: Rows of a square matrix that keeps all units busy, and how often it is multiplied.
_PRODUCT_SIZE, _PRODUCT_ROUNDS = 2048, 5


class Convolution(NamedTuple):
    """Shape of a convolution: input and kernel as TensorFlow writes them."""

    image: tuple[int, int, int]
    kernel: tuple[int, int, int, int]
    stride: int
    padding: str

    @property
    def multiply_accumulates(self) -> int:
        """Multiplications and additions, as pairs, of the forward pass of one image."""
        height, width, _ = self.image
        if self.padding == "VALID":
            height, width = height - self.kernel[0] + 1, width - self.kernel[1] + 1
        positions = math.ceil(height / self.stride) * math.ceil(width / self.stride)
        return positions * math.prod(self.kernel)


class PassCounts(NamedTuple):
    """How often a training step runs the convolutions of the whole batch."""

    forward: int
    input_gradient: int
    weight_gradient: int


def convolutions_of(network) -> list[Convolution]:
    """Returns the two-dimensional convolutions of a functional model, in order."""
    import keras

    return [
        Convolution(
            tuple(layer.input.shape[1:]),
            tuple(layer.kernel.shape),
            layer.strides[0],
            layer.padding.upper(),
        )
        for layer in network.layers
        if isinstance(layer, keras.layers.Conv2D)
    ]


def pass_counts(objective: str, num_steps: int, num_replays: int) -> PassCounts:
    """Returns the passes that the mathematics of an objective needs for one batch.

    Example:
        >>> pass_counts("pgd_at", 10, 4)
        PassCounts(forward=11, input_gradient=11, weight_gradient=1)
    """
    if objective == "free_at":
        return PassCounts(num_replays, num_replays, num_replays)
    if objective == "standard":
        return PassCounts(1, 1, 1)
    if objective == "llr":
        # The search, two clean passes, and three that are trained through.
        return PassCounts(num_steps + 3, num_steps + 5, 3)
    if objective == "trades":
        # One clean pass for the adversary, two that are trained through.
        return PassCounts(num_steps + 3, num_steps + 2, 2)
    steps = 1 if objective in ("fast_at", "n_fgsm") else num_steps
    # These train through a clean pass as well.
    trained = 2 if objective in ("alp", "mart") else 1
    return PassCounts(steps + trained, steps + trained, trained)


class ConvolutionTimer:
    """Times only the convolutions of a network, for one batch size and dtype."""

    def __init__(self, network, batch_size: int, dtype: str) -> None:
        self._convolutions = convolutions_of(network)
        self._batch_size = batch_size
        self._dtype = "bfloat16" if dtype == "mixed_bfloat16" else dtype
        self._passes = {kind: self._compiled(kind) for kind in PassCounts._fields}

    @property
    def multiply_accumulates(self) -> int:
        """Multiply-adds of a forward pass of one image."""
        return sum(each.multiply_accumulates for each in self._convolutions)

    def seconds(self, counts: PassCounts) -> float:
        """Times each kind of pass once and returns the sum for a whole step."""
        total = 0.0
        for kind, count in counts._asdict().items():
            began = time.perf_counter()
            self._passes[kind]().numpy()
            total += count * (time.perf_counter() - began)
        return total

    def _compiled(self, kind: str):
        import tensorflow as tf

        arrays = [self._operands(each) for each in self._convolutions]
        operations = list(zip(self._convolutions, arrays, strict=True))
        if kind == "input_gradient":
            operations = operations[::-1]

        @tf.function
        def run():
            # One after the other, as in a network. TensorFlow would leave out what nobody reads.
            read = [tf.zeros([])]
            for convolution, operands in operations:
                with tf.control_dependencies([read[-1]]):
                    result = _operation(kind, convolution, *operands)
                    read.append(tf.cast(tf.reshape(result, [-1])[0], tf.float32))
            return tf.add_n(read)

        run()
        return run

    def _operands(self, convolution: Convolution):
        import tensorflow as tf

        generator = np.random.default_rng(0)
        shape = (self._batch_size, *convolution.image)
        images = tf.cast(generator.normal(size=shape).astype("float32"), self._dtype)
        kernel = tf.cast(generator.normal(size=convolution.kernel).astype("float32"), self._dtype)
        outputs = _operation("forward", convolution, images, kernel, None)
        return images, kernel, outputs


def _operation(kind: str, convolution: Convolution, images, kernel, outputs):
    import tensorflow as tf

    settings = {
        "strides": [1, convolution.stride, convolution.stride, 1],
        "padding": convolution.padding,
    }
    if kind == "forward":
        return tf.nn.conv2d(images, kernel, **settings)
    if kind == "input_gradient":
        return tf.raw_ops.Conv2DBackpropInput(
            input_sizes=tf.shape(images), filter=kernel, out_backprop=outputs, **settings
        )
    return tf.raw_ops.Conv2DBackpropFilter(
        input=images, filter_sizes=tf.shape(kernel), out_backprop=outputs, **settings
    )


def peak_flops(dtype: str) -> float:
    """Returns the floating-point operations per second of a matrix product, the best of five."""
    import tensorflow as tf

    dtype = "bfloat16" if dtype == "mixed_bfloat16" else dtype
    left = tf.cast(tf.random.stateless_normal([_PRODUCT_SIZE, _PRODUCT_SIZE], (0, 0)), dtype)
    multiply = tf.function(lambda: tf.linalg.matmul(left, left)[0, 0])
    return 2.0 * _PRODUCT_SIZE**3 / best_seconds(multiply, _PRODUCT_ROUNDS)


def best_seconds(compiled, rounds: int) -> float:
    """Returns the shortest time of a compiled function that returns one tensor.

    The first call, which traces and warms up, is not timed.
    """
    compiled()
    best = math.inf
    for _ in range(rounds):
        began = time.perf_counter()
        compiled().numpy()
        best = min(best, time.perf_counter() - began)
    return best
