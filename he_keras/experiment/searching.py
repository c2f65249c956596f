"""A search over a configuration: its trials are run folders, its result a configuration file.

`prepare_search` does everything that wrong input can make fail, before the first trial.
`Search.run` runs the trials that are left. The same call resumes an interrupted search and its
interrupted trial.
"""

import importlib.metadata
import pathlib
import pprint
import time
from collections.abc import Callable, Mapping

import keras
import numpy as np

from he_keras import data, search
from he_keras.callbacks import HistoryFile
from he_keras.evaluation.run.examples import Examples, Scorer
from he_keras.experiment import run_folder
from he_keras.experiment.configuration import (
    build_head,
    build_model,
    build_objective,
    build_optimizer,
    build_threat,
    check_config,
    default_config,
    to_plain,
)
from he_keras.experiment.training import Interrupted, Training, load_datasets
from he_keras.files import read_json, replacing
from he_keras.status_line import StatusLine, Ticker

BEST_CONFIG = "best_config.py"
#: Where each number that can be searched lives in a configuration.
_PLACES = {
    "scale": ("head", "scale"),
    "margin": ("head", "margin"),
    "learning_rate": ("optimizer", "learning_rate"),
    "weight_decay": ("optimizer", "weight_decay"),
    "beta": ("objective", "beta"),
}


def with_values(config, values: Mapping[str, float]):
    """Returns a copy of a configuration with other values of scale, margin, ...

    Example:
        >>> from he_keras.experiment import default_config, with_values
        >>> with_values(default_config(), {"scale": 20.0}).head.scale
        20.0
    """
    changed = config.copy_and_resolve_references()
    with changed.unlocked(), changed.ignore_type():
        for name, value in values.items():
            section, key = _PLACES[name]
            changed[section][key] = value
    return changed.lock()


class TrialTraining(Training):
    """A training that ends after some of the epochs for which its schedules are made."""

    def __init__(self, config, output_dir, epochs: int) -> None:
        super().__init__(config, output_dir)
        self.config = self.config.copy_and_resolve_references()
        self.config.train.epochs = epochs

    def seconds(self) -> float:
        """Returns the seconds of training, without interruptions."""
        history = [each for each in self.stateful if isinstance(each, HistoryFile)]
        return sum(row["seconds"] for each in history for row in each.rows)


