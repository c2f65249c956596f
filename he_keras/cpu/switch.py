"""The switch of all CPU tuning, one for each trick, and the question where a computation runs."""

import contextlib
import os
from collections.abc import Iterator

import tensorflow as tf

#: Each trick with what it does. `python tools/benchmark.py tricks` measures what each one earns.
TRICKS = {
    "matrix_products": "convolutions of small maps are products of matrices",
    "folded_norms": "batch norms go into the convolution before them, in inference mode",
    "passed_scales": "the convolutions after a norm multiply the gradient by its scale",
    "bfloat16_relu": "the gradient of ReLU reads bfloat16 numbers as float16",
    "subsampling": "a strided 1x1 convolution drops pixels first",
    "variables_once": "an attack reads the variables once for all of its steps",
    "half_batches": "two halves of a batch run at the same time",
}
_VARIABLE = "HE_KERAS_CPU_TUNING"


def _from_environment() -> frozenset[str]:
    value = os.environ.get(_VARIABLE, "1")
    if value not in ("0", "1"):
        raise ValueError(f"Invalid {_VARIABLE}; expected 0 or 1; received {value!r}")
    return frozenset(TRICKS if value == "1" else ())


_enabled = _from_environment()


def set_enabled(enabled: bool) -> None:
    """Turns all CPU tuning on or off, for what is compiled from now on.

    Example:
        >>> import he_keras as he
        >>> he.cpu.set_enabled(False)
        >>> he.cpu.is_enabled()
        False
        >>> he.cpu.set_enabled(True)
    """
    global _enabled
    _enabled = frozenset(TRICKS if enabled else ())


def is_enabled() -> bool:
    """Whether any CPU tuning is on."""
    return bool(_enabled)


def in_use() -> frozenset[str]:
    """Returns the names of the tricks that are on: what else a compiled function depends on."""
    return _enabled


@contextlib.contextmanager
def disabled(*tricks: str) -> Iterator[None]:
    """Turns tricks off inside a `with` block.

    Args:
        *tricks: names in `TRICKS`; none means all of them.

    Example:
        >>> import he_keras as he
        >>> with he.cpu.disabled("half_batches"):
        ...     he.cpu.is_enabled()
        True
    """
    global _enabled
    unknown = sorted(set(tricks) - set(TRICKS))
    if unknown:
        raise ValueError(f"Unknown trick; expected some of {sorted(TRICKS)}; received {unknown}")
    before = _enabled
    _enabled = before - set(tricks or TRICKS)
    try:
        yield
    finally:
        _enabled = before


def applies(trick: str) -> bool:
    """Whether a trick is on, and an operation made here and now runs on a CPU."""
    return trick in _enabled and runs_on_cpu()


def runs_on_cpu() -> bool:
    """Whether an operation that is made here and now runs on a CPU.

    A device scope decides, such as that of a replica. Without one, TensorFlow takes a GPU or a TPU
    if there is one.

    Example:
        >>> import tensorflow as tf
        >>> from he_keras.cpu.switch import runs_on_cpu
        >>> with tf.device("CPU:0"):
        ...     runs_on_cpu()
        True
    """
    # Eagerly a tensor has its device, in a graph only where a scope says so.
    device = tf.DeviceSpec.from_string(tf.zeros([]).device).device_type
    if device is not None:
        return device == "CPU"
    return not any(tf.config.list_logical_devices(kind) for kind in ("GPU", "TPU"))
