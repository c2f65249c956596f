"""keras-tuner's oracles, made to survive a kill at any moment and the loss of a worker.

An oracle decides what is tried next and keeps the books. Those of keras-tuner 1.4.8 write their
files in place, forget the state of a grid and of the Bayesian search's random numbers, restart a
search that is killed during its first trial, run a trial again that ended just before a kill, and
wait for a lost worker for ever. `make_oracle` returns them without that. keras-tuner is imported
there, so that `import he_keras` does not load it; the classes here come before its own in the order
of inheritance.
"""

import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from he_keras.atomic_files import write_json
from he_keras.search.cluster import HEARTBEAT
from he_keras.search.settings import SearchSettings, role

METRIC = "robust_accuracy"
_ENDED = ("COMPLETED", "FAILED")
_NEVER = 10**9
# Without this, mypy takes what keras-tuner's classes have for missing.
_Oracle: Any = object


class DurableOracle(_Oracle):
    """What all oracles here have in common.

    Attributes:
        settings: the settings of the search.
        listener: called with the oracle whenever a trial begins or ends.
    """

    settings: SearchSettings
    listener: Callable[[Any], None]
    ongoing_trials: dict[str, Any]

    def __init__(self, settings: SearchSettings, **options) -> None:
        super().__init__(**options)
        self.settings = settings
        self.listener = lambda oracle: None
        self._num_ended_before = 0
        self._seen: dict[str, tuple[float, float]] = {}
        self._contacts: dict[str, float] = {}

    # Files: complete or not there at all

    def save(self) -> None:
        """Writes the state."""
        write_json(self._state_file(), self.get_state())

    def _save_trial(self, trial) -> None:
        write_json(self._trial_folder(trial.trial_id) / "trial.json", trial.get_state())

    def _state_file(self) -> pathlib.Path:
        return pathlib.Path(self._get_oracle_fname())

    def _trial_folder(self, trial_id: str) -> pathlib.Path:
        return pathlib.Path(self._get_trial_dir(trial_id))

    def reload(self) -> None:
        """Reads the state, and sorts out what a kill between two files left behind."""
        super().reload()
        for trial_id in set(self.trials) - set(self.start_order):
            # Its file is older than the state: the same trial will be drawn again.
            del self.trials[trial_id]
        state = json.loads(self._state_file().read_text())
        self._retry_queue = list(state["retry_queue"])
        for tuner_id, trial_id in state["ongoing_trials"].items():
            trial = self.trials[trial_id]
            if trial.status in _ENDED:
                # Ended in its own file, which is written first.
                self.end_order += [] if trial_id in self.end_order else [trial_id]
            elif role() == "chief":
                # The worker may be at work still; if not, it asks for its trial again.
                self.ongoing_trials[tuner_id] = trial
            else:
                self._retry_queue.append(trial_id)
        self._num_ended_before = len(self.end_order)

    # What comes next

    def create_trial(self, tuner_id: str):
        """Returns a trial to run, or one that says to wait or to stop."""
        self._contacts[tuner_id] = time.monotonic()
        self._take_from_the_lost(tuner_id)
        trial = super().create_trial(tuner_id)
        self._seen.pop(trial.trial_id, None)
        if trial.status == "STOPPED" and self.ongoing_trials:
            # Another worker may be lost before it ends: somebody has to take over its trial.
            self.tuner_ids.add(tuner_id)
            trial.status = "IDLE"
        if trial.status == "RUNNING":
            self.listener(self)
        return trial

    def populate_space(self, trial_id: str) -> dict:
        """Returns the values of a new trial, unless there were enough of them or of failures."""
        limit = self.settings.num_trials
        if self.failed_in_a_row() or (limit and len(self.trials) >= limit):
            return {"status": "STOPPED", "values": None}
        return super().populate_space(trial_id)

    def failed_in_a_row(self) -> list:
        """Returns the last trials of this program if so many failed that the search stops."""
        ended = self.end_order[self._num_ended_before :][-self.settings.max_failures :]
        trials = [self.trials[trial_id] for trial_id in ended]
        enough = len(trials) == self.settings.max_failures
        return trials if enough and all(trial.status == "FAILED" for trial in trials) else []

    def end_trial(self, trial) -> None:
        """Records the end of a trial."""
        if trial.trial_id not in self.end_order:
            super().end_trial(trial)
        self.ongoing_trials = {
            tuner_id: each
            for tuner_id, each in self.ongoing_trials.items()
            if each.trial_id != trial.trial_id
        }
        self.listener(self)

    def has_been_left(self) -> bool:
        """Whether no trial is going on and every worker was told to stop, or is lost."""
        now, patience = time.monotonic(), self.settings.worker_timeout
        waiting = [each for each in list(self.tuner_ids) if now - self._contacts[each] <= patience]
        return not self.ongoing_trials and not waiting

    def _take_from_the_lost(self, tuner_id: str) -> None:
        """Puts the trials of other workers that show no sign of life back in the queue."""
        if role() != "chief":
            return
        for other, trial in list(self.ongoing_trials.items()):
            if other != tuner_id and self._is_silent(trial.trial_id):
                del self.ongoing_trials[other]
                self.tuner_ids.discard(other)
                self._retry_queue.append(trial.trial_id)

    def _is_silent(self, trial_id: str) -> bool:
        """Whether the heartbeat's time stays the same; clocks of other machines do not matter."""
        path = self._trial_folder(trial_id) / HEARTBEAT
        stamp, now = path.stat().st_mtime if path.exists() else 0.0, time.monotonic()
        before, since = self._seen.setdefault(trial_id, (stamp, now))
        if before != stamp:
            self._seen[trial_id] = (stamp, now)
            return False
        if now - since <= self.settings.worker_timeout:
            return False
        del self._seen[trial_id]
        return True


