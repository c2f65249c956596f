"""keras-tuner's tuner and hypermodel over an experiment, whose trials are run folders.

This module imports keras-tuner, so it is only imported by functions.
"""

import contextlib
import pathlib
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import grpc
import keras
import keras_tuner
from keras_tuner import errors

from he_keras.files import read_json, write_json
from he_keras.search import cluster
from he_keras.search.oracle import DurableOracle, make_oracle
from he_keras.search.settings import FAILURE, METRIC, PROJECT, RESULT, SearchSettings, role
from he_keras.search.space import Space

#: How long a worker that is told to wait does so before it asks again.
_PAUSE_SECONDS = 0.5


class TrialFunction(Protocol):
    """Trains and scores one point, going on with what it finds in the folder.

    Returns at least "clean_accuracy" and "robust_accuracy".
    """

    def __call__(self, values: Mapping[str, float], folder: pathlib.Path, epochs: int) -> dict:
        """Runs the trial up to so many epochs."""


class ExperimentHyperModel(keras_tuner.HyperModel):
    """What keras-tuner asks for: the space, a model for each of its points, and how to train it.

    Args:
        space: what is searched.
        build_model: a function from values by name to a compiled model.
        run: see `TrialFunction`.
    """

    def __init__(
        self,
        space: Space,
        build_model: Callable[[Mapping[str, float]], keras.Model],
        run: TrialFunction,
    ) -> None:
        super().__init__()
        self.space = space
        self.build_model = build_model
        self.run = run

    def build(self, hp):
        """Builds the model of a point; keras-tuner learns the space from it."""
        return self.build_model(self.space.declare(hp))

    def fit(self, hp, model, *, folder: pathlib.Path, epochs: int) -> dict:
        """Trains and scores a point. The model comes from the folder; it may be half trained."""
        del model
        return self.run(self.space.declare(hp), folder, epochs)


class TrialRunner(keras_tuner.Tuner):
    """Runs trials in folders of their own; a trial that was interrupted goes on where it was.

    Args:
        oracle: decides what is tried next.
        hypermodel: trains and scores.
        settings: the settings of the search.
        max_epochs: epochs of a whole training.
        folder: folder of the search.
    """

    def __init__(
        self,
        oracle: DurableOracle,
        hypermodel: ExperimentHyperModel,
        settings: SearchSettings,
        max_epochs: int,
        folder,
    ) -> None:
        super().__init__(oracle, hypermodel, directory=str(folder), project_name=PROJECT)
        self.settings = settings
        self.max_epochs = max_epochs
        self._last_request = 0.0
        if role() != "worker" and oracle.state_file.exists():
            self.reload()

    def save(self) -> None:
        """Writes the oracle's state. The tuner has none, so that its role may change."""
        if role() != "worker":
            self.oracle.save()

    def reload(self) -> None:
        """Reads the oracle's state."""
        self.oracle.reload()

    def run_trial(self, trial, *args, **kwargs) -> dict:
        """Returns the metrics of a trial, or raises what tells keras-tuner that it failed."""
        self._last_request = 0.0
        folder = pathlib.Path(self.get_trial_dir(trial.trial_id))
        if (folder / RESULT).exists():
            return _metrics(read_json(folder / RESULT))
        chosen = trial.hyperparameters
        run = self._run_folder(trial)
        epochs = int(chosen.values.get("tuner/epochs", self.max_epochs))
        try:
            with cluster.heartbeat(folder, self.settings.worker_timeout):
                result = self.hypermodel.fit(chosen, None, folder=run, epochs=epochs)
        except OSError as error:
            # A full disk is not the trial's fault: it goes on when there is room again.
            raise errors.FatalRuntimeError(str(error)) from error
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            content = {"error": reason, "traceback": traceback.format_exc()}
            write_json(folder / FAILURE, content)
            raise errors.FailedTrialError(reason) from error
        inside = str(run.relative_to(self.project_dir))
        write_json(folder / RESULT, {**result, "epochs": epochs, "run": inside})
        return _metrics(result)

    def _run_folder(self, trial) -> pathlib.Path:
        """The trial's own, or that of the trial whose training it continues (hyperband)."""
        project = pathlib.Path(self.project_dir)
        earlier = trial.hyperparameters.values.get("tuner/trial_id")
        if not earlier:
            return project / f"trial_{trial.trial_id}" / "run"
        return project / read_json(project / f"trial_{earlier}" / RESULT)["run"]

    def pre_create_trial(self) -> None:
        """Keeps a worker that is told to wait from asking without pause."""
        pause = self._last_request + _PAUSE_SECONDS - time.monotonic()
        time.sleep(max(pause, 0.0))
        self._last_request = time.monotonic()


def make_tuner(
    settings: SearchSettings, hypermodel: ExperimentHyperModel, folder, seed: int, max_epochs: int
) -> TrialRunner:
    """Returns the tuner, with the state that it finds in the folder."""
    oracle = make_oracle(settings, pathlib.Path(folder), seed, max_epochs)
    return TrialRunner(oracle, hypermodel, settings, max_epochs, folder)


def make_hypermodel(space: Space, build_model, run: TrialFunction) -> ExperimentHyperModel:
    """Returns the hypermodel."""
    return ExperimentHyperModel(space, build_model, run)


def join(tuner: TrialRunner, is_over: Callable[[], bool]) -> bool:
    """Connects a worker to the chief, however long that takes; False if the search has ended."""
    tuner.oracle = cluster.PatientOracle(tuner.oracle, is_over)
    return cluster.wait_for_chief(is_over)


def run_trials(tuner: TrialRunner) -> None:
    """Runs what is left, in the role that the environment variables give to this process."""
    # Before the first trial: otherwise a search that is killed in it would begin anew.
    tuner.save()
    try:
        if role() == "chief":
            cluster.check_port_is_free()
            with cluster.forgetting_lost_workers(tuner.oracle):
                tuner.search()
        else:
            with _no_tracebacks(), contextlib.suppress(cluster.SearchIsOver):
                tuner.search()
    except errors.FatalError as error:
        raise (error.__cause__ or error) from None
    except grpc.RpcError as error:
        raise ConnectionError(
            "The chief does not answer; expected it to run until the workers have gone (start it "
            f"again, then this worker); received {cluster.address()}: {error}"
        ) from error


def _metrics(result: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(result[name]) for name in (METRIC, "clean_accuracy")}


@contextlib.contextmanager
def _no_tracebacks() -> Iterator[None]:
    """Keeps keras-tuner from printing what a failed trial's file and the table say."""
    from keras_tuner.src import config

    before, config.DEBUG = config.DEBUG, False
    try:
        yield
    finally:
        config.DEBUG = before
