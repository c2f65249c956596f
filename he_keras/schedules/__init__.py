"""Schedules of the learning rate, of the momentum and of the adversary's radius, by training step.

All are serialisable Keras `LearningRateSchedule` objects: `optimizers.SGD(learning_rate=schedule)`,
`objectives.PGDAT(threat, epsilon_schedule=schedule)`. Configurations name a schedule and count in
epochs; `get` translates:

    >>> import he_keras as he
    >>> rate = he.schedules.get("step", 77000, 1000, initial=0.1, drop_epochs=(75, 90))
    >>> [round(float(rate(step)), 6) for step in (0, 74999, 75000)]
    [0.1, 0.1, 0.01]

To add one, add a class or a function to `by_step` or `by_epoch`, and its name to `registry`.
"""

from he_keras.schedules.by_epoch import (
    CycleCosine,
    CycleJump,
    CycleLinear,
    CycleSchedule,
    EpochSchedule,
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
from he_keras.schedules.registry import (
    SCHEDULES,
    constant,
    get,
    parameters_of,
    register,
    scaled,
    with_checkpoints,
)

__all__ = [
    "CycleCosine",
    "CycleJump",
    "CycleLinear",
    "CycleSchedule",
    "EpochSchedule",
    "Linear",
    "PiecewiseLinear",
    "SCHEDULES",
    "constant",
    "cosine",
    "cyclic_momentum",
    "get",
    "parameters_of",
    "piecewise_constant",
    "register",
    "scaled",
    "step_decay",
    "triangular",
    "warm_up",
    "with_checkpoints",
]
