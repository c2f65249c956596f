"""The functions that run a network faster, in inference mode and in training mode."""

import contextlib
import functools
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf

from he_keras.cpu.classifier_passes import is_trusted
from he_keras.cpu.folded_network import FoldedNetwork
from he_keras.cpu.operations import (
    column_convolution,
    has_product_gradient,
    is_plain,
    is_strided_1x1,
    subsample,
)
from he_keras.cpu.switch import applies, is_enabled, runs_on_cpu


def inference_function(network, variables_stand_still: bool = False) -> Callable:
    """Returns a function from images to what a network computes in inference mode.

    Args:
        network: any Keras model or layer. Only functional models of Keras's layers and ours run
            differently from Keras.
        variables_stand_still: whether the variables keep their values while the function is in
            use. Then they are read once, now, and have no gradient.

    Example:
        >>> import he_keras as he, numpy as np
        >>> network = he.networks.PreActResNet((8, 8, 1), (4, 8), (1, 1))
        >>> images = np.ones((1, 8, 8, 1), "float32")
        >>> features = he.cpu.inference_function(network)(images)
        >>> bool(np.allclose(features, network(images, training=False), atol=1e-5))
        True
    """
    if not _may_differ(network) or not FoldedNetwork.is_supported(network):
        return functools.partial(network, training=False)
    folded = FoldedNetwork(network)
    if not variables_stand_still:
        return folded
    if applies("variables_once"):
        return functools.partial(folded, weights=folded.weights())
    return lambda images: folded(images, folded.weights())


def training_function(network) -> Callable:
    """Returns a function from images to what a network computes in training mode.

    Keras runs the network. For this pass only, its convolutions compute in another way.

    Args:
        network: any Keras model or layer.
    """
    run = functools.partial(network, training=True)
    if not _may_differ(network):
        return run

    def run_with_own_convolutions(images):
        with _own_convolutions(network):
            return run(images)

    return run_with_own_convolutions


def _may_differ(network) -> bool:
    return is_enabled() and runs_on_cpu() and is_trusted(network)


@contextlib.contextmanager
def _own_convolutions(network) -> Iterator[None]:
    """Gives the plain convolutions inside a network another `convolution_op` for a while.

    Keras means this method to be replaced. It is set past Keras's own bookkeeping, which would
    otherwise look for variables in it.
    """
    attribute = "convolution_op"
    layers = [
        layer
        for layer in network._flatten_layers()
        if type(layer) is keras.layers.Conv2D and is_plain(layer) and attribute not in vars(layer)
    ]
    for layer in layers:
        vars(layer)[attribute] = functools.partial(_convolution, layer)
    try:
        yield
    finally:
        for layer in layers:
            # Another replica's thread may have taken it away already.
            vars(layer).pop(attribute, None)


def _convolution(layer: keras.layers.Conv2D, images, kernel):
    """What the layer's own `convolution_op` returns."""
    kernel = tf.convert_to_tensor(kernel)
    if images.dtype == kernel.dtype:
        if is_strided_1x1(layer) and applies("subsampling"):
            return tf.nn.conv2d(subsample(images, layer.strides[0]), kernel, 1, "VALID")
        if has_product_gradient(images.shape[1:3], kernel, layer.strides, layer.padding):
            return column_convolution(images, kernel, layer.strides[0], layer.padding)
    return type(layer).convolution_op(layer, images, kernel)
