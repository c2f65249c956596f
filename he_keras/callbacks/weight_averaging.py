"""Averages of the weights over training, with batch-norm statistics that belong to them.

Papers: Izmailov et al. 2018, "Averaging Weights Leads to Wider Optima and Better Generalization"
(SWA: the plain mean of the weights at the ends of epochs, batch-norm statistics measured anew);
Gowal et al. 2020, "Uncovering the Limits of Adversarial Training" (the exponential moving average,
with a decay that grows at first). Gowal et al. do not average batch-norm statistics, and without
`reestimate` those of the weights being trained stay here too; with it the EMA deviates.

Why not `keras.optimizers.Optimizer(use_ema=True)` with `keras.callbacks.SwapEMAWeights`: at the end
of every `fit` the optimizer writes the average over the weights, and a run that is resumed in the
middle of an epoch needs two calls of `fit`, so it would end with other weights; the swap adds and
subtracts, so the weights return with rounding errors and validation changes the training; the
average has the weights' own dtype and starts in the first step; batch norm keeps the statistics of
other weights; there is no SWA. It is the cheaper choice where none of this matters.
"""

import contextlib
import warnings
from collections.abc import Iterator

import keras
import numpy as np

from he_keras.attacks.checks import check_choice, check_flag, check_number

KINDS = ("ema", "swa")
_INFINITE = -1  # tf.data.INFINITE_CARDINALITY


class WeightAveraging(keras.callbacks.Callback):
    """Keeps a float32 average of the trainable weights, to validate, save and finish with.

    The average follows training and never changes it. Put this callback first in the list, and
    `ExactResume`, to whose `stateful_callbacks` it can belong, last. The average goes on in a
    further `fit` with the same callback.

    Args:
        decay: share of the old average that a batch keeps, for "ema".
        start_epoch: first epoch (from 0) that counts. Before, the model's own weights are used.
        kind: "ema": exponential moving average over batches, which starts as the weights at the
            start of `start_epoch`; "swa": plain mean of the weights at the ends of epochs.
        warm_up: whether batch t (from 0) of "ema" has the decay min(decay, (1 + t) / (10 + t)), so
            that a short run's average is not mostly its untrained start.
        reestimate: batches (images, or tuples that begin with images and labels) that can be gone
            through again, such as a list or a `tf.data.Dataset`, from which the batch-norm
            statistics of the averaged weights are measured; None keeps the model's own.
        perturb: function (model, images, labels) -> images, applied to these batches, so that
            adversarially trained models are measured on adversarial images; it must not change
            any state. None leaves the images as they are.
        evaluate: whether `fit` validates the averaged weights.
        apply_at_end: whether the averaged weights are in the model when `fit` ends. Set it to False
            where the same training goes on in another `fit`, and call `apply` after the last.

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
        _check_range(decay, start_epoch)
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
        """Has the averaged weights in the model inside the block, and its own again afterwards."""
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
        """Puts the weights back that a validation cut short by an exception left swapped."""
        self._put_back()
        if self.reestimate is not None:
            batch_norm_layers(self.model)  # raises before any work

    def on_epoch_begin(self, epoch, logs=None) -> None:
        """Starts the moving average at the current weights."""
        self._open_epoch = epoch
        if self.has_average:
            self._check_shapes()
        elif self.kind == "ema" and epoch >= self.start_epoch:
            self._begin(_values(self.model.trainable_variables))

    def on_train_batch_begin(self, batch, logs=None) -> None:
        """Remembers the first step of an execution of several steps."""
        self._first_step = batch

    def on_train_batch_end(self, batch, logs=None) -> None:
        """Moves the average towards the weights, once for all steps of an execution."""
        if self.kind != "ema" or not self.has_average:
            return
        # Only the weights after the last step of an execution are seen.
        steps = batch - self._first_step + 1
        warm_up_decay = (1 + self.updates) / (10 + self.updates)
        decay = min(self.decay, warm_up_decay) if self.warm_up else self.decay
        self._move(1 - decay**steps)
        self.updates += steps

    def on_epoch_end(self, epoch, logs=None) -> None:
        """Counts the epoch, unless its validation already has."""
        self._close_epoch()

    def on_test_begin(self, logs=None) -> None:
        """Swaps the averaged weights in."""
        self._close_epoch()
        self._is_swapped_for_test = self.evaluate and self._put_in()

    def on_test_end(self, logs=None) -> None:
        """Swaps the model's own weights back in."""
        if self._is_swapped_for_test:
            self._put_back()
        self._is_swapped_for_test = False

    def on_train_end(self, logs=None) -> None:
        """Leaves the averaged weights in the model, if wanted."""
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
        average = {f"average_{i}": _copy(each) for i, each in enumerate(self._average)}
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
        # The weights come from the checkpoint too: nothing that was set aside is of use.
        self._own_weights = self._open_epoch = None

    def _begin(self, values) -> None:
        # From arrays: made from a TensorFlow variable, a Keras variable is that same variable.
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
            self._begin(_values(self.model.trainable_variables))
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
        """Swaps the average in; returns False where it is in already, or not yet there."""
        if self._own_weights is not None or not self.has_average:
            return False
        if self.model is None:
            raise ValueError("No model; expected a call of set_model or fit before; received None")
        self._check_shapes()
        self._own_weights = _values(self.model.weights)
        try:
            _assign(self.model.trainable_variables, _values(self._average))
            self._put_statistics_in()
        except BaseException:
            self._put_back()
            raise
        return True

    def _put_statistics_in(self) -> None:
        if self.reestimate is None:
            return
        variables = _statistics(batch_norm_layers(self.model))
        if not self._statistics:
            reestimate_batch_norm(self.model, self.reestimate, self.perturb)
            self._statistics = _values(variables)
        _assign(variables, self._statistics)

    def _put_back(self) -> None:
        if self._own_weights is not None:
            _assign(self.model.weights, self._own_weights)
        self._own_weights = None


