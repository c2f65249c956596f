"""Schedules of the learning rate, of the momentum and of the adversary's radius, by training step.

All are serialisable Keras `LearningRateSchedule` objects: `optimizers.SGD(learning_rate=schedule)`,
`objectives.PGDAT(threat, epsilon_schedule=schedule)`. Configurations name a schedule and count in
epochs; `get` translates:

    >>> import he_keras as he
    >>> rate = he.schedules.get("step", 77000, 1000, initial=0.1, drop_epochs=(75, 90))
    >>> [round(float(rate(step)), 6) for step in (0, 74999, 75000)]
    [0.1, 0.1, 0.01]

To add one, add a class or a function to `by_step`, `by_epoch` or `cycles`, and its name to
`registry`.
"""

from he_keras.schedules.by_epoch import (
    CosineJump,
    EpochSchedule,
    Exponential,
    Jump,
    Linear,
    warm_up,
)
from he_keras.schedules.by_step import (
    PiecewiseLinear,
    cosine,
    cyclic_momentum,
    piecewise_constant,
    step_decay,
    triangular,
)
from he_keras.schedules.cycles import (
    CycleCosine,
    CycleExponential,
    CycleJump,
    CycleLinear,
    CycleSchedule,
)
from he_keras.schedules.registry import (
    SCHEDULES,
    Restarts,
    constant,
    get,
    parameters_of,
    restarts,
    scaled,
    with_checkpoints,
)

__all__ = [
    "CosineJump",
    "CycleCosine",
    "CycleExponential",
    "CycleJump",
    "CycleLinear",
    "CycleSchedule",
    "EpochSchedule",
    "Exponential",
    "Jump",
    "Linear",
    "PiecewiseLinear",
    "Restarts",
    "SCHEDULES",
    "constant",
    "cosine",
    "cyclic_momentum",
    "get",
    "parameters_of",
    "piecewise_constant",
    "restarts",
    "scaled",
    "step_decay",
    "triangular",
    "warm_up",
    "with_checkpoints",
]
