"""The functions that run a network or a classifier faster, with the same values.

A network has one for inference mode and one for training mode. An attack hands over the three
functions of a classifier and goes on with those that it gets. One way to make these faster is two
halves of a batch at the same time. TensorFlow runs the operations of one network one after the
other, and only some of them keep every core busy. Cut in two, a batch gives it two independent
networks: one computes while the other waits for memory.

That the faster functions answer as the model does is checked where an attack begins, see
`comparison.py`. A model that failed that check runs plainly from then on, everywhere.
"""

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

import keras
import tensorflow as tf

from he_keras.cpu.comparison import is_trusted
from he_keras.cpu.folded_network import FoldedNetwork
from he_keras.cpu.operations import (
    column_convolution,
    has_product_gradient,
    is_plain,
    is_strided_1x1,
    subsample,
)
from he_keras.cpu.switch import applies, is_enabled, runs_on_cpu

#: A network with fewer weights is so small that it costs more to start its operations twice.
_FEWEST_WEIGHTS = 100_000


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


class ClassifierPasses(NamedTuple):
    """A classifier in inference mode.

    Attributes:
        logits: function from images to logits.
        features: function from images to feature vectors.
        logits_of_features: function from feature vectors to logits.
    """

    logits: Callable
    features: Callable
    logits_of_features: Callable


def faster_passes(passes: ClassifierPasses, model) -> ClassifierPasses:
    """Returns functions with the same values that take less time; `passes` where there are none.

    They are for many passes while the variables stand still: these may be read once, now. They
    belong to the graph in which they are made.

    Args:
        passes: the model's own functions.
        model: a `keras.Model` or any callable. A model with the method `with_fixed_weights` says by
            it which functions read the variables once.

    Example:
        >>> import keras
        >>> from he_keras.cpu.functions import ClassifierPasses, faster_passes
        >>> double = ClassifierPasses(lambda images: 2 * images, None, None)
        >>> faster_passes(double, double.logits) is double
        True
    """
    if not is_enabled() or not isinstance(model, keras.Model) or not is_trusted(model):
        return passes
    fixed = model.with_fixed_weights() if hasattr(model, "with_fixed_weights") else None
    found = passes if fixed is None else fixed
    logits = batch_function(found.logits, model)
    if logits is found.logits:
        return found
    return found._replace(logits=logits, features=batch_function(found.features, model))


def batch_function(function: Callable, model) -> Callable:
    """Returns a function with the same values, by halves of the batch where that is faster.

    Args:
        function: a function of images that treats each one by itself.
        model: the classifier that the function runs, a `keras.Model` or any callable.
    """
    return (lambda images: by_halves(function, images)) if is_worthwhile(model) else function


def is_worthwhile(model) -> bool:
    """Whether this is a Keras model of some size, alone on a CPU with several cores."""
    if not isinstance(model, keras.Model) or not model.built:
        return False
    # Replicas keep the cores busy by themselves.
    is_alone = tf.distribute.get_strategy().num_replicas_in_sync == 1
    if not is_alone or (os.cpu_count() or 1) < 2 or not applies("half_batches"):
        return False
    return sum(math.prod(weight.shape) for weight in model.weights) >= _FEWEST_WEIGHTS


def by_halves(function: Callable, images):
    """Returns `function(images)` by halves, which only a graph gains by.

    Both halves have the same size. If the number of images is odd, the middle one is in both, so
    that no half is ever empty.

    Example:
        >>> import tensorflow as tf
        >>> from he_keras.cpu.functions import by_halves
        >>> double = tf.function(lambda images: by_halves(lambda half: 2 * half, images))
        >>> double(tf.constant([1, 2, 3])).numpy().tolist()
        [2, 4, 6]
    """
    first, second = _halves(images)
    return _joined(function(first), function(second), tf.shape(images)[0])


@tf.custom_gradient
def _halves(images):
    """Returns both halves; their gradients are joined where TensorFlow would add them to zeros."""
    count = tf.shape(images)[0]
    half = (count + 1) // 2

    def gradient(first, second):
        # Nobody reads what comes of the second half's copy of the middle image.
        return _joined(first, second, count)

    return (images[:half], images[count - half :]), gradient


def _joined(first, second, count):
    """Joins two equally long parts, without the second's first row where `count` is odd."""
    return tf.concat([first, second[2 * tf.shape(second)[0] - count :]], axis=0)
