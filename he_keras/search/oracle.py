"""keras-tuner's oracles, which here survive a kill at any moment and the loss of a worker.

An oracle decides what is tried next and records what came of it. docs/reference/search.md lists
what keras-tuner's own oracles lose at a kill, and what is done about it here.

This module imports keras-tuner, so it is only imported by functions.
"""

import pathlib
import time
from collections.abc import Callable
from typing import Any

import keras_tuner
import numpy as np
from keras_tuner import oracles

from he_keras.files import read_json, write_json
from he_keras.search.settings import HEARTBEAT, METRIC, PROJECT, SearchSettings, role

_ENDED = ("COMPLETED", "FAILED")
# keras-tuner would raise at its own limit while it holds a lock, and all workers would wait for
# ever. `failed_in_a_row` has the limit instead.
_UNLIMITED = 10**9


class DurableOracle(keras_tuner.Oracle):
    """What all oracles here have in common. It stands before keras-tuner's own oracle.

    Args:
        settings: the settings of the search.
        folder: folder of the search.
        **options: arguments of keras-tuner's oracle.

    Attributes:
        listener: a function that is called with the oracle when a trial begins or ends.
    """

    ongoing_trials: dict[str, Any]

    def __init__(self, settings: SearchSettings, folder: pathlib.Path, **options) -> None:
        super().__init__(**options)
        self.verbose = 0
        self.settings = settings
        self.project = pathlib.Path(folder) / PROJECT
        self.listener: Callable[[Any], None] = lambda oracle: None
        # How many trials had ended when this program began.
        self._num_ended_before = 0
        # Of each trial that is going on: its last heartbeat, and when that was first seen.
        self._heartbeats: dict[str, tuple[float, float]] = {}
        # When each worker last asked for a trial.
        self._last_requests: dict[str, float] = {}

    # Files: complete or not there at all

    @property
    def state_file(self) -> pathlib.Path:
        """The file of the oracle's state."""
        return self.project / "oracle.json"

    def trial_folder(self, trial_id: str) -> pathlib.Path:
        """Returns the folder of a trial."""
        return self.project / f"trial_{trial_id}"

    def save(self) -> None:
        """Writes the state."""
        write_json(self.state_file, self.get_state())

    def _save_trial(self, trial) -> None:
        write_json(self.trial_folder(trial.trial_id) / "trial.json", trial.get_state())

    def reload(self) -> None:
        """Reads the state, and repairs what a kill between two files has left."""
        super().reload()
        for trial_id in set(self.trials) - set(self.start_order):
            # The state was not written any more: the same trial will be drawn again.
            del self.trials[trial_id]
        state = read_json(self.state_file)
        self._retry_queue = list(state["retry_queue"])
        for tuner_id, trial_id in state["ongoing_trials"].items():
            trial = self.trials[trial_id]
            if trial.status in _ENDED:
                # Its own file, which is written before the state, says that it has ended.
                self.end_order += [] if trial_id in self.end_order else [trial_id]
            elif role() == "chief":
                # The worker may still be training it. If not, it asks for its trial again.
                self.ongoing_trials[tuner_id] = trial
            else:
                self._retry_queue.append(trial_id)
        self._num_ended_before = len(self.end_order)

    # What comes next

    @keras_tuner.synchronized
    def create_trial(self, tuner_id: str):
        """Returns a trial to run, or one that says to wait or to stop."""
        self._last_requests[tuner_id] = time.monotonic()
        self._requeue_trials_of_lost_workers(tuner_id)
        trial = super().create_trial(tuner_id)
        self._heartbeats.pop(trial.trial_id, None)
        if trial.status == "STOPPED" and self.ongoing_trials:
            # Another worker may be lost before it ends. Then this one takes over its trial.
            self.tuner_ids.add(tuner_id)
            trial.status = "IDLE"
        if trial.status == "RUNNING":
            self.listener(self)
        return trial

    def populate_space(self, trial_id: str) -> dict:
        """Returns the values of a new trial, unless there were enough trials or failures."""
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

    @keras_tuner.synchronized
    def end_trial(self, trial) -> None:
        """Records the end of a trial. A second end of the same trial changes nothing."""
        if trial.trial_id not in self.end_order:
            super().end_trial(trial)
        self.ongoing_trials = {
            tuner_id: each
            for tuner_id, each in self.ongoing_trials.items()
            if each.trial_id != trial.trial_id
        }
        self.listener(self)

    # Workers that are lost

    @keras_tuner.synchronized
    def forget_lost_workers(self) -> None:
        """Waits no longer for workers that were told to wait and have not asked again.

        keras-tuner's chief ends when no trial is going on and no worker is known any more.
        """
        now = time.monotonic()
        for tuner_id in self.tuner_ids - set(self.ongoing_trials):
            if now - self._last_requests[tuner_id] > self.settings.worker_timeout:
                self.tuner_ids.discard(tuner_id)

    def _requeue_trials_of_lost_workers(self, tuner_id: str) -> None:
        """Puts the trials of other workers that show no sign of life back into the queue."""
        if role() != "chief":
            return
        for other, trial in list(self.ongoing_trials.items()):
            if other != tuner_id and self._is_silent(trial.trial_id):
                del self.ongoing_trials[other]
                self.tuner_ids.discard(other)
                self._retry_queue.append(trial.trial_id)

    def _is_silent(self, trial_id: str) -> bool:
        """Whether a trial's heartbeat has stood still for too long.

        The heartbeat's time is only compared with itself, so that the clocks of other machines do
        not matter.
        """
        path = self.trial_folder(trial_id) / HEARTBEAT
        stamp, now = path.stat().st_mtime if path.exists() else 0.0, time.monotonic()
        stamp_before, first_seen = self._heartbeats.setdefault(trial_id, (stamp, now))
        if stamp_before != stamp:
            self._heartbeats[trial_id] = (stamp, now)
            return False
        if now - first_seen <= self.settings.worker_timeout:
            return False
        del self._heartbeats[trial_id]
        return True


