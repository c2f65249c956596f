"""Averages of the weights over training, with batch-norm statistics that belong to them.

Papers: Izmailov et al. 2018, "Averaging Weights Leads to Wider Optima and Better Generalization"
(SWA: the plain mean of the weights at the ends of epochs, with batch-norm statistics measured
anew). Gowal et al. 2020, "Uncovering the Limits of Adversarial Training" (the exponential moving
average, with a decay that grows at first). Gowal et al. do not average batch-norm statistics.
Without `reestimate` the averaged weights get the statistics of the weights being trained, as there.
`reestimate` is a deviation for the moving average.

Keras has `keras.optimizers.Optimizer(use_ema=True)` with `keras.callbacks.SwapEMAWeights`. It is
the cheaper choice where none of the following matters:

* At the end of every `fit` that optimizer writes the average over the weights. A run that is
  resumed in the middle of an epoch needs two calls of `fit`, so it would end with other weights.
* The swap adds and subtracts. So the weights come back with rounding errors, and validation changes
  the training.
* The average has the weights' own dtype and starts in the first step.
* Batch norm keeps the statistics of other weights, and there is no SWA.
"""

import contextlib
import warnings
from collections.abc import Iterator

import keras
import numpy as np

from he_keras.arguments import check_choice, check_flag, check_integer, check_share
from he_keras.callbacks.batch_norm_statistics import (
    assign_all,
    batch_norm_layers,
    copy_of,
    moving_statistics,
    reestimate_batch_norm,
    values_of,
)

KINDS = ("ema", "swa")
_INFINITE = -1  # tf.data.INFINITE_CARDINALITY


