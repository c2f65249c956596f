"""What layers add to the loss while they run: activity regularisers and `add_loss`.

Keras forgets what a pass has added as soon as the next one begins, and an objective may make
several. So the losses are noted at the end of each pass in training mode, and all of them count.
"""

import contextlib
import threading
from collections.abc import Iterator

from he_keras.distribution import replicas


# Replicas of one process run in threads.
class _Collectors(threading.local):
    def __init__(self) -> None:
        self.open: list[list] = []


_collectors = _Collectors()


@contextlib.contextmanager
def collected() -> Iterator[list]:
    """Yields a list to which the passes inside add; passes of a nested block add to its own list.

    Example:
        >>> import keras
        >>> from he_keras.objectives import added_losses
        >>> dense = keras.layers.Dense(1, kernel_initializer="ones", activity_regularizer="l1")
        >>> with added_losses.collected() as found:
        ...     for _ in range(2):
        ...         output = dense(keras.ops.ones((1, 3)))
        ...         added_losses.note(dense)
        >>> [round(float(each), 4) for each in found]
        [0.03, 0.03]
    """
    found: list = []
    _collectors.open.append(found)
    try:
        yield found
    finally:
        _collectors.open.pop()


def note(*layers) -> None:
    """Notes what layers and their inner layers added in the pass that has just ended."""
    if not _collectors.open:
        return
    # `layer.losses` would include those of the weights, and fails inside `VariableOverrides`.
    inner = [each for layer in layers for each in layer._flatten_layers()]
    added = [loss for each in inner for loss in each._get_own_losses()]
    if added and replicas.count() > 1:
        raise ValueError(
            "What a layer adds to the loss may be a sum over its examples or a mean, and replicas "
            "share the examples; expected no activity regulariser and no add_loss on more than one "
            f"replica; received {len(added)} added losses"
        )
    _collectors.open[-1].extend(added)