def reestimate_batch_norm(model, batches, perturb=None) -> None:
    """Sets the moving statistics of batch norm to their mean over batches, whatever the momentum.

    Every batch is passed through the model in training mode, and counts by its number of images;
    the statistics are those of its batch, as a momentum of 0 leaves them. Everything else that such
    a pass changes, such as the state of random layers, is put back.

    Args:
        model: any built `keras.Model`; layers that are not trainable keep their statistics.
        batches: images, or tuples that begin with images and labels.
        perturb: function (model, images, labels) -> images; it sees the statistics from before.

    Example:
        >>> import keras, numpy as np
        >>> from he_keras.callbacks.weight_averaging import reestimate_batch_norm
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.BatchNormalization()])
        >>> reestimate_batch_norm(model, [np.array([[1.0], [3.0]]), np.array([[5.0], [9.0]])])
        >>> [round(float(each[0]), 3) for each in model.get_weights()[2:]]
        [4.5, 2.5]
    """
    layers = batch_norm_layers(model)
    statistics = _statistics(layers)
    everything = model.non_trainable_variables
    before, everything_before = _values(statistics), _values(everything)
    totals, num_images = [np.zeros(each.shape) for each in before], 0
    try:
        for images, labels in map(_images_and_labels, batches):
            if perturb is not None:
                images = perturb(model, images, labels)
            _pass_without_momentum(model, layers, images)
            for total, of_batch in zip(totals, _values(statistics), strict=True):
                total += len(images) * of_batch.astype(np.float64)
            num_images += len(images)
            _assign(statistics, before)
    finally:
        _assign(everything, everything_before)
    if not num_images:
        raise ValueError("No images for the batch-norm statistics; expected batches; received none")
    _assign(statistics, [total / num_images for total in totals])


def batch_norm_layers(model) -> list:
    """Returns a model's batch-norm layers, at any depth."""
    layers = [
        each
        for each in model._flatten_layers()
        if isinstance(each, keras.layers.BatchNormalization)
    ]
    if any(getattr(each, "renorm", False) for each in layers):
        raise ValueError(
            "Batch renormalisation has more statistics than a mean and a variance; expected "
            "layers with renorm=False; received renorm=True"
        )
    return layers


def _pass_without_momentum(model, layers: list, images) -> None:
    momenta = [layer.momentum for layer in layers]
    try:
        for layer in layers:
            layer.momentum = 0.0
        model(images, training=True)
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum


def _statistics(layers: list) -> list:
    return [each for layer in layers for each in (layer.moving_mean, layer.moving_variance)]


def _images_and_labels(batch) -> tuple:
    parts = batch if isinstance(batch, (tuple, list)) else (batch,)
    images = keras.ops.convert_to_tensor(parts[0], dtype="float32")
    return images, parts[1] if len(parts) > 1 else None


def _values(variables) -> list[np.ndarray]:
    return [_copy(each) for each in variables]


def _copy(variable) -> np.ndarray:
    # Without the copy the array may be a view of memory that the next assignment overwrites.
    return np.array(keras.ops.convert_to_numpy(variable.value), copy=True)


def _assign(variables, values) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _check_range(decay, start_epoch) -> None:
    check_number("decay", decay, 0.0)
    if decay >= 1:
        raise ValueError(f"Invalid decay; expected a number in [0, 1); received decay={decay!r}")
    is_integer = isinstance(start_epoch, (int, np.integer)) and not isinstance(start_epoch, bool)
    if not is_integer or start_epoch < 0:
        raise ValueError(
            f"Invalid start_epoch; expected an integer >= 0; received start_epoch={start_epoch!r}"
        )


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
