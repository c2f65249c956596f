"""What a training or a search will cost on this machine, by a few batches; no run is written."""

import math
import tempfile
import time

import keras
import numpy as np
import tensorflow as tf

from he_keras import search
from he_keras.adversarial_model import HEAdversarialModel
from he_keras.attacks.framework.pass_counter import PassCounter
from he_keras.evaluation.run.cost import Cost, CostPart, Probe, peak_memory
from he_keras.evaluation.run.examples import Scorer
from he_keras.experiment.configuration import build_head, build_objective
from he_keras.experiment.searching import Search
from he_keras.experiment.training import Training

#: The budget of the probe: seconds, and batches, of which the first one also compiles.
_PROBE_SECONDS = 20.0
_MOST_BATCHES = 12
#: Examples and features of the tiny model whose passes are counted.
_COUNTED = 4
_FEATURES = 8


class _BatchTimes(keras.callbacks.Callback):
    """Notes when batches end; after the budget it stops."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = [time.perf_counter()]

    def on_train_batch_end(self, batch, logs=None) -> None:
        self.ends.append(time.perf_counter())
        if len(self.ends) > 2 and self.ends[-1] - self.ends[1] > _PROBE_SECONDS:
            self.model.stop_training = True

    def on_test_batch_end(self, batch, logs=None) -> None:
        self.ends.append(time.perf_counter())

    @property
    def first(self) -> float:
        """Seconds of the first batch."""
        return self.ends[1] - self.ends[0]

    @property
    def usual(self) -> float:
        """Seconds of a later batch."""
        return float(np.median(np.diff(self.ends)[1:] if len(self.ends) > 2 else [self.first]))


def cost_of_training(config, strategy: tf.distribute.Strategy | None = None) -> Cost:
    """Returns what the whole training of a configuration will cost; it writes no run folder.

    A few batches are trained and thrown away. Objectives that warm up are measured as they are
    afterwards. Checkpoints and other callbacks are not counted.

    Args:
        config: the experiment's configuration.
        strategy: what to train on; None for one device.
    """
    with tempfile.TemporaryDirectory() as folder:
        return _cost_of(Training(_warmed_up(config), folder, strategy))


def _warmed_up(config):
    changed = config.copy_and_resolve_references()
    with changed.unlocked():
        if "warm_up_steps" in changed.objective:
            changed.objective.warm_up_steps = 0
    return changed.lock()


def _cost_of(training: Training) -> Cost:
    epochs, steps, model = training.config.train.epochs, training.steps, training.model
    trained = _BatchTimes()
    batches = min(steps, _MOST_BATCHES)
    options = {"callbacks": [trained], "shuffle": False, "verbose": 0}
    model.fit(training.stream(0, 0), steps_per_epoch=batches, **options)
    images = len(training.datasets.train) * epochs
    passes = images * passes_per_image(training.config, steps)
    lines = [CostPart(f"{epochs} x {steps} batches", passes, epochs * steps * trained.usual)]
    compiling = trained.first - trained.usual
    held_out = training.datasets.validation
    if held_out is not None:
        validation = training.validation_batches()
        tested = _BatchTimes()
        # The first time compiles, also where there is one batch only.
        for _ in range(2):
            model.evaluate(validation, steps=1, callbacks=[tested], verbose=0)
        count, attack = len(held_out), model.evaluation_attack
        each = 2 + (attack.most_passes(training.config.head.num_classes) if attack else 0)
        seconds = epochs * len(validation) * tested.usual
        lines.append(CostPart(f"{epochs} validations", epochs * count * each, seconds))
        compiling += tested.first - tested.usual
    lines.append(CostPart("compilation", 0.0, max(compiling, 0.0)))
    note = f"Measured on {len(trained.ends) - 1} batches of {training.config.train.batch_size}."
    title = f"training {training.config.name}"
    return Cost(title, tuple(lines), peak_memory(), (note, "Checkpoints are not counted."))


def passes_per_image(config, steps: int) -> float:
    """Returns the passes, forward and back, that an objective takes for an image and epoch.

    They are counted on a tiny network, since they do not depend on the network.
    """
    counter = PassCounter()

    class Counted(keras.layers.Layer):
        """Counts what passes through it."""

        def call(self, inputs):
            return counter.watched(inputs)

    shape = tuple(config.network.input_shape)
    layers = [keras.layers.Flatten(), keras.layers.Dense(_FEATURES), Counted()]
    network = keras.Sequential([keras.Input(shape), *layers])
    model = HEAdversarialModel(
        network, build_head(config), build_objective(config, steps), evaluation_attack=None
    )
    model.compile(optimizer="sgd")
    images = np.random.default_rng(0).uniform(size=(_COUNTED, *shape)).astype(np.float32)
    before = counter.passes().images
    model.fit(images, np.zeros(_COUNTED, int), batch_size=_COUNTED, verbose=0)
    return (counter.passes().images - before) / _COUNTED


def cost_of_search(config, settings: search.SearchSettings) -> Cost:
    """Returns what a search will cost: its trials' trainings, and the attack that scores each.

    Args:
        config: the experiment's configuration.
        settings: the settings of the search.
    """
    with tempfile.TemporaryDirectory() as folder:
        prepared = Search(config, settings, folder)
        training = Training(_warmed_up(config), f"{folder}/trial")
        whole = _cost_of(training)
        epochs = epochs_of_trials(settings, config.train.epochs)
        scored = _scoring(prepared, training, len(epochs))
    share = sum(epochs) / config.train.epochs
    *trained, compiled = whole.parts
    # Their names begin with the number of epochs.
    names = [f"{sum(epochs)} {each.name.partition(' ')[2]}" for each in trained]
    lines = [
        CostPart(name, each.passes * share, each.seconds * share)
        for name, each in zip(names, trained, strict=True)
    ]
    name = f"{len(epochs)} x compilation"
    lines = [*lines, CostPart(name, 0.0, compiled.seconds * len(epochs)), *scored]
    title = f"a search of {len(epochs)} trials"
    note = f"The trials train {sum(epochs)} epochs in all, one trial after the other."
    return Cost(title, tuple(lines), peak_memory(), (note, *whole.notes))


def _scoring(prepared: Search, training: Training, num_trials: int) -> list[CostPart]:
    """The attack on the validation split after each trial, if every example holds out."""
    attack, size = prepared.attack(), training.config.evaluation.batch_size
    images, _ = next(training.validation_batches().as_numpy_iterator())
    # With the model's own answers as labels, all are right.
    labels = training.model.predict(images, verbose=0).argmax(axis=1)
    began = time.perf_counter()
    Scorer(training.model)(images, labels)
    scoring = time.perf_counter() - began
    probe = Probe(training.model, images, labels, [attack], size)
    count = prepared.num_examples * num_trials
    line = probe.cost_of(attack, count, f"{num_trials} x {attack.name}")
    compiling = num_trials * (scoring + probe.seconds_to_compile([attack]))
    return [line._replace(seconds=line.seconds + compiling)]


def epochs_of_trials(settings: search.SearchSettings, max_epochs: int) -> list[int]:
    """Returns how many epochs each trial trains; hyperband's later rounds go on with earlier ones.

    Example:
        >>> from he_keras.experiment.dry_run import epochs_of_trials
        >>> from he_keras.search import SearchSettings
        >>> epochs_of_trials(SearchSettings(max_trials=2), 10)
        [10, 10]
        >>> sum(epochs_of_trials(SearchSettings(tuner="hyperband"), 9))
        75
    """
    if settings.tuner == "grid":
        epochs = [max_epochs] * len(settings.parsed_space().grid())
    elif settings.tuner == "hyperband":
        epochs = _hyperband(max_epochs, settings.factor)
    else:
        epochs = [max_epochs] * settings.num_trials
    return epochs[: settings.num_trials or None]


def _hyperband(max_epochs: int, factor: int) -> list[int]:
    """keras-tuner's brackets and rounds."""
    brackets = 1 + math.floor(math.log(max_epochs, factor) + 1e-9)
    longest = math.ceil(1 + math.log(max_epochs, factor) - 1e-9)
    found = []
    for bracket in reversed(range(brackets)):
        before = 0
        for left in reversed(range(bracket + 1)):
            epochs = math.ceil(max_epochs / factor**left)
            size = math.ceil(longest / (bracket + 1) * factor**left)
            found += [epochs - before] * size
            before = epochs
    return found
