"""The part of the training state that differs between replicas: running metrics, perturbations.

A checkpoint is one file, written by the first process. What the other processes hold comes to it
through the strategy.
"""

import io

import numpy as np

from he_keras.distribution import workers
from he_keras.files import write_arrays

_METRIC = "metric/"


def objective_prefix(strategy, worker: int | None = None) -> str:
    """Where a checkpoint has the objective's state of a process, by default of this one."""
    worker = workers.number(strategy) if worker is None else worker
    # The first process's part keeps the name that it has when it is the only one.
    return f"objective-{worker}" if worker else "objective"


def gathered(model) -> dict[str, np.ndarray]:
    """Returns what differs between the replicas of all processes, as a checkpoint stores it.

    Metrics have an axis of replicas in front, unless there is one replica only.
    """
    strategy = model.distribute_strategy
    packed = io.BytesIO()
    write_arrays(packed, _of_this_process(model))
    arrays: dict[str, np.ndarray] = {}
    metrics: dict[str, list[np.ndarray]] = {}
    for worker, content in enumerate(workers.exchange(strategy, packed.getvalue())):
        with np.load(io.BytesIO(content), allow_pickle=False) as archive:
            for name in archive.files:
                if name.startswith(_METRIC):
                    metrics.setdefault(name, []).append(archive[name])
                else:
                    arrays[f"{objective_prefix(strategy, worker)}/{name}"] = archive[name]
    rows = {name: np.concatenate(each) for name, each in metrics.items()}
    is_single = strategy.num_replicas_in_sync == 1
    return arrays | {name: each[0] if is_single else each for name, each in rows.items()}


def _of_this_process(model) -> dict[str, np.ndarray]:
    strategy = model.distribute_strategy
    with strategy.scope():
        mine = dict(model.objective.state_arrays())
    for position, variable in enumerate(_metric_variables(model)):
        copies = strategy.experimental_local_results(variable.value)
        mine[f"{_METRIC}{position}"] = np.stack([copy.numpy() for copy in copies])
    return mine


def assign_metrics(model, stored: list[np.ndarray]) -> bool:
    """Puts each replica's running metrics back; returns False if they are another model's.

    Those of another number of replicas go to the first one, summed up.
    """
    variables = _metric_variables(model)
    if len(stored) != len(variables):
        return False
    strategy = model.distribute_strategy
    replicas, local = strategy.num_replicas_in_sync, workers.local_replicas(strategy)
    first = workers.number(strategy) * local
    for variable, value in zip(variables, stored, strict=True):
        rows = value.reshape(-1, *variable.shape)
        if len(rows) != replicas:
            together = rows.sum(axis=0)
            rows = np.zeros((replicas, *variable.shape), value.dtype)
            rows[0] = together
        copies = strategy.experimental_local_results(variable.value)
        for copy, row in zip(copies, rows[first : first + local], strict=True):
            copy.assign(row)
    return True


def _metric_variables(model) -> list:
    return [variable for metric in model.metrics for variable in metric.variables]
