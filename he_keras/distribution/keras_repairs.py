"""What Keras does wrong with several replicas, repaired. Everything of the kind is here.

All of it was seen with Keras 3.12 to 3.15.1, the versions that are tested. Each entry names the
test that fails once Keras does it right (`make test-newest` tells): then the repair can go. The
tests are in tests/distribution/test_distribution_keras.py and test_multi_worker.py.

* `fit` averages the first batch over the replicas, only to learn its shapes. It fails if their
  shares differ in size, and always with several workers. `Repaired` takes one replica's share.
  (test_first_batch_is_averaged, test_plain_keras_cannot_average_the_first_batch)
* With several workers it averages scalar logs along an axis that they do not have. `step_logs` adds
  that axis. (test_plain_keras_cannot_average_scalar_logs)
* The logs of a step are the plain mean of what each replica would report, whatever its share of
  the batch. `metric_results` reports the metrics of the whole batch. (test_step_logs_are_a_mean)
* Loss scaling looks for an overflow on the first replica alone, before gradients are summed: one on
  another replica would reach the weights. `share_overflow` tells them all.
  (test_an_overflow_is_seen_on_the_first_replica_only)
* `check_compile` refuses what cannot run on more than one replica. Gradient accumulation, and
  weights that are overwritten by their average now and then, branch inside a replica, where nothing
  may be summed. (test_accumulation_cannot_be_compiled,
  test_overwriting_by_the_average_cannot_be_compiled) Gradients are clipped before they are summed,
  each replica's share by itself. (test_clipping_is_of_a_share) Several steps per execution, and
  XLA, fail. (test_several_steps_per_execution_fail, test_xla_fails)

One entry holds for any number of replicas: Keras compiles a whole step by XLA, which drops the
assertions in it. `Repaired.under_xla` compiles what comes after them. (test_xla_drops_assertions)
"""

from collections.abc import Callable

import keras
import tensorflow as tf

from he_keras.distribution import replicas, workers

_CLIPS_SHARES = "Keras clips each replica's share of the gradient, not their sum,"
#: Settings that need a single replica: what does not work, and what to set with several replicas.
_SINGLE_REPLICA = {
    "steps_per_execution": ("Keras cannot run several steps per execution", "1"),
    "jit_compile": ("XLA cannot compile a step", "False"),
    "clipnorm": (_CLIPS_SHARES, "None"),
    "global_clipnorm": (_CLIPS_SHARES, "None"),
    "clipvalue": (_CLIPS_SHARES, "None"),
    "gradient_accumulation_steps": (
        "Keras cannot accumulate gradients",
        "None: a larger batch, which the replicas share, gives the same update",
    ),
    "ema_overwrite_frequency": (
        "Keras cannot overwrite weights by their average",
        "None: he_keras.callbacks.WeightAveraging validates and saves the average",
    ),
}


class Repaired(keras.Model):
    """Base class of models that `fit` can train on any strategy."""

    def _maybe_symbolic_build(self, iterator=None, data_batch=None) -> None:
        strategy = self.distribute_strategy
        if iterator is not None and strategy.num_replicas_in_sync > 1:
            data_batch, iterator = _one_share(iterator, strategy), None
        super()._maybe_symbolic_build(iterator=iterator, data_batch=data_batch)

    def make_train_function(self, force: bool = False):
        """Makes the function of a step; refuses what was set since `compile` and cannot run."""
        strategy, settings = self.distribute_strategy, (self.jit_compile, self.steps_per_execution)
        check_compile(strategy, *settings, self.optimizer)
        return super().make_train_function(force=force)

    def _make_function(self, step_function):
        jit_compile, self.jit_compile = self.jit_compile, False
        try:
            return super()._make_function(step_function)
        finally:
            self.jit_compile = jit_compile

    def under_xla(self, step: Callable) -> Callable:
        """Returns what a step does once its batch has been checked, under XLA where asked for."""
        is_wanted = self.jit_compile and not tf.executing_eagerly()
        return tf.function(step, jit_compile=True, autograph=False) if is_wanted else step


def _one_share(iterator, strategy):
    """The first replica's share of the first batch."""
    batches = next(each for _, _, each in iterator)
    return tf.nest.map_structure(
        lambda value: strategy.experimental_local_results(value)[0], next(batches)
    )


def check_compile(strategy, jit_compile, steps_per_execution: int, optimizer) -> None:
    """Raises a ValueError for what cannot run on more than one replica."""
    if strategy.num_replicas_in_sync == 1:
        return
    if isinstance(optimizer, dict):
        optimizer = keras.optimizers.get(optimizer)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    given = {
        "steps_per_execution": None if steps_per_execution == 1 else steps_per_execution,
        "jit_compile": True if jit_compile is True else None,
    }
    for setting, (fault, remedy) in _SINGLE_REPLICA.items():
        received = given.get(setting, getattr(inner, setting, None))
        if received is not None:
            raise ValueError(
                f"{fault} on more than one replica; expected {setting}={remedy}; "
                f"received {setting}={received}"
            )


def batches(optimizer):
    """Batches trained on, which gradient accumulation makes several of an update.

    Batches that loss scaling skipped are not counted. Keras's public count is that of updates.
    """
    return getattr(optimizer, "inner_optimizer", optimizer)._iterations


def schedule_step(optimizer):
    """The step that the schedules of an objective are read at: the first batch of an update."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return inner.iterations * (inner.gradient_accumulation_steps or 1)


def metric_results(model) -> dict:
    """Results of a model's metrics over the examples of all replicas, inside a step."""
    if replicas.count() == 1:
        return model.get_metrics_result()
    variables = [variable for metric in model.metrics for variable in metric.variables]
    summed = [each for each in variables if each.aggregation == "sum"]
    totals = replicas.total([tf.convert_to_tensor(each) for each in summed])
    with keras.StatelessScope(state_mapping=list(zip(summed, totals, strict=True))):
        return model.get_metrics_result()


def step_logs(values: dict) -> dict:
    """Returns what a step may return as its logs."""
    if workers.count(tf.distribute.get_strategy()) == 1:
        return values
    return {name: tf.reshape(value, [1]) for name, value in values.items()}


def share_overflow(optimizer, gradients: list) -> list:
    """Makes gradients infinite on every replica if loss scaling overflowed on one."""
    if replicas.count() == 1 or not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return gradients
    known = [gradient for gradient in gradients if gradient is not None]
    finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(gradient)) for gradient in known])
    overflows = replicas.total(tf.cast(~finite, tf.float32)) > 0
    return [
        None if gradient is None else tf.where(overflows, float("inf"), gradient)
        for gradient in gradients
    ]
