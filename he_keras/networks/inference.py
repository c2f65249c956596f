"""The inference mode of a functional network with fewer and cheaper operations.

In inference mode a batch norm is a scale and a shift for each channel. Behind a convolution both go
into it: the kernel is multiplied by the scale, the shift becomes its bias. Values and gradients are
those of the network, up to rounding. What follows from the variables alone (such products, kernels
cast to half precision) can be computed once for many passes: an attack's variables stand still.
"""

import collections
import inspect
from typing import Any

import keras
import tensorflow as tf

from he_keras.layers.batch_norm import (
    FUSED_DTYPES,
    BatchNormalization,
    inference_scale_and_shift,
    scale_and_shift,
)
from he_keras.layers.convolution import Conv2D, is_plain, is_small, product_convolution, turned

_CONVOLUTIONS = (Conv2D, keras.layers.Conv2D)
_NORMS = (BatchNormalization, keras.layers.BatchNormalization)


class InferenceNetwork:
    """Runs a functional `keras.Model` in inference mode.

    The variables stay the model's own: a pass without `weights` sees their present values.

    Args:
        network: a functional model with one input and one output, see `is_supported`.

    Example:
        >>> import he_keras as he, numpy as np
        >>> from he_keras.networks.inference import InferenceNetwork
        >>> network = he.networks.PreActResNet((8, 8, 1), (4, 8), (1, 1))
        >>> images = np.ones((1, 8, 8, 1), "float32")
        >>> fast = InferenceNetwork(network)(images)
        >>> bool(np.allclose(fast, network(images, training=False), atol=1e-5))
        True
    """

    def __init__(self, network: keras.Model) -> None:
        self._network = network
        nodes = [node for depth in network._nodes_by_depth.values() for node in depth]
        nodes = [node for node in nodes if not node.is_input]
        # Of the layers, those that this class computes itself.
        self._convolutions = {
            id(node.operation): node.operation for node in nodes if _is_plain_convolution(node)
        }
        self._norms = {id(node.operation): node.operation for node in nodes if _is_plain_norm(node)}
        self._folded = self._folded_norms(nodes)
        self._small = {id(node.operation) for node in nodes if self._is_small(node)}
        self._takes_training = {
            id(node.operation)
            for node in nodes
            if "training" in inspect.signature(node.operation.call).parameters
        }

    @staticmethod
    def is_supported(network) -> bool:
        """Whether this is Keras's own functional model, with one input and one output.

        A subclass may do something else in its `call`.
        """
        if not type(network).__module__.startswith("keras."):
            return False
        if not all(hasattr(network, name) for name in ("_run_through_graph", "_nodes_by_depth")):
            return False
        return len(network.inputs) == len(network.outputs) == 1

    def _folded_norms(self, nodes) -> dict[int, Any]:
        """For each convolution that is read by one batch norm and by nothing else, that norm."""
        readers = collections.defaultdict(list)
        for node in nodes:
            for tensor in node.input_tensors:
                readers[id(tensor)].append(node.operation)
        for tensor in self._network.outputs:
            readers[id(tensor)].append(None)
        uses = collections.Counter(id(node.operation) for node in nodes)
        folded = {}
        for node in nodes:
            found = readers[id(node.outputs[0])]
            if id(node.operation) not in self._convolutions or len(found) != 1:
                continue
            norm = found[0]
            once = uses[id(node.operation)] == uses[id(norm)] == 1
            if (
                once
                and id(norm) in self._norms
                and norm.dtype_policy == node.operation.dtype_policy
            ):
                folded[id(node.operation)] = norm
        return folded

    def _is_small(self, node) -> bool:
        layer = node.operation
        if id(layer) not in self._convolutions:
            return False
        width = node.input_tensors[0].shape[2]
        return is_small(width, layer.kernel.shape, layer.strides, layer.padding)

    def weights(self, for_many_passes: bool = True) -> dict[int, Any]:
        """Returns what the layers multiply by and add, from the variables' present values.

        Args:
            for_many_passes: whether it pays to prepare kernels of small maps for their gradients.
        """
        weights: dict[int, Any] = {}
        for key, norm in self._norms.items():
            weights[key] = inference_scale_and_shift(norm)
        for key, convolution in self._convolutions.items():
            norm = self._folded.get(key)
            scale, shift = (None, None) if norm is None else weights.pop(id(norm))
            kernel, bias = _kernel_and_bias(convolution, scale, shift)
            is_turned = for_many_passes and key in self._small
            weights[key] = kernel, bias, turned(kernel) if is_turned else None
        return weights

    def __call__(self, images, weights: dict[int, Any] | None = None):
        """Returns the network's output in inference mode.

        Args:
            images: a batch.
            weights: what `weights()` returned in the same graph; None computes it now.
        """
        values = self.weights(for_many_passes=False) if weights is None else weights
        images = tf.cast(images, self._network.inputs[0].dtype)
        if not images.shape.is_compatible_with(self._network.inputs[0].shape):
            # Keras explains what is wrong with them.
            return self._network(images, training=False)
        outputs = self._network._run_through_graph(
            [images], operation_fn=lambda operation: self._operation(operation, values)
        )
        return keras.tree.flatten(outputs)[0]

    def _operation(self, operation, weights):
        key = id(operation)
        if key in self._convolutions:
            return lambda inputs, **_: _convolved(operation, inputs, *weights[key])
        if key not in self._norms:
            if key not in self._takes_training:
                return operation
            # A layer's own default, such as RandomFlip's True, is among the recorded keywords.
            return lambda *args, **kwargs: operation(*args, **{**kwargs, "training": False})
        if key not in weights:
            return lambda inputs, **_: inputs
        return lambda inputs, **_: scale_and_shift(
            tf.cast(inputs, operation.compute_dtype), *weights[key]
        )


def _is_plain_convolution(node) -> bool:
    """Whether all that the layer does is a convolution and perhaps a bias."""
    operation = node.operation
    if type(operation) not in _CONVOLUTIONS or operation.compute_dtype not in FUSED_DTYPES:
        return False
    return operation.activation is keras.activations.linear and is_plain(operation)


def _is_plain_norm(node) -> bool:
    """Whether the layer normalises the channels of images, in a dtype that the kernels take."""
    operation = node.operation
    if type(operation) not in _NORMS or operation.compute_dtype not in FUSED_DTYPES:
        return False
    is_image = len(node.input_tensors[0].shape) == 4
    return is_image and operation.axis in (-1, 3) and not getattr(operation, "renorm", False)


def _kernel_and_bias(convolution, scale, shift):
    """The kernel and the bias or None, in the layer's dtype, rounded once."""
    kernel = tf.convert_to_tensor(convolution.kernel)
    bias = tf.convert_to_tensor(convolution.bias) if convolution.use_bias else None
    if scale is not None:
        kernel = tf.cast(kernel, tf.float32) * scale
        bias = shift if bias is None else tf.cast(bias, tf.float32) * scale + shift
    dtype = convolution.compute_dtype
    return tf.cast(kernel, dtype), None if bias is None else tf.cast(bias, dtype)


def _convolved(convolution, inputs, kernel, bias, turned_kernel):
    inputs = tf.cast(inputs, kernel.dtype)
    if turned_kernel is not None:
        outputs = product_convolution(inputs, kernel, turned_kernel)
    else:
        padding = convolution.padding.upper()
        outputs = tf.nn.conv2d(inputs, kernel, strides=convolution.strides, padding=padding)
    return outputs if bias is None else tf.nn.bias_add(outputs, bias)