class GridPoints(_Oracle):
    """Tries a list of points in its order; the number of trials says which is next."""

    def populate_space(self, trial_id: str) -> dict:
        """Returns the next point."""
        points = self.settings.parsed_space().grid()
        position = len(self.start_order)
        if position >= len(points):
            return {"status": "STOPPED", "values": None}
        return {"status": "RUNNING", "values": points[position]}


class RepeatableDraws(_Oracle):
    """The Bayesian search, with random numbers that depend on the number of the trial only."""

    def populate_space(self, trial_id: str) -> dict:
        """Returns the values of a new trial."""
        self._random_state = np.random.RandomState([self.seed, len(self.trials)])
        return super().populate_space(trial_id)


def make_oracle(settings: SearchSettings, seed: int, max_epochs: int):
    """Returns an oracle that maximises the robust accuracy.

    Args:
        settings: the settings of the search.
        seed: seed of what the tuner draws.
        max_epochs: epochs of a whole training; hyperband's first stages have fewer.
    """
    import keras_tuner

    known = keras_tuner.oracles
    kinds: dict[str, tuple[tuple, dict]] = {
        "random": ((known.RandomSearchOracle,), {"max_trials": None}),
        "bayesian": (
            (RepeatableDraws, known.BayesianOptimizationOracle),
            {"max_trials": None},
        ),
        "hyperband": (
            (known.HyperbandOracle,),
            {"max_epochs": max_epochs, "factor": settings.factor},
        ),
        "grid": ((GridPoints, keras_tuner.Oracle), {}),
    }
    bases, options = kinds[settings.tuner]
    oracle = type("SearchOracle", (DurableOracle, *bases), {})(
        settings,
        objective=keras_tuner.Objective(METRIC, "max"),
        # keras-tuner takes the seed 0 for none.
        seed=seed + 1,
        # It would raise while it holds a lock, and chief and workers would wait for ever.
        max_consecutive_failed_trials=_NEVER,
        **options,
    )
    oracle.verbose = 0
    return oracle
