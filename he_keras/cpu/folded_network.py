"""The inference mode of a functional network with fewer and cheaper operations.

In inference mode a batch norm is a scale and a shift for each channel. After a convolution, both go
into it: the kernel is multiplied by the scale, and the shift becomes its bias. Values and gradients
are those of the network, up to rounding. What follows from the variables alone, such as these
products, can be computed once for many passes: an attack's variables stand still.

Then the kernel of a convolution also carries the scale of the batch norm before it, in the gradient
of the images only. For norm, ReLU and convolution, with the kernel k, the norm's scale s and ReLU's
mask m, a pass back is s * (m * (k' g)). That is also m * ((s k)' g), which is one pass over the
images less.

What is folded follows from the layers as they are when a `FoldedNetwork` is made. One is made for
each trace, and none is kept. Networks with layers of other classes than Keras's and ours are not
supported.
"""

import collections
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from he_keras.cpu.operations import (
    column_convolution,
    has_product_values,
    is_plain,
    is_strided_1x1,
    product_convolution,
    relu,
    subsample,
    transposed_kernel,
    with_gradient,
)
from he_keras.cpu.switch import applies
from he_keras.layers.batch_norm import (
    FUSED_DTYPES,
    BatchNormalization,
    inference_scale_and_shift,
    scale_and_shift,
)
from he_keras.layers.call_context import full_precision

_NORMS = (BatchNormalization, keras.layers.BatchNormalization)
#: Linear layers that treat each channel by itself and all channels alike. Networks that earlier
#: versions saved have such a pooling before strided 1x1 convolutions.
_CHANNELWISE = (keras.layers.ZeroPadding2D, keras.layers.AveragePooling2D)
#: Methods that count as another layer where an instance has one of its own.
_REPLACEABLE = ("call", "convolution_op")


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
            return self._forward(images)
        return with_gradient(self._forward, lambda upstream: upstream, images)

    def _forward(self, images):
        return scale_and_shift(images, self.scale, self.shift)


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


