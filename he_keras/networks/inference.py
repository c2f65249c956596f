"""The inference mode of a functional network with fewer and cheaper operations.

In inference mode a batch norm is a scale and a shift for each channel. Behind a convolution both go
into it: the kernel is multiplied by the scale, the shift becomes its bias. Values and gradients are
those of the network, up to rounding. What follows from the variables alone (such products, kernels
cast to half precision) can be computed once for many passes: an attack's variables stand still.
Then the gradient of the images also gets the scale of a batch norm before ReLU from the kernels of
the convolutions after it, see `inference_layers`.
"""

import collections
import inspect
from typing import Any

import keras
import tensorflow as tf

from he_keras.layers.batch_norm import FUSED_DTYPES, BatchNormalization
from he_keras.layers.convolution import Conv2D, is_plain, is_small
from he_keras.networks.inference_layers import Affine, Kernels, picked, rectified

_CONVOLUTIONS = (Conv2D, keras.layers.Conv2D)
_NORMS = (BatchNormalization, keras.layers.BatchNormalization)
#: Linear layers that treat each channel by itself and all channels alike.
_CHANNELWISE = (keras.layers.ZeroPadding2D, keras.layers.AveragePooling2D)


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
        readers = _readers(nodes, network.outputs)
        uses = collections.Counter(id(node.operation) for node in nodes)
        self._folded = self._folded_norms(nodes, readers, uses)
        self._passed = self._passed_norms(nodes, readers, uses)
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

    def _folded_norms(self, nodes, readers, uses) -> dict[int, Any]:
        """For each convolution that is read by one batch norm and by nothing else, that norm."""
        folded: dict[int, Any] = {}
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

    def _passed_norms(self, nodes, readers, uses) -> dict[int, Any]:
        """For each convolution of norm(x) behind ReLU, with only such convolutions there: norm.

        Paddings and poolings, which leave the channels apart, may come in between.
        """
        folded = {id(norm) for norm in self._folded.values()}
        outputs = {id(node.operation): node.outputs[0] for node in nodes}
        passed: dict[int, Any] = {}
        for key, norm in self._norms.items():
            activations = readers[id(outputs[key])]
            if key in folded or len(activations) != 1 or not _is_relu(activations[0]):
                continue
            between, behind = _behind(activations[0], readers, outputs)
            chain = [norm, activations[0], *between, *behind]
            are_convolutions = all(id(each) in self._convolutions for each in behind)
            if are_convolutions and all(
                uses[id(each)] == 1 and each.dtype_policy == norm.dtype_policy for each in chain
            ):
                passed |= {id(each): norm for each in behind}
        return passed

    def _is_small(self, node) -> bool:
        layer = node.operation
        if id(layer) not in self._convolutions:
            return False
        size = node.input_tensors[0].shape[1:3]
        return is_small(size, layer.kernel.shape, layer.strides, layer.padding)

    def weights(self, for_many_passes: bool = True) -> dict[int, Any]:
        """Returns what the layers multiply by and add, from the variables' present values.

        Args:
            for_many_passes: whether it pays to prepare kernels for the gradient of the images. Then
                there is no gradient with respect to the variables.
        """
        norms = {key: Affine.of(norm) for key, norm in self._norms.items()}
        weights: dict[int, Any] = dict(norms)
        for key, layer in self._convolutions.items():
            after = norms.get(id(self._folded.get(key)))
            before = norms.get(id(self._passed.get(key)))
            weights[key] = Kernels.of(layer, after)
            if for_many_passes:
                weights[key] = weights[key].prepared(layer, after, before, key in self._small)
        for norm in self._folded.values():
            del weights[id(norm)]
        if not for_many_passes:
            return weights
        for norm in self._passed.values():
            weights[id(norm)] = norms[id(norm)]._replace(is_passed=True)
        return {key: _stopped(each) for key, each in weights.items()}

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
            return lambda inputs, **_: weights[key](operation, inputs)
        if _is_relu(operation):
            return lambda inputs, **_: rectified(tf.cast(inputs, operation.compute_dtype))
        if _is_pick(operation):
            return lambda inputs, **_: _pooled(operation, inputs)
        if key not in self._norms:
            if key not in self._takes_training:
                return operation
            # A layer's own default, such as RandomFlip's True, is among the recorded keywords.
            return lambda *args, **kwargs: operation(*args, **{**kwargs, "training": False})
        if key not in weights:
            return lambda inputs, **_: inputs
        return lambda inputs, **_: weights[key](tf.cast(inputs, operation.compute_dtype))


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


def _is_relu(operation) -> bool:
    is_activation = type(operation) is keras.layers.Activation
    return is_activation and operation.activation is keras.activations.relu


def _is_pick(operation) -> bool:
    """Whether this layer only leaves out pixels, alike in both directions."""
    is_pooling = type(operation) is keras.layers.AveragePooling2D
    if not is_pooling or operation.data_format != "channels_last":
        return False
    return operation.pool_size == (1, 1) and len(set(operation.strides)) == 1


def _pooled(layer, images):
    stride = layer.strides[0]
    is_even = not any(size is None or size % stride for size in images.shape[1:3])
    return picked(tf.cast(images, layer.compute_dtype), stride) if is_even else layer(images)


def _readers(nodes, outputs) -> dict[int, list]:
    """For each tensor the operations that read it; None stands for the network's output."""
    readers: dict[int, list] = collections.defaultdict(list)
    for node in nodes:
        for tensor in node.input_tensors:
            readers[id(tensor)].append(node.operation)
    for tensor in outputs:
        readers[id(tensor)].append(None)
    return readers


def _behind(operation, readers, outputs) -> tuple[list, list]:
    """Returns the paddings and poolings that read an operation's output, and what comes then."""
    between: list = []
    behind: list = []
    for reader in readers[id(outputs[id(operation)])]:
        if not (type(reader) in _CHANNELWISE and reader.data_format == "channels_last"):
            behind.append(reader)
            continue
        further, last = _behind(reader, readers, outputs)
        between += [reader, *further]
        behind += last
    return between, behind


def _stopped(prepared):
    """The same, without a gradient with respect to the variables behind it."""
    return prepared._replace(
        **{
            name: tf.stop_gradient(value)
            for name, value in prepared._asdict().items()
            if tf.is_tensor(value)
        }
    )