class Search:
    """A prepared search.

    Args:
        config: the configuration of the experiment.
        settings: what is searched, how, and on which objective.
        output_dir: folder of the search.
        announce: called with a line of text when a trial begins or ends.
    """

    def __init__(
        self,
        config,
        settings: search.SearchSettings,
        output_dir,
        announce: Callable[[str], object] = lambda line: None,
    ) -> None:
        self.config, self.settings = config, settings
        self.folder = pathlib.Path(output_dir)
        self.announce = announce
        self.role = search.role()
        self.space = settings.parsed_space()
        check_config(config)
        _check_effects(config, self.space.entries)
        self.attack()
        datasets = load_datasets(config)
        if datasets.validation is None:
            raise ValueError(
                "A search scores its trials on a validation split; expected "
                "data.validation_examples > 0; received 0"
            )
        self.num_examples = len(datasets.validation)
        self.steps = data.steps_per_epoch(datasets.train, config.train.batch_size)
        _check_corners(config, self.space, self.steps)
        self.plain = {**to_plain(config), "search": settings.to_plain()}
        if self.role != "worker":
            with run_folder.held(self.folder, "searches"):
                run_folder.prepare(self.folder, self.plain, to_plain(default_config()))
        self.tuner = search.make_tuner(
            settings,
            search.make_hypermodel(self.space, self._build_model, self.run_trial),
            self.folder,
            config.seed,
            config.train.epochs,
        )

    @property
    def is_complete(self) -> bool:
        """Whether a search with these settings has ended in this folder."""
        found = search.read_tables(self.folder)
        return bool(found.get("complete")) and found["num_trials"] == self.settings.num_trials

    @property
    def num_ended(self) -> int:
        """How many trials ended before this program."""
        found = search.read_tables(self.folder).get("trials", [])
        return sum(row["status"] in ("completed", "failed") for row in found)

    def attack(self):
        """Returns a new attack of the objective: a used one would keep its model."""
        config = self.config
        threat = build_threat(config)
        return search.scale_free_attack(
            self.settings.objective, threat, config.head.num_classes, config.seed
        )

    def run(self) -> dict:
        """Runs what is left and returns what trials.json holds.

        A worker returns what is known when it has nothing left to do.
        """
        if self.role == "worker":
            return self._run()
        with run_folder.held(self.folder, "searches"):
            return self._run()

    def _run(self) -> dict:
        if self.is_complete:
            return search.read_tables(self.folder)
        if self.role == "worker":
            self._run_as_worker()
            return search.read_tables(self.folder)
        oracle = self.tuner.oracle
        oracle.listener = self._write
        if self.role == "chief":
            self.announce("Waiting for workers; this process trains nothing ...")
        search.run_trials(self.tuner)
        failures = oracle.failed_in_a_row()
        self._write(oracle, complete=not failures)
        if failures:
            error = search.collect(oracle, self.folder / search.PROJECT)[-1]["error"]
            raise RuntimeError(
                f"The last {len(failures)} trials failed; expected a space in which models train; "
                f"received {error} (trials.csv and the trials' folders tell more)"
            )
        return search.read_tables(self.folder)

    def _run_as_worker(self) -> None:
        self.announce("Looking for the chief ...")
        if not search.join(self.tuner, lambda: self.is_complete):
            return
        stored = read_json(self.folder / "config.json")
        if stored != self.plain:
            raise ValueError(
                "The chief searches with another configuration; expected the same flags for chief "
                f"and workers; received {self.folder / 'config.json'}"
            )
        search.run_trials(self.tuner)

    def _build_model(self, values: Mapping[str, float]):
        return build_model(with_values(self.config, values), self.steps)

    def run_trial(self, values: Mapping[str, float], folder: pathlib.Path, epochs: int) -> dict:
        """Trains a point, resumes what is in its folder, and scores the last model."""
        name = f"{folder.parent.name}: {_listed(values)}"
        self.announce(f"{name}, {epochs} epoch{'s' * (epochs > 1)}")
        # Frees the models of earlier trials.
        keras.backend.clear_session()
        try:
            training = TrialTraining(with_values(self.config, values), folder, epochs)
            if any(training.place) and not training.is_complete:
                epoch, batch = training.place
                self.announce(f"{name}: resuming at epoch {epoch + 1}, batch {batch + 1}")
            model = training.run()
            begin = time.monotonic()
            clean, robust = _accuracies(model, training.datasets.validation, self)
        except Interrupted:
            # keras-tuner treats every Exception as a failed trial.
            raise KeyboardInterrupt from None
        except Exception as error:
            self.announce(f"{name}: failed, {type(error).__name__}: {error}")
            raise
        self.announce(f"{name}: clean {clean:.2%}, robust {robust:.2%}")
        return {
            "clean_accuracy": clean,
            "robust_accuracy": robust,
            "num_examples": self.num_examples,
            "seconds": round(training.seconds() + time.monotonic() - begin, 2),
        }

    def _write(self, oracle, complete: bool = False) -> None:
        rows = search.collect(oracle, self.folder / search.PROJECT)
        about = {
            **self.settings.to_plain(),
            "num_trials": self.settings.num_trials,
            "seed": self.config.seed,
            "validation_examples": self.num_examples,
            "threat": build_threat(self.config).text(),
            "keras_tuner": importlib.metadata.version("keras-tuner"),
            "complete": complete,
        }
        search.write_tables(self.folder, rows, about)
        winner = search.best(rows)
        if winner is not None:
            self._write_best_config(winner)

    def _write_best_config(self, winner: Mapping) -> None:
        values = {name: winner[name] for name in self.space.entries}
        config = with_values(self.config, values)
        with config.unlocked():
            config.name = f"{self.config.name}_best"
        path = self.folder / BEST_CONFIG
        text = _SOURCE.format(
            name=self.config.name,
            trial=winner["trial"],
            values=_listed(values),
            path=path,
            clean=winner["clean_accuracy"],
            robust=winner["robust_accuracy"],
            objective=self.settings.objective,
            count=self.num_examples,
            epochs=winner["epochs"],
            assignments="\n".join(f"        {line}" for line in _assignments(config)),
        )
        with replacing(path) as temporary:
            temporary.write_text(text)


