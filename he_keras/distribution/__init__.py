"""More devices: strategies by name, worker processes, and what Keras needs repaired for them.

* `strategies`: `strategy("mirrored")` and the like;
* `workers`: which process writes files, and what all of them agree on;
* `replicas`: what one training step has to know about the other replicas;
* `keras_repairs`: every work-around for Keras, each named with the test that tells when Keras no
  longer needs it.

A model trains on the strategy in whose scope it was made:

    with he_keras.distribution.strategy("mirrored").scope():
        model = he_keras.HEAdversarialModel(...)
        model.compile(...)
    model.fit(...)

The batch size is that of all replicas together, and so are loss, gradient and metrics. So the
learning rate does not depend on the number of replicas.
"""

from he_keras.distribution.strategies import (
    STRATEGIES,
    describe,
    needs_static_shapes,
    split_cpu,
    strategy,
)
from he_keras.distribution.workers import WorkerLostError, is_chief

__all__ = [
    "STRATEGIES",
    "WorkerLostError",
    "describe",
    "is_chief",
    "needs_static_shapes",
    "split_cpu",
    "strategy",
]
