"""Everything that exists only to be faster on a CPU, with one switch.

Layers, networks and attacks are written as if this folder did not exist. They ask it for a faster
function with the same values:

* `inference_function(network)` runs a network in inference mode,
* `training_function(network)` runs it in training mode,
* `batch_function(function, model)` runs a function of a batch.

Attacks ask for all functions of a classifier at once (`faster_passes`), and have them compared with
Keras's own on a few images (`compare`, `plainly`, `warnings_about`).

Each returns the plain function where it cannot help. It cannot if the computation does not run on a
CPU, if layers of the network are not known here, or if the switch is off. Values and gradients are
the plain ones, up to rounding. Nothing of this is part of a model: files of models hold Keras's
layers only.

The switch is the environment variable `HE_KERAS_CPU_TUNING=0`, or `set_enabled(False)`. Functions
that were compiled before keep what they were compiled with, so switch before `compile`.

Example:
    >>> import he_keras as he
    >>> with he.cpu.disabled():
    ...     he.cpu.is_enabled()
    False
"""

from he_keras.cpu.comparison import compare, plainly, warnings_about
from he_keras.cpu.functions import (
    ClassifierPasses,
    batch_function,
    faster_passes,
    inference_function,
    training_function,
)
from he_keras.cpu.switch import TRICKS, disabled, in_use, is_enabled, set_enabled

__all__ = [
    "TRICKS",
    "ClassifierPasses",
    "batch_function",
    "compare",
    "disabled",
    "faster_passes",
    "in_use",
    "inference_function",
    "is_enabled",
    "plainly",
    "set_enabled",
    "training_function",
    "warnings_about",
]
