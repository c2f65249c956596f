"""Training from a configuration: a run folder that can be interrupted at any moment and resumed.

`prepare_training` does everything that can fail because of the input (configuration, data, folder,
checkpoint) before any training; `Training.run` trains.
"""

import contextlib
import dataclasses
import pathlib
import signal
import sys

import keras

from he_keras import callbacks, data
from he_keras.adversarial_model import HEAdversarialModel
from he_keras.callbacks.best_checkpoint import save_model
from he_keras.callbacks.snapshots import Snapshots
from he_keras.experiment import run_folder
from he_keras.experiment.configuration import build_model, check_config, to_plain

_SPLITS = ("train", "validation", "test")


class Interrupted(Exception):
    """Training was asked to stop (Ctrl-C); what has been done is in the checkpoint."""


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
    """A prepared run: model, data and place to start from."""

    def __init__(self, config, output_dir) -> None:
        check_config(config)
        self.config = config
        self.folder = pathlib.Path(output_dir)
        self.datasets = load_datasets(config)
        self.steps = data.steps_per_epoch(self.datasets.train, config.train.batch_size)
        self.model: HEAdversarialModel = build_model(config, self.steps)
        # Builds one batch's pipeline, so that a wrong augmentation or batch size fails here.
        self._stream(0, 0)
        self.averaging = self._weight_averaging()
        run_folder.prepare(self.folder, to_plain(config))
        self.stateful = self._stateful_callbacks()
        self.snapshots = self._snapshots()
        self.resume = _ResumeWithSignal(
            self.folder / "checkpoints" / "latest.npz",
            every_batches=config.train.checkpoint_every_batches,
            every_seconds=config.train.checkpoint_every_seconds,
            stateful_callbacks=self.stateful,
        )
        self.place = self.resume.restore(self.model) or callbacks.ResumePoint(0, 0)
        if self.place.batch >= self.steps:
            raise callbacks.CorruptCheckpointError(
                f"Checkpoint of other data; expected one of {self.steps} batches an epoch; "
                f"received batch={self.place.batch} in {self.resume.path}"
            )

    def _stateful_callbacks(self) -> list:
        """In this order: the guard may put other weights back, and adds to the history."""
        chosen: list = [self.averaging] if self.averaging else []
        if self.datasets.validation is not None and self.model.evaluation_attack is not None:
            best = callbacks.BestCheckpoint(self.folder / "checkpoints" / "best.keras")
            chosen.append(self.averaging.with_average(best) if self.averaging else best)
        if self.config.train.overfitting_guard:
            chosen.append(self._guard())
        return [*chosen, callbacks.HistoryFile(self.folder / "history.csv")]

    def _guard(self) -> callbacks.OverfittingGuard:
        settings = self.config.train
        images, labels = next(iter(self._stream(0, 0)))
        return callbacks.OverfittingGuard(
            images,
            labels,
            max_drop=settings.guard_max_drop,
            on_collapse=settings.guard_on_collapse,
            every_batches=settings.guard_every_batches,
            path=self.folder / "guard.csv" if settings.guard_every_batches else None,
        )

    def _snapshots(self) -> list:
        """What is kept where cycles end: the average, if there is one."""
        if not self.config.train.snapshots:
            return []
        snapshots = Snapshots(self.folder / "snapshots", self.config.train.cycle_ends)
        return [self.averaging.with_average(snapshots) if self.averaging else snapshots]

    def _weight_averaging(self):
        """Batch norm is measured on what the objective trains on, here of the first batches."""
        settings = self.config.train.weight_averaging
        if not settings.kind:
            return None
        count = settings.batch_norm_batches
        averaging = callbacks.WeightAveraging(
            settings.decay,
            settings.start_epoch,
            settings.kind,
            settings.warm_up,
            reestimate=self._stream(0, 0).take(count) if count else None,
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
        with _stop_on_signal(self.resume):
            epoch, batch = self.place
            if batch and not self.is_complete:
                self._fit(epoch, epoch + 1, first_batch=batch)
                epoch += 1
            if epoch < self.config.train.epochs and not self._guard_stopped():
                self._fit(epoch, self.config.train.epochs, first_batch=0)
        # After a collapse the guard's weights are wanted: the average contains the collapse.
        if self.averaging and not self._guard_stopped():
            self.averaging.apply()
        save_model(self.model, self.folder / "model.keras")
        return self.model

    def _fit(self, initial_epoch: int, epochs: int, first_batch: int) -> None:
        steps = self.steps - first_batch
        progress = callbacks.ProgressBar(
            self.config.train.epochs * self.steps,
            self.steps,
            self.config.train.epochs,
            first_step=initial_epoch * self.steps + first_batch,
        )
        board = keras.callbacks.TensorBoard(self.folder / "logs", write_graph=False)
        batch_size = self.config.evaluation.batch_size
        validation = self.datasets.validation
        try:
            self.model.fit(
                self._stream(initial_epoch, first_batch, epochs),
                initial_epoch=initial_epoch,
                epochs=epochs,
                steps_per_epoch=steps,
                validation_data=validation and data.eval_pipeline(validation, batch_size),
                callbacks=[
                    callbacks.StopOnNaN(),
                    *self.stateful,
                    *self.snapshots,
                    board,
                    progress,
                    self.resume,
                ],
                shuffle=False,
                verbose=0,
            )
        finally:
            progress.close()

    def _stream(self, initial_epoch: int, first_batch: int, epochs: int | None = None):
        return data.train_pipeline(
            self.datasets.train,
            self.config.train.batch_size,
            seed=self.config.seed,
            augmentation=augmentation_of(self.config),
            epochs=epochs or initial_epoch + 1,
            initial_epoch=initial_epoch,
            first_batch=first_batch,
        )

    def _guard_stopped(self) -> bool:
        return any(getattr(each, "stopped_epoch", None) is not None for each in self.stateful)


def prepare_training(config, output_dir) -> Training:
    """Checks everything and loads everything; raises before any training."""
    return Training(config, output_dir)


def run_training(config, output_dir) -> HEAdversarialModel:
    """Trains a configuration into a run folder, going on where an interrupted run stopped."""
    return prepare_training(config, output_dir).run()


class _ResumeWithSignal(callbacks.ExactResume):
    """Saves and stops at the end of the batch in which a stop was asked for."""

    stop_requested = False

    def on_train_batch_end(self, batch, logs=None) -> None:
        super().on_train_batch_end(batch, logs)
        # After the last batch of an epoch `on_epoch_end` stops, so that its work is not lost.
        if self.stop_requested and batch + 1 < self._steps:
            self.save()
            raise Interrupted

    def on_test_batch_end(self, batch, logs=None) -> None:
        if self.stop_requested:
            raise Interrupted

    def on_epoch_end(self, epoch, logs=None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.stop_requested:
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