class FoldedNetwork:
    """Runs a functional `keras.Model` in inference mode.

    The variables stay the model's own: a pass without `weights` sees their present values.

    Args:
        network: a functional model with one input and one output, see `is_supported`.

    Example:
        >>> import he_keras as he, numpy as np
        >>> from he_keras.cpu.folded_network import FoldedNetwork
        >>> network = he.networks.PreActResNet((8, 8, 1), (4, 8), (1, 1))
        >>> images = np.ones((1, 8, 8, 1), "float32")
        >>> fast = FoldedNetwork(network)(images)
        >>> bool(np.allclose(fast, network(images, training=False), atol=1e-5))
        True
    """

    def __init__(self, network: keras.Model) -> None:
        self._network = network
        nodes = [node for depth in network._nodes_by_depth.values() for node in depth]
        nodes = [node for node in nodes if not node.is_input]
        # The layers that this class computes itself.
        self._convolutions = {
            id(node.operation): node.operation for node in nodes if _is_plain_convolution(node)
        }
        self._norms = {id(node.operation): node.operation for node in nodes if _is_plain_norm(node)}
        readers = _readers(nodes, network.outputs)
        uses = collections.Counter(id(node.operation) for node in nodes)
        self._folded = self._folded_norms(nodes, readers, uses)
        self._passed = self._passed_norms(nodes, readers, uses)
        self._products = {id(node.operation) for node in nodes if self._is_product(node)}

    @staticmethod
    def is_supported(network) -> bool:
        """Whether this is a functional model with one input and one output, of known layers only.

        Another class may do anything in its `call`, and so may a `Lambda`.
        """
        if not all(hasattr(network, name) for name in ("_run_through_graph", "_nodes_by_depth")):
            return False
        if not len(network.inputs) == len(network.outputs) == 1:
            return False
        return all(map(_is_known, [*network._flatten_layers(), *network.operations]))

    def _folded_norms(self, nodes, readers, uses) -> dict[int, Any]:
        """Returns the norm of each convolution that one batch norm reads, and nothing else."""
        folded: dict[int, Any] = {}
        if not applies("folded_norms"):
            return folded
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
        """Returns the norm of each convolution that comes after a batch norm and ReLU.

        Only convolutions may read the ReLU. Paddings and poolings that treat each channel by itself
        may come in between.
        """
        folded = {id(norm) for norm in self._folded.values()}
        outputs = {id(node.operation): node.outputs[0] for node in nodes}
        passed: dict[int, Any] = {}
        if not applies("passed_scales"):
            return passed
        for key, norm in self._norms.items():
            activations = readers[id(outputs[key])]
            if key in folded or len(activations) != 1 or not _is_relu(activations[0]):
                continue
            between, after = _after(activations[0], readers, outputs)
            chain = [norm, activations[0], *between, *after]
            are_convolutions = all(id(each) in self._convolutions for each in after)
            if are_convolutions and all(
                uses[id(each)] == 1 and each.dtype_policy == norm.dtype_policy for each in chain
            ):
                passed |= {id(each): norm for each in after}
        return passed

    def _is_product(self, node) -> bool:
        layer = node.operation
        if id(layer) not in self._convolutions:
            return False
        size = node.input_tensors[0].shape[1:3]
        return has_product_values(size, layer.kernel.shape, layer.strides, layer.padding)

    def weights(self, for_many_passes: bool = True) -> dict[int, Any]:
        """Returns what the layers multiply by and add, from the variables' present values.

        Args:
            for_many_passes: whether it pays to prepare kernels for the gradient of the images. Then
                there is no gradient with respect to the variables.
        """
        # A model in mixed precision would return variables that are already rounded.
        with full_precision():
            return self._weights(for_many_passes)

    def _weights(self, for_many_passes: bool) -> dict[int, Any]:
        norms = {key: FoldedNorm.of(norm) for key, norm in self._norms.items()}
        weights: dict[int, Any] = dict(norms)
        for key, layer in self._convolutions.items():
            after = norms.get(id(self._folded.get(key)))
            before = norms.get(id(self._passed.get(key)))
            weights[key] = FoldedConvolution.of(layer, after)
            if for_many_passes:
                weights[key] = weights[key].prepared(layer, after, before, key in self._products)
        for norm in self._folded.values():
            del weights[id(norm)]
        if not for_many_passes:
            return weights
        for norm in self._passed.values():
            weights[id(norm)] = norms[id(norm)]._replace(is_passed=True)
        return {key: _without_gradient(each) for key, each in weights.items()}

    def __call__(self, images, weights: dict[int, Any] | None = None):
        """Returns the network's output in inference mode.

        Args:
            images: a batch.
            weights: what `weights()` returned in the same graph; None computes it now.
        """
        values = self.weights(for_many_passes=False) if weights is None else weights
        if isinstance(images, keras.KerasTensor):
            return self._network(images, training=False)
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
            return lambda inputs, **_: relu(tf.cast(inputs, operation.compute_dtype))
        if key not in self._norms:
            if not isinstance(operation, keras.layers.Layer):
                return operation
            # Layers that do not take the flag hand it on to those inside them. A layer's own
            # default, such as RandomFlip's True, is among the recorded keywords.
            return lambda *args, **kwargs: operation(*args, **{**kwargs, "training": False})
        if key not in weights:
            return lambda inputs, **_: inputs
        return lambda inputs, **_: weights[key](tf.cast(inputs, operation.compute_dtype))


def _is_known(operation) -> bool:
    """Whether the class is Keras's or ours, and nothing replaces its method `call`."""
    package = type(operation).__module__.partition(".")[0]
    if package not in ("keras", "he_keras") or isinstance(operation, keras.layers.Lambda):
        return False
    is_quantized = getattr(operation, "quantization_mode", None) is not None
    return not is_quantized and vars(operation).keys().isdisjoint(_REPLACEABLE)


def _is_plain_convolution(node) -> bool:
    """Whether all that the layer does is a convolution and perhaps a bias."""
    operation = node.operation
    if type(operation) is not keras.layers.Conv2D or operation.compute_dtype not in FUSED_DTYPES:
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


def _readers(nodes, outputs) -> dict[int, list]:
    """Returns the operations that read each tensor; None stands for the network's output."""
    readers: dict[int, list] = collections.defaultdict(list)
    for node in nodes:
        for tensor in node.input_tensors:
            readers[id(tensor)].append(node.operation)
    for tensor in outputs:
        readers[id(tensor)].append(None)
    return readers


def _after(operation, readers, outputs) -> tuple[list, list]:
    """Returns the paddings and poolings that read an operation's output, and what comes then."""
    between: list = []
    after: list = []
    for reader in readers[id(outputs[id(operation)])]:
        if not (type(reader) in _CHANNELWISE and reader.data_format == "channels_last"):
            after.append(reader)
            continue
        further, last = _after(reader, readers, outputs)
        between += [reader, *further]
        after += last
    return between, after


def _without_gradient(prepared):
    """Returns the same tensors without a gradient to the variables that they come from."""
    return prepared._replace(
        **{
            name: tf.stop_gradient(value)
            for name, value in prepared._asdict().items()
            if tf.is_tensor(value)
        }
    )
