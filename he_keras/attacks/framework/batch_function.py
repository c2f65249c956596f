"""Functions of a batch that are compiled once for every batch size."""

from collections.abc import Callable

import tensorflow as tf

from he_keras import refusals
from he_keras.arguments import is_traced, reason_of


class BatchFunction:
    """Takes and returns NumPy arrays with one row per example, or nests of them.

    It is traced once for each shape and dtype of an example. An error of the traced code becomes
    one sentence.

    Args:
        function: a function of tensors.
        attack: name of the attack, for errors.
        in_graph: False runs the function operation by operation.
        autograph: whether a Python `if` or `while` in the function can be on tensors.

    Example:
        >>> import numpy as np
        >>> from he_keras.attacks.framework.batch_function import BatchFunction
        >>> double = BatchFunction(lambda images: 2.0 * images, "mine")
        >>> double(np.ones((3, 2), "float32")).shape
        (3, 2)
    """

    def __init__(
        self, function: Callable, attack: str, in_graph: bool = True, autograph: bool = False
    ) -> None:
        self._attack = attack
        self._run = function
        if in_graph:
            self._traced = tf.function(function, autograph=autograph)
            self._run = self._compiled

    def __call__(self, *arguments):
        """Runs the function on one batch."""
        try:
            results = self._run(*tf.nest.map_structure(tf.constant, arguments))
        except tf.errors.InvalidArgumentError as error:
            sentence = refusals.sentence_of(error)
            if not sentence:
                raise
            raise ValueError(sentence) from None
        return tf.nest.map_structure(_as_array, results)

    def _compiled(self, *arguments):
        # Tensors of unknown batch size keep one trace for every size.
        signature = tf.nest.map_structure(
            lambda each: tf.TensorSpec([None, *each.shape[1:]], each.dtype), arguments
        )
        try:
            function = self._traced.get_concrete_function(*signature)
        except Exception as error:
            if not is_traced(error):
                raise
            kind, _, sentence = reason_of(error).partition(": ")
            if "; expected" in sentence:
                raise (TypeError if kind == "TypeError" else ValueError)(sentence) from error
            raise ValueError(
                f"The attack {self._attack!r} does not run; expected TensorFlow operations that "
                f"take any batch size; received {kind}: {sentence}"
            ) from error
        return function(*arguments)


def _as_array(result):
    return result.numpy() if tf.is_tensor(result) else result