def prepare_search(config, settings: search.SearchSettings, output_dir, **options) -> Search:
    """Checks everything and loads everything; raises before any trial. See `Search`."""
    return Search(config, settings, output_dir, **options)


def run_search(config, settings: search.SearchSettings, output_dir, **options) -> dict:
    """Searches over a configuration, and resumes an interrupted search.

    Writes trials.csv, trials.json, pareto.png and best_config.py, and returns what trials.json
    holds. With keras-tuner's environment variables (KERASTUNER_TUNER_ID, KERASTUNER_ORACLE_IP,
    KERASTUNER_ORACLE_PORT) this process is the chief or a worker of a search of several.

    Example:
        >>> from he_keras import experiment, search
        >>> settings = search.SearchSettings(tuner="grid", space={"scale": "5,15"})
        >>> # experiment.run_search(config, settings, "runs/search")["best"]
    """
    return prepare_search(config, settings, output_dir, **options).run()


def _check_effects(config, names) -> None:
    """Refuses to search for a number that the configuration does not use."""
    if config.head.kind == "linear" and {"scale", "margin"} & set(names):
        raise ValueError(
            "A linear head has no scale and no margin; expected head.kind='he' or 'm_he'; received "
            "head.kind='linear'"
        )
    if "learning_rate" in names and config.schedule.name == "piecewise":
        raise ValueError(
            "A piecewise schedule has learning rates of its own; expected another schedule, or a "
            "search without learning_rate; received schedule.name='piecewise'"
        )


def _check_corners(config, space: search.Space, steps: int) -> None:
    """Builds, for every limit and value of the space, what depends on it."""
    for values in space.corners():
        changed = with_values(config, values)
        build_head(changed)
        build_objective(changed, steps)
        build_optimizer(changed, steps)


def _accuracies(model, validation, prepared: Search) -> tuple[float, float]:
    """Returns clean accuracy and robust accuracy (the worse of clean and attacked)."""
    attack, scorer = prepared.attack(), Scorer(model)
    batch_size = prepared.config.evaluation.batch_size
    examples = Examples(attack.threat, validation, batch_size)
    wrong: list[np.ndarray] = []
    broken: list[np.ndarray] = []

    def show() -> None:
        done = sum(len(each) for each in broken)
        line.count(done, len(validation), f"{attack.name}, {done:,} of {len(validation):,} images")

    with StatusLine("scoring", last_line=False) as line, Ticker(show):
        for block in examples.blocks(batch_size, None):
            wrong.append(scorer(block.images, block.labels).wrong)
            broken.append(attack(model, block.images, block.labels, block.positions).success)
            show()
    is_right = ~np.concatenate(wrong)
    withstands = ~np.concatenate(broken) & is_right
    return float(is_right.mean()), float(withstands.mean())


def _listed(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in values.items())


# Configuration files

_SOURCE = '''"""The winner of a search over {name}: trial {trial}, {values}.

Command:  python tools/train.py --config={path}
Numbers:  clean {clean:.2%}, robust {robust:.2%} under {objective}, on {count} validation
          examples after {epochs} epochs; chosen as the best of several, so expect a little less.
"""

from he_keras.experiment import default_config


def get_config():
    """Returns the configuration."""
    config = default_config()
    with config.unlocked():
{assignments}
    return config.lock()
'''


def _assignments(config) -> list[str]:
    """Returns the statements that turn the default configuration into this one."""
    return [
        f"config.{place} = {line}" if not number else f"    {line}"
        for place, value in _differences(config, default_config())
        for number, line in enumerate(_expression(value).splitlines())
    ]


def _differences(config, reference, prefix: str = "") -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    for key, value in config.items():
        place, default = f"{prefix}{key}", reference.get(key)
        is_section = hasattr(value, "keys")
        if is_section and hasattr(default, "keys") and set(value) == set(default):
            found += _differences(value, default, f"{place}.")
        elif (plain := value.to_dict() if is_section else value) != default or is_section:
            found.append((place, plain))
    return found


def _expression(value) -> str:
    return pprint.pformat(value, width=88, sort_dicts=False)
