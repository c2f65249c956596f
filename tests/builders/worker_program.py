"""What the workers of test_multi_worker.py run: `worker_program.py WHAT FOLDER`."""

import os
import pathlib
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import replicated_training
import resuming
import tensorflow as tf

from he_keras import distribution
from he_keras.distribution import keras_repairs, workers

# Before anything computes; the tests themselves import this file for `trained`.
strategy = distribution.strategy("multi_worker" if __name__ == "__main__" else "none")

#: Objective, batch norm, examples, and arguments of `compile`.
RUNS = {
    "pgd_at": ("pgd_at", "synchronized", 21, {"metrics": ["sparse_categorical_crossentropy"]}),
    "alp": ("alp", "synchronized", 21, {}),
    "trades": ("trades", "synchronized", 17, {}),
    # Its perturbations belong to a replica: only full batches give them the same rows.
    "free_at": ("free_at", "synchronized", 16, {}),
    "fast_at": ("fast_at", "synchronized", 21, {}),
}


def trained(name, strategy=None, **options):
    """Trains one of the runs; returns every number that it leaves behind."""
    objective, batch_norm, count, settings = RUNS[name]
    settings = {**settings, **options}
    model = replicated_training.build_model(objective, strategy, batch_norm, **settings)
    validation = tf.data.Dataset.from_tensor_slices(replicated_training.examples(11)).batch(5)
    history, steps = replicated_training.train(model, count, epochs=2, validation_data=validation)
    numbers = {f"weight {i}": each for i, each in enumerate(model.get_weights())}
    numbers |= {f"epochs: {key}": np.array(values) for key, values in history.items()}
    numbers |= {f"steps: {key}": np.array([each[key] for each in steps]) for key in steps[0]}
    return numbers


def equal(folder):
    for name in RUNS:
        np.savez(folder / f"{name}-{workers.number(strategy)}.npz", **trained(name, strategy))


def agree(folder):
    """Everything in `workers`, with contents that differ between them."""
    me = workers.number(strategy)
    print(workers.count(strategy), me, workers.local_replicas(strategy), workers.is_chief(strategy))
    print(workers.any_of(strategy, [me == 1, False]), workers.total(strategy, [me + 1, 5]).tolist())
    print(workers.exchange(strategy, [b"a", b"bcdefg"][me]), workers.exchange(strategy, b""))
    for work in (lambda: (folder / f"by-{me}").touch(), lambda: int("x")):
        try:
            workers.on_chief(strategy, work)
        except ValueError as error:
            print(error)
    workers.check_same(strategy, b"same", "nothing", "the same")
    try:
        workers.check_same(strategy, str(me).encode(), "their numbers", "one")
    except ValueError as error:
        print(error)
    # Batch norm that is not synchronised: the moving averages of all workers are those of all.
    model = replicated_training.build_model("standard", strategy, "plain")
    replicated_training.train(model, 16)
    print([round(float(each), 6) for each in model.network.layers[-1].moving_mean.value])


def resumed(folder):
    """FreeAT's perturbations differ between the workers; all come from one checkpoint."""
    resuming.assert_resumes(
        lambda: replicated_training.build_model("free_at", strategy, "synchronized"), folder
    )
    print("resumes")


def plain(folder):
    """A stock model, without repairs and then with the first of the two."""
    del folder

    class FirstBatchRepaired(keras_repairs.Repaired):
        pass

    values = np.ones((4, 1), np.float32)
    for base in (keras.Model, FirstBatchRepaired):
        with strategy.scope():
            inputs = keras.Input((1,))
            model = base(inputs=inputs, outputs=keras.layers.Dense(1)(inputs))
            model.compile(optimizer="sgd", loss="mse")
        try:
            model.fit(tf.data.Dataset.from_tensor_slices((values, values)).batch(4), verbose=0)
            print("fits")
        except Exception as error:
            print(type(error).__name__, " ".join(str(error).split())[:300])


if __name__ == "__main__":
    {"equal": equal, "agree": agree, "resumed": resumed, "plain": plain}[sys.argv[1]](
        pathlib.Path(sys.argv[2])
    )
    workers.leave_together(strategy)