class RandomOracle(DurableOracle, oracles.RandomSearchOracle):
    """Draws every trial at random."""


class HyperbandOracle(DurableOracle, oracles.HyperbandOracle):
    """Trains many trials briefly, and the better ones longer."""


class _RepeatableDraws(oracles.BayesianOptimizationOracle):
    """The Bayesian search, with random numbers that depend on the number of the trial only."""

    def populate_space(self, trial_id: str) -> dict:
        """Returns the values of a new trial."""
        self._random_state = np.random.RandomState([self.seed, len(self.trials)])
        return super().populate_space(trial_id)


class BayesianOracle(DurableOracle, _RepeatableDraws):
    """Draws trials where a Gaussian process promises most."""


class _GridPoints(keras_tuner.Oracle):
    """Tries a list of points in its order; the number of trials says which is next."""

    settings: SearchSettings

    def populate_space(self, trial_id: str) -> dict:
        """Returns the next point."""
        points = self.settings.parsed_space().grid()
        position = len(self.start_order)
        if position >= len(points):
            return {"status": "STOPPED", "values": None}
        return {"status": "RUNNING", "values": points[position]}


class GridOracle(DurableOracle, _GridPoints):
    """Tries every point of a grid."""


def make_oracle(
    settings: SearchSettings, folder: pathlib.Path, seed: int, max_epochs: int
) -> DurableOracle:
    """Returns an oracle that maximises the robust accuracy.

    Args:
        settings: the settings of the search.
        folder: folder of the search.
        seed: seed of what the tuner draws.
        max_epochs: epochs of a whole training; hyperband's first stages have fewer.
    """
    kinds: dict[str, tuple[type[DurableOracle], dict]] = {
        "random": (RandomOracle, {"max_trials": None}),
        "bayesian": (BayesianOracle, {"max_trials": None}),
        "hyperband": (HyperbandOracle, {"max_epochs": max_epochs, "factor": settings.factor}),
        "grid": (GridOracle, {}),
    }
    kind, options = kinds[settings.tuner]
    return kind(
        settings,
        folder,
        objective=keras_tuner.Objective(METRIC, "max"),
        # keras-tuner takes the seed 0 for none.
        seed=seed + 1,
        max_consecutive_failed_trials=_UNLIMITED,
        **options,
    )
