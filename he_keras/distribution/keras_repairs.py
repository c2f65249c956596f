"""What Keras 3.15 does wrong with several replicas, repaired. Everything of the kind is here.

Each entry ends with the test in tests/test_distribution_keras.py or tests/test_multi_worker.py that
fails once Keras does it right, so that the repair can go.

* `fit` averages the first batch over the replicas, only to learn its shapes: it fails if their
  shares differ in size, and always with several workers. `Repaired` takes one replica's share.
  (test_first_batch_is_averaged, test_plain_keras_cannot_average_the_first_batch)
* With several workers it averages scalar logs along an axis that they do not have. `step_logs` adds
  that axis. (test_plain_keras_cannot_average_scalar_logs)
* The logs of a step are the plain mean of what each replica would report, whatever its share of
  the batch. `metric_results` reports the metrics of the whole batch. (test_step_logs_are_a_mean)
* Loss scaling skips a step by what it finds on the first replica alone, before gradients are
  summed: an overflow on another one would reach the weights. `share_overflow` tells them all.
  (test_an_overflow_is_seen_on_the_first_replica_only)
* Gradient accumulation branches inside a replica, where nothing may be summed: the step cannot be
  compiled. `apply` branches outside. (test_accumulation_cannot_be_compiled)
* Gradients are clipped before they are summed, each replica's share by itself: `check_compile`
  refuses clipping. (test_clipping_is_of_a_share)
* Several steps per execution, and XLA, fail on more than one replica. `check_compile` says so.
  (test_several_steps_per_execution_fail, test_xla_fails)
"""

import keras
import tensorflow as tf

from he_keras.distribution import replicas, workers

_CLIPPING = ("clipnorm", "global_clipnorm", "clipvalue")


class Repaired(keras.Model):
    """Base class of models that `fit` can train on any strategy."""

    def _maybe_symbolic_build(self, iterator=None, data_batch=None) -> None:
        strategy = self.distribute_strategy
        if iterator is not None and strategy.num_replicas_in_sync > 1:
            data_batch, iterator = _one_share(iterator, strategy), None
        super()._maybe_symbolic_build(iterator=iterator, data_batch=data_batch)


def _one_share(iterator, strategy):
    """The first replica's share of the first batch."""
    batches = next(each for _, _, each in iterator)
    return tf.nest.map_structure(
        lambda value: strategy.experimental_local_results(value)[0], next(batches)
    )


def check_compile(strategy, jit_compile, steps_per_execution: int, optimizer) -> None:
    """Raises a ValueError for what cannot run on more than one replica."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    clipping = {name: getattr(inner, name, None) for name in _CLIPPING}
    accumulates = getattr(inner, "gradient_accumulation_steps", None)
    if strategy.num_replicas_in_sync == 1:
        return
    if steps_per_execution != 1:
        raise ValueError(
            "Keras cannot run several steps per execution on more than one replica; expected "
            f"steps_per_execution=1; received steps_per_execution={steps_per_execution}"
        )
    if jit_compile is True:
        raise ValueError(
            "XLA cannot compile a step over more than one replica; expected jit_compile=False; "
            "received jit_compile=True"
        )
    if any(each is not None for each in clipping.values()):
        raise ValueError(
            "Keras would clip each replica's share of the gradient, not their sum; expected no "
            f"clipping on more than one replica; received {clipping}"
        )
    if accumulates and inner is not optimizer:
        raise ValueError(
            "Keras cannot accumulate scaled gradients on more than one replica; expected an "
            "optimizer without loss scaling (mixed_bfloat16 needs none); received "
            f"gradient_accumulation_steps={accumulates} within {type(optimizer).__name__}"
        )


def apply(optimizer, gradients: list, variables: list) -> None:
    """Applies the replicas' gradients, as `optimizer.apply` does."""
    if replicas.count() == 1 or not getattr(optimizer, "gradient_accumulation_steps", None):
        optimizer.apply(gradients, variables)
        return
    pairs = [pair for pair in zip(gradients, variables, strict=True) if pair[0] is not None]
    context = tf.distribute.get_replica_context()
    context.merge_call(
        lambda strategy, *summands: _accumulate(
            strategy, optimizer, summands, [variable for _, variable in pairs]
        ),
        args=[gradient for gradient, _ in pairs],
    )
    optimizer._iterations.assign_add(1)


def _accumulate(strategy, optimizer, gradients, variables: list) -> None:
    """Adds the sum over all replicas to the accumulators, and updates the weights if it is time."""
    per_update = optimizer.gradient_accumulation_steps
    accumulators = [
        optimizer._accumulated_gradients[optimizer._get_variable_index(variable)].value
        for variable in variables
    ]
    sums = strategy.extended.batch_reduce_to(
        tf.distribute.ReduceOp.SUM, list(zip(gradients, accumulators, strict=True))
    )
    for accumulator, summed in zip(accumulators, sums, strict=True):
        _update(strategy, accumulator, lambda held, new: held.assign_add(new), summed)

    def update():
        optimizer._apply_weight_decay(variables)
        rate = optimizer.learning_rate
        for variable, accumulator in zip(variables, accumulators, strict=True):
            _update(
                strategy,
                variable.value,
                lambda weight, held: optimizer.update_step(held / per_update, weight, rate),
                accumulator,
            )
            _update(strategy, accumulator, lambda held: held.assign(tf.zeros_like(held)))
        return tf.constant(0)

    is_due = (tf.convert_to_tensor(optimizer._iterations) + 1) % per_update == 0
    tf.cond(is_due, update, lambda: tf.constant(0))


def _update(strategy, variable, change, *values) -> None:
    """Changes each replica's copy of a variable."""
    strategy.extended.update(variable, change, args=values, group=False)


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
