"""Training from a configuration: a run folder that can be interrupted at any moment and resumed.

`prepare_training` does everything that can fail because of the input (configuration, data, folder,
checkpoint) before any training; `Training.run` trains.
"""

import contextlib
import dataclasses
import pathlib
import signal
import sys
from collections.abc import Iterator

import keras
import tensorflow as tf

from he_keras import callbacks, data, distribution
from he_keras.adversarial_model import HEAdversarialModel
from he_keras.callbacks.best_checkpoint import save_model
from he_keras.callbacks.snapshots import Snapshots
from he_keras.distribution import workers
from he_keras.experiment import run_folder
from he_keras.experiment.configuration import (
    build_model,
    check_config,
    default_config,
    to_plain,
)

_SPLITS = ("train", "validation", "test")


class Interrupted(Exception):
    """Training was asked to stop (Ctrl-C); the checkpoint holds what was done."""


@dataclasses.dataclass
class Datasets:
    """The splits of an experiment; `validation` is None where nothing was held out."""

    train: data.ImageDataset | data.StreamingDataset
    validation: data.ImageDataset | data.StreamingDataset | None
    test: data.ImageDataset | data.StreamingDataset


def load_datasets(config) -> Datasets:
    """Loads the splits that a configuration names, and checks shapes and class counts."""
    train, validation, test = (load_split(config, split) for split in _SPLITS)
    datasets = Datasets(train, validation, test)
    _check_dataset(config, datasets.train)
    return datasets


def load_split(config, split: str):
    """Loads "train", "validation" (None where nothing is held out) or "test"."""
    settings = config.data
    if split == "validation" and not settings.validation_examples:
        return None
    limit = settings[f"{split}_examples"]
    if settings.synthetic:
        shape, classes = tuple(config.network.input_shape), config.head.num_classes
        return data.synthetic(shape, classes, limit, _SPLITS.index(split), split)
    dataset = data.load(
        settings.name,
        split,
        settings.data_dir or None,
        validation_examples=settings.validation_examples,
        test_fraction=settings.test_fraction,
    )
    return dataset.take(limit) if limit and split != "validation" else dataset


def _check_dataset(config, train) -> None:
    if train.num_classes != config.head.num_classes:
        raise ValueError(
            f"Class count mismatch; expected head.num_classes={train.num_classes} for "
            f"{train.name}; "
            f"received head.num_classes={config.head.num_classes}"
        )
    expected = tuple(config.network.input_shape)
    if tuple(train.image_shape) != expected:
        raise ValueError(
            f"Image shape mismatch; expected network.input_shape={tuple(train.image_shape)} for "
            f"{train.name}; received network.input_shape={expected}"
        )


def augmentation_of(config) -> str:
    """The configured augmentation; "default" is the data set's own."""
    if config.data.augmentation != "default":
        return config.data.augmentation
    if config.data.synthetic or config.data.name not in data.FACTS:
        return "none"
    return data.default_augmentation(config.data.name)


