"""The precision that a model computes in, and by how much rounding alone may change its logits."""

import keras
import numpy as np
import tensorflow as tf

#: Distance of neighbouring numbers, relative to them; from the coarsest precision to the finest.
UNITS = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-23}
#: The precisions of 16 bits.
HALF_PRECISIONS = ("bfloat16", "float16")
#: AutoAttack's threshold, in float32: a distance between logit vectors of unit length.
LEAST_CHANGE = 1e-4
#: A deep network adds up about so many roundings, each of half a unit.
_ROUNDINGS = 8.0
#: No precision explains a larger change between two passes.
LARGEST_CHANGE = _ROUNDINGS * UNITS["bfloat16"] / 2.0
#: Units by which two ways through a network may differ, and the least share of the spread.
_UNITS_OF_SPREAD = 8
_LEAST_SHARE = 1e-3


def at_least_float32(tensor):
    """Returns a half-precision tensor in float32, and any other as it is.

    Eight bits of mantissa would make equal the losses that an attack compares.
    """
    return keras.ops.cast(tensor, keras.backend.result_type(tensor.dtype, "float32"))


def coarsest_precision(model, logits_of=None, image_shape=None) -> str:
    """Returns the coarsest precision that a model computes in: a key of `UNITS`.

    A TPU multiplies in bfloat16. TensorFloat-32 counts as float16, whose mantissa it has.

    Args:
        model: a Keras layer, or any callable.
        logits_of: function from images to logits; it is traced if `model` is no layer. Without it,
            such a model is taken to compute in float32.
        image_shape: shape of one image, for the trace.

    Example:
        >>> import keras
        >>> coarsest_precision(keras.layers.Dense(2, dtype="mixed_bfloat16"))
        'bfloat16'
    """
    found: set[str] = set()
    if isinstance(model, keras.layers.Layer):
        found = {str(getattr(layer, "compute_dtype", "")) for layer in model._flatten_layers()}
    elif logits_of is not None:
        found = _types_in_graph(logits_of, image_shape)
    if tf.config.list_logical_devices("TPU"):
        found.add("bfloat16")
    if tf.config.list_logical_devices("GPU"):
        if tf.config.experimental.tensor_float_32_execution_enabled():
            found.add("float16")
    return next((name for name in HALF_PRECISIONS if name in found), "float32")


def change_by_rounding(victim, images) -> float:
    """Returns the change between two passes, relative to the logits, that rounding can explain.

    The order in which a graphics card, or another size of the batch, adds numbers up is not fixed.
    In float32 that moves the seventh digit, but in bfloat16 and TensorFloat-32 the third.

    Args:
        victim: a `Victim`.
        images: a batch, to trace models that are hidden in a function.

    Example:
        >>> from he_keras.attacks import Victim
        >>> images = tf.zeros([1, 4])
        >>> half = lambda images: tf.cast(tf.cast(images, tf.bfloat16) * 3, tf.float32)
        >>> [change_by_rounding(Victim(each), images) for each in (lambda images: images, half)]
        [0.0001, 0.03125]
    """
    name = coarsest_precision(victim.model, victim.logits, images.shape[1:])
    return LEAST_CHANGE if name == "float32" else _ROUNDINGS * UNITS[name] / 2.0


def difference_by_rounding(logits: np.ndarray, model) -> float:
    """Returns by how much two ways through a network may differ in these logits.

    That is up to 8 units of the spread of the logits and of the largest one, and at least a
    thousandth of the spread. In shares of the spread it is 0.001, 0.008 and 0.06 for float32,
    float16 and bfloat16. Deep networks were seen to reach 1e-6, 0.0015 and 0.012.
    """
    known = logits[np.isfinite(logits).all(axis=-1)]
    if not known.size:
        return 0.0
    spread = float((known.max(axis=-1) - known.min(axis=-1)).max())
    units = _UNITS_OF_SPREAD * UNITS[coarsest_precision(model)]
    return max(_LEAST_SHARE, units) * spread + units * float(np.abs(known).max())


def largest_difference(found: np.ndarray, logits: np.ndarray) -> float:
    """Returns the largest difference of two answers; infinity where only one of them is finite.

    Example:
        >>> largest_difference(np.array([1.0, np.inf]), np.array([3.0, np.inf]))
        2.0
    """
    if found.shape != logits.shape:
        return np.inf
    finite = np.isfinite(logits)
    if not np.array_equal(np.isfinite(found), finite):
        return np.inf
    return float(np.abs(found[finite].astype(np.float64) - logits[finite]).max(initial=0.0))


def _types_in_graph(logits_of, image_shape) -> set[str]:
    """Names of the types of all numbers in the graph of a function."""
    try:
        graph = tf.function(logits_of, autograph=False).get_concrete_function(
            tf.TensorSpec([None, *image_shape], tf.float32)
        )
        content = graph.graph.as_graph_def()
    except Exception:  # noqa: BLE001
        # Code of any kind, which may not run in a graph: then float32 is taken.
        return set()
    nodes = [*content.node, *(node for each in content.library.function for node in each.node_def)]
    kinds = {value.type for node in nodes for value in node.attr.values() if value.type}
    return {tf.as_dtype(kind).name for kind in kinds}