class WeightAveraging(keras.callbacks.Callback):
    """Keeps a float32 average of the trainable weights, to validate, save and finish with.

    The average follows training and never changes it. Put this callback first in the list, and
    `ExactResume` last; list this callback among its `stateful_callbacks`. Another `fit` with the
    same callback continues the average.

    Args:
        decay: share of the old average that a batch keeps, for "ema".
        start_epoch: first epoch (from 0) that counts. Before it, the model's own weights are used.
        kind: "ema" is the exponential moving average over batches. It starts as the weights at the
            start of `start_epoch`. "swa" is the plain mean of the weights at the ends of epochs.
        warm_up: whether batch t (from 0) of "ema" has the decay min(decay, (1 + t) / (10 + t)).
            Then the average of a short run does not consist mostly of its untrained start.
        reestimate: batches from which the batch-norm statistics of the averaged weights are
            measured: a list or a `tf.data.Dataset` of images, or of tuples that begin with images
            and labels. It is gone through more than once. None keeps the model's own statistics.
        perturb: function (model, images, labels) -> images that is applied to these batches, so
            that adversarially trained models are measured on adversarial images. It must not change
            any state. None leaves the images as they are.
        evaluate: whether `fit` validates the averaged weights.
        apply_at_end: whether the averaged weights are in the model when `fit` ends. Set it to False
            if the same training goes on in another `fit`, and call `apply` after the last one.

    Example:
        >>> import he_keras as he, keras, numpy as np
        >>> from he_keras.callbacks.weight_averaging import WeightAveraging
        >>> layers = [keras.Input((4,)), keras.layers.Dense(2), keras.layers.BatchNormalization()]
        >>> model = keras.Sequential(layers)
        >>> model.compile(optimizer="sgd", loss="mse")
        >>> images, targets = np.ones((8, 4), "float32"), np.zeros((8, 2), "float32")
        >>> averaging = WeightAveraging(decay=0.9, reestimate=[images], apply_at_end=False)
        >>> history = model.fit(images, targets, batch_size=4, verbose=0, callbacks=[averaging])
        >>> averaging.updates
        2
        >>> with averaging.swap():
        ...     predictions = model.predict(images, verbose=0)
    """

    def __init__(
        self,
        decay: float = 0.9995,
        start_epoch: int = 0,
        kind: str = "ema",
        warm_up: bool = True,
        reestimate=None,
        perturb=None,
        evaluate: bool = True,
        apply_at_end: bool = True,
    ) -> None:
        super().__init__()
        check_choice("kind", kind, KINDS)
        check_share("decay", decay, below_one=True)
        check_integer("start_epoch", start_epoch, 0)
        check_flag("warm_up", warm_up)
        check_flag("evaluate", evaluate)
        check_flag("apply_at_end", apply_at_end)
        _check_batches(reestimate, perturb)
        self.decay, self.start_epoch, self.kind, self.warm_up = decay, start_epoch, kind, warm_up
        self.reestimate, self.perturb = reestimate, perturb
        self.evaluate, self.apply_at_end = evaluate, apply_at_end
        self.updates = 0
        self._average: list[keras.Variable] = []
        self._statistics: list[np.ndarray] = []
        self._own_weights: list[np.ndarray] | None = None
        self._is_swapped_for_test = False
        self._open_epoch: int | None = None
        self._first_step = 0

    @property
    def has_average(self) -> bool:
        """Whether averaging has begun; until then swapping changes nothing."""
        return bool(self._average)

    @contextlib.contextmanager
    def swap(self) -> Iterator[None]:
        """Puts the averaged weights into the model for the block, and its own back afterwards."""
        is_swapped = self._put_in()
        try:
            yield
        finally:
            if is_swapped:
                self._put_back()

    def apply(self) -> None:
        """Replaces the model's weights by the averaged ones for good.

        Outside `fit`, `set_model` tells the callback which model that is.
        """
        if not self.has_average:
            raise ValueError(
                f"No average yet; expected training beyond start_epoch={self.start_epoch}; "
                f"received updates={self.updates}"
            )
        self._put_in()
        self._own_weights = None

    def with_average(self, callback):
        """Returns `callback`, whose `on_epoch_end` will find the averaged weights in the model.

        For callbacks that save the model they monitor, such as `BestCheckpoint` and
        `keras.callbacks.ModelCheckpoint`.
        """
        unchanged = callback.on_epoch_end

        def on_epoch_end(epoch, logs=None) -> None:
            self._close_epoch()
            with self.swap():
                unchanged(epoch, logs)

        callback.on_epoch_end = on_epoch_end
        return callback

    def on_train_begin(self, logs=None) -> None:
        """Puts back the model's own weights if an exception ended a validation before it did."""
        self._put_back()
        if self.reestimate is not None:
            batch_norm_layers(self.model)  # raises before any work

    def on_epoch_begin(self, epoch, logs=None) -> None:
        """Starts the moving average at the current weights."""
        self._open_epoch = epoch
        if self.has_average:
            self._check_shapes()
        elif self.kind == "ema" and epoch >= self.start_epoch:
            self._begin(values_of(self.model.trainable_variables))

    def on_train_batch_begin(self, batch, logs=None) -> None:
        """Remembers the first step, since one call of the graph may make several steps."""
        self._first_step = batch

    def on_train_batch_end(self, batch, logs=None) -> None:
        """Moves the average towards the weights, once for all steps of one call of the graph."""
        if self.kind != "ema" or not self.has_average:
            return
        # Python sees only the weights after the last of these steps.
        steps = batch - self._first_step + 1
        warm_up_decay = (1 + self.updates) / (10 + self.updates)
        decay = min(self.decay, warm_up_decay) if self.warm_up else self.decay
        self._move(1 - decay**steps)
        self.updates += steps

    def on_epoch_end(self, epoch, logs=None) -> None:
        """Counts the epoch, unless its validation already has."""
        self._close_epoch()

    def on_test_begin(self, logs=None) -> None:
        """Puts the averaged weights into the model."""
        self._close_epoch()
        self._is_swapped_for_test = self.evaluate and self._put_in()

    def on_test_end(self, logs=None) -> None:
        """Puts the model's own weights back."""
        if self._is_swapped_for_test:
            self._put_back()
        self._is_swapped_for_test = False

    def on_train_end(self, logs=None) -> None:
        """Leaves the averaged weights in the model if `apply_at_end` asks for it."""
        if not self.apply_at_end:
            return
        if self.has_average:
            self.apply()
        else:
            warnings.warn(
                "Training ended before averaging began, and the model keeps its own weights; "
                f"expected more epochs than start_epoch={self.start_epoch}",
                stacklevel=2,
            )

    def state_arrays(self) -> dict[str, np.ndarray]:
        """The average and the number of its updates."""
        average = {f"average_{i}": copy_of(each) for i, each in enumerate(self._average)}
        return {"kind": np.array(self.kind), "updates": np.array(self.updates), **average}

    def load_state_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """Restores what `state_arrays` returned."""
        kind = str(arrays["kind"])
        if kind != self.kind:
            raise ValueError(
                f"State of another kind of average; expected kind={self.kind!r}; "
                f"received kind={kind!r}"
            )
        count = sum(name.startswith("average_") for name in arrays)
        average = [arrays[f"average_{i}"] for i in range(count)]
        self.updates = int(arrays["updates"])
        self._begin(average)
        # The weights come from the checkpoint too, so those that were set aside are obsolete.
        self._own_weights = self._open_epoch = None

    def _begin(self, values) -> None:
        # From arrays, since a Keras variable made from a TensorFlow variable would share its value.
        self._average = [keras.Variable(each, dtype="float32", trainable=False) for each in values]
        self._statistics = []

    def _move(self, share: float) -> None:
        for average, variable in zip(self._average, self.model.trainable_variables, strict=True):
            value = keras.ops.cast(variable.value, "float32")
            average.assign_add(share * (value - average.value))
        self._statistics = []

    def _close_epoch(self) -> None:
        epoch, self._open_epoch = self._open_epoch, None
        if self.kind != "swa" or epoch is None or epoch < self.start_epoch:
            return
        if self.has_average:
            self._move(1 / (self.updates + 1))
        else:
            self._begin(values_of(self.model.trainable_variables))
        self.updates += 1

    def _check_shapes(self) -> None:
        expected = [tuple(each.shape) for each in self.model.trainable_variables]
        received = [tuple(each.shape) for each in self._average]
        if received != expected:
            raise ValueError(
                f"The average is of another model; expected {len(expected)} arrays of this "
                f"model's trainable shapes; received {len(received)}"
            )

    def _put_in(self) -> bool:
        """Puts the average into the model; returns False if it is in already, or not there yet."""
        if self._own_weights is not None or not self.has_average:
            return False
        if self.model is None:
            raise ValueError("No model; expected a call of set_model or fit before; received None")
        self._check_shapes()
        self._own_weights = values_of(self.model.weights)
        try:
            assign_all(self.model.trainable_variables, values_of(self._average))
            self._put_statistics_in()
        except BaseException:
            self._put_back()
            raise
        return True

    def _put_statistics_in(self) -> None:
        if self.reestimate is None:
            return
        variables = moving_statistics(batch_norm_layers(self.model))
        if not self._statistics:
            reestimate_batch_norm(self.model, self.reestimate, self.perturb)
            self._statistics = values_of(variables)
        assign_all(variables, self._statistics)

    def _put_back(self) -> None:
        if self._own_weights is not None:
            assign_all(self.model.weights, self._own_weights)
        self._own_weights = None


def _check_batches(reestimate, perturb) -> None:
    can_repeat = hasattr(reestimate, "__iter__") and not hasattr(reestimate, "__next__")
    is_array = hasattr(reestimate, "shape")
    if reestimate is not None and (not can_repeat or is_array):
        raise TypeError(
            "Invalid reestimate; expected None, a list of batches or a tf.data.Dataset, which can "
            f"be gone through more than once; received reestimate of {type(reestimate).__name__}"
        )
    if hasattr(reestimate, "cardinality") and int(reestimate.cardinality()) == _INFINITE:
        raise ValueError(
            "Endless reestimate; expected a few batches: reestimate.take(n); "
            f"received {type(reestimate).__name__} of infinite cardinality"
        )
    if perturb is not None and not callable(perturb):
        raise TypeError(
            f"Invalid perturb; expected a function of (model, images, labels); received {perturb!r}"
        )