class Training:
    """A prepared run: model, data and place to start from.

    Args:
        config: the experiment's configuration.
        output_dir: the run folder; several worker processes share it, and the first one writes.
        strategy: what to train on, as from `he_keras.distribution.strategy`; None for one device.
    """

    def __init__(self, config, output_dir, strategy: tf.distribute.Strategy | None = None) -> None:
        check_config(config)
        self.config = config
        self.folder = pathlib.Path(output_dir)
        self.strategy = strategy or tf.distribute.get_strategy()
        self.has_static_shapes = distribution.needs_static_shapes(self.strategy)
        _check_shares(config, self.strategy)
        self.datasets = load_datasets(config)
        if self.has_static_shapes:
            _check_validation(self.datasets.validation, self.strategy)
        self.steps = data.steps_per_epoch(
            self.datasets.train, config.train.batch_size, self.has_static_shapes
        )
        with self.strategy.scope():
            self.model: HEAdversarialModel = build_model(config, self.steps)
        _check_objective(self.model, self.has_static_shapes)
        # A wrong augmentation or batch size must fail here: one batch's pipeline is built.
        self.stream(0, 0)
        self.averaging = self._weight_averaging()
        workers.on_chief(self.strategy, self._prepare_folder)
        self.stateful = self._stateful_callbacks()
        self.snapshots = self._snapshots()
        self.resume = _ResumeWithSignal(
            self.folder / "checkpoints" / "latest.npz",
            every_batches=config.train.checkpoint_every_batches,
            every_seconds=config.train.checkpoint_every_seconds,
            stateful_callbacks=self.stateful,
        )
        self.place = self.resume.restore(self.model) or callbacks.ResumePoint(0, 0)
        self._restored = _stamp(self.resume.path)
        if self.place.batch >= self.steps:
            raise callbacks.CorruptCheckpointError(
                f"Checkpoint of other data; expected one of {self.steps} batches an epoch; "
                f"received batch={self.place.batch} in {self.resume.path}"
            )

    def _prepare_folder(self) -> None:
        with run_folder.held(self.folder, "trains"):
            defaults = to_plain(default_config())
            run_folder.prepare(self.folder, to_plain(self.config), defaults)

    @contextlib.contextmanager
    def _held_folder(self) -> Iterator[None]:
        """Holds the folder, which must be as it was when the training was prepared."""
        with contextlib.ExitStack() as held:

            def hold() -> None:
                held.enter_context(run_folder.held(self.folder, "trains"))
                if _stamp(self.resume.path) != self._restored:
                    raise ValueError(
                        "The checkpoint has changed since this training was prepared; expected "
                        f"another prepare_training; received {self.resume.path}"
                    )

            workers.on_chief(self.strategy, hold)
            yield

    def _stateful_callbacks(self) -> list:
        """The order matters: the guard may put other weights back, and adds to the history."""
        chosen: list = [self.averaging] if self.averaging else []
        if self.datasets.validation is not None and self.model.evaluation_attack is not None:
            best = callbacks.BestCheckpoint(self.folder / "checkpoints" / "best.keras")
            chosen.append(self.averaging.with_average(best) if self.averaging else best)
        if self.config.train.overfitting_guard:
            chosen.append(self._guard())
        return [*chosen, callbacks.HistoryFile(self.folder / "history.csv")]

    def _guard(self) -> callbacks.OverfittingGuard:
        settings = self.config.train
        images, labels = next(iter(self.stream(0, 0)))
        return callbacks.OverfittingGuard(
            images,
            labels,
            max_drop=settings.guard_max_drop,
            on_collapse=settings.guard_on_collapse,
            every_batches=settings.guard_every_batches,
            path=self.folder / "guard.csv" if settings.guard_every_batches else None,
        )

    def _snapshots(self) -> list:
        """The callback that keeps the model, or its average, at the end of each cycle."""
        if not self.config.train.snapshots:
            return []
        snapshots = Snapshots(self.folder / "snapshots", self.config.train.cycle_ends)
        return [self.averaging.with_average(snapshots) if self.averaging else snapshots]

    def _weight_averaging(self):
        """Batch-norm statistics are measured on the adversarial images of the first batches."""
        settings = self.config.train.weight_averaging
        if not settings.kind:
            return None
        count = settings.batch_norm_batches
        averaging = callbacks.WeightAveraging(
            settings.decay,
            settings.start_epoch,
            settings.kind,
            settings.warm_up,
            reestimate=self.stream(0, 0).take(count) if count else None,
            perturb=self.model.objective.craft,
            apply_at_end=False,  # a resumed run calls `fit` twice
        )
        averaging.set_model(self.model)
        return averaging

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to train."""
        return self.place.epoch >= self.config.train.epochs or self._guard_stopped()

    def run(self) -> HEAdversarialModel:
        """Trains what is left, saves `model.keras`, and returns the model."""
        remedy = f"start all workers again with the same command to resume {self.folder}"
        explained = workers.explained_loss(self.strategy, remedy)
        with explained, self._held_folder(), _stop_on_signal(self.resume):
            self._train()
            workers.leave_together(self.strategy)
        return self.model

    def _train(self) -> None:
        epoch, batch = self.place
        if batch and not self.is_complete:
            self._fit(epoch, epoch + 1, first_batch=batch)
            epoch += 1
        if epoch < self.config.train.epochs and not self._guard_stopped():
            self._fit(epoch, self.config.train.epochs, first_batch=0)
        # After a collapse the guard's weights count: the average contains the collapse.
        if self.averaging and not self._guard_stopped():
            self.averaging.apply()
        save_model(self.model, self.folder / "model.keras")

    def _fit(self, initial_epoch: int, epochs: int, first_batch: int) -> None:
        steps = self.steps - first_batch
        shown = self._shown(initial_epoch * self.steps + first_batch)
        try:
            self.model.fit(
                self.stream(initial_epoch, first_batch, epochs),
                initial_epoch=initial_epoch,
                epochs=epochs,
                steps_per_epoch=steps,
                validation_data=self.validation_batches(),
                callbacks=[
                    callbacks.StopOnNaN(),
                    *self.stateful,
                    *self.snapshots,
                    *shown,
                    self.resume,
                ],
                shuffle=False,
                verbose=0,
            )
        finally:
            for each in shown:
                if isinstance(each, callbacks.ProgressBar):
                    each.close()

    def _shown(self, first_step: int) -> list:
        """What reports progress, in the first process only."""
        if not distribution.is_chief(self.strategy):
            return []
        epochs = self.config.train.epochs
        board = keras.callbacks.TensorBoard(self.folder / "logs", write_graph=False)
        held_out = self.datasets.validation
        tests = 0 if held_out is None else len(self.validation_batches())
        progress = callbacks.ProgressBar(
            epochs * self.steps, self.steps, epochs, first_step, validation_steps=tests
        )
        return [board, progress]

    def validation_batches(self):
        """Returns the validation batches, None without any.

        An incomplete batch is left out if shapes must be static.
        """
        batch_size, validation = self.config.evaluation.batch_size, self.datasets.validation
        if validation is None or not self.has_static_shapes:
            return validation and data.eval_pipeline(validation, batch_size)
        count = self.strategy.num_replicas_in_sync
        batch_size = min(batch_size, len(validation) // count * count)
        return data.eval_pipeline(
            validation, batch_size, limit=len(validation) // batch_size * batch_size
        )

    def stream(self, initial_epoch: int, first_batch: int, epochs: int | None = None):
        """Returns the training batches from a place on, to the end of that epoch or of another."""
        return data.train_pipeline(
            self.datasets.train,
            self.config.train.batch_size,
            seed=self.config.seed,
            augmentation=augmentation_of(self.config),
            epochs=epochs or initial_epoch + 1,
            initial_epoch=initial_epoch,
            first_batch=first_batch,
            drop_remainder=self.has_static_shapes,
        )

    def _guard_stopped(self) -> bool:
        return any(getattr(each, "stopped_epoch", None) is not None for each in self.stateful)


def _stamp(path: pathlib.Path) -> tuple[int, int] | None:
    """What distinguishes a file from one that replaces it."""
    return (path.stat().st_ino, path.stat().st_mtime_ns) if path.exists() else None


def _check_shares(config, strategy) -> None:
    """Raises a ValueError if a replica would get no example, or if shapes would vary."""
    count = strategy.num_replicas_in_sync
    for name in ("train", "evaluation"):
        size = config[name].batch_size
        if size < count:
            raise ValueError(
                f"More replicas than examples in a batch; expected {name}.batch_size of at least "
                f"{count}; received {name}.batch_size={size}"
            )
        if distribution.needs_static_shapes(strategy) and size % count:
            raise ValueError(
                "Batches do not split evenly over the cores of the TPU; expected "
                f"{name}.batch_size to be a multiple of {count}; received {size}"
            )


def _check_validation(validation, strategy) -> None:
    count = strategy.num_replicas_in_sync
    if validation is not None and len(validation) < count:
        raise ValueError(
            "More replicas than validation examples; expected data.validation_examples of 0 or at "
            f"least {count}; received {len(validation)}"
        )


def _check_objective(model, has_static_shapes: bool) -> None:
    if has_static_shapes and not model.objective.supports_jit:
        raise ValueError(
            "This objective has state of varying shape, which no TPU can compile; expected one "
            f"without, not free_at; received objective={type(model.objective).__name__}"
        )


def prepare_training(
    config, output_dir, strategy: tf.distribute.Strategy | None = None
) -> Training:
    """Checks everything and loads everything; raises before any training."""
    remedy = f"start all workers again with the same command to train into {output_dir}"
    with workers.explained_loss(strategy or tf.distribute.get_strategy(), remedy):
        return Training(config, output_dir, strategy)


def run_training(
    config, output_dir, strategy: tf.distribute.Strategy | None = None
) -> HEAdversarialModel:
    """Trains a configuration into a run folder, and resumes an interrupted run."""
    return prepare_training(config, output_dir, strategy).run()


class _ResumeWithSignal(callbacks.ExactResume):
    """Saves and stops at the end of the batch during which a stop was asked for."""

    stop_requested = False

    def on_train_batch_end(self, batch, logs=None) -> None:
        super().on_train_batch_end(batch, logs)
        # After the last batch of an epoch `on_epoch_end` stops, so that its work is not lost.
        if self._agreed[-1] and batch + 1 < self._steps:
            self.save()
            raise Interrupted

    def wishes(self) -> list[bool]:
        return [*super().wishes(), self.stop_requested]

    def on_test_batch_end(self, batch, logs=None) -> None:
        self._stop_if_any_asks()

    def on_epoch_end(self, epoch, logs=None) -> None:
        super().on_epoch_end(epoch, logs)
        self._stop_if_any_asks()

    def _stop_if_any_asks(self) -> None:
        if any(workers.any_of(self.model.distribute_strategy, [self.stop_requested])):
            raise Interrupted


@contextlib.contextmanager
def _stop_on_signal(resume: _ResumeWithSignal):
    """The first Ctrl-C asks for a checkpoint; the second one ends the program as usual."""

    def ask(signal_number, frame):
        resume.stop_requested = True
        signal.signal(signal_number, previous[signal_number])
        print("\nStopping after this batch (again to stop at once) ...", file=sys.stderr)

    previous = {}
    with contextlib.suppress(ValueError):  # only the main thread may set handlers
        for number in (signal.SIGINT, signal.SIGTERM):
            previous[number] = signal.signal(number, ask)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
