"""What a search does, as plain values that are checked before anything else happens."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from he_keras.arguments import check_choice, check_number, check_positive_integer
from he_keras.search.space import Space

#: What a search maximises.
METRIC = "robust_accuracy"
#: keras-tuner's folder inside a search's folder.
PROJECT = "tuner"
#: Files of a trial: what it scored, why it failed, and the sign of life of its worker.
RESULT, FAILURE, HEARTBEAT = "result.json", "failure.json", "heartbeat"
TUNERS = ("random", "bayesian", "hyperband", "grid")
DEFAULT_SPACE = {"scale": "1:64:log", "margin": "0:0.5"}
_DEFAULT_TRIALS = {"random": 10, "bayesian": 10}
_VARIABLES = ("KERASTUNER_TUNER_ID", "KERASTUNER_ORACLE_IP", "KERASTUNER_ORACLE_PORT")


@dataclasses.dataclass(frozen=True)
class SearchSettings:
    """Settings of a search.

    Attributes:
        tuner: "random", "bayesian", "hyperband" or "grid".
        space: see `Space`; numbers out of scale, margin, learning_rate, weight_decay and beta.
        max_trials: number of trials; 0 for the tuner's own: 10 for random and bayesian, all for
            hyperband and grid. A finished search goes on when it is given more.
        objective: the attack of the robust accuracy that is maximised, see `scale_free_attack`.
        max_failures: the search stops after so many failed trials in a row.
        factor: hyperband keeps one of so many trials at each stage, for so many times the epochs.
        worker_timeout: seconds without a sign of life, after which another worker takes over a
            worker's trial (searches with a chief only).

    Example:
        >>> import he_keras.search
        >>> he_keras.search.SearchSettings(tuner="bayesian", space={"scale": "5:30"}).num_trials
        10
    """

    tuner: str = "random"
    space: Mapping[str, Any] | Sequence[Mapping[str, Any]] = dataclasses.field(
        default_factory=lambda: dict(DEFAULT_SPACE)
    )
    max_trials: int = 0
    objective: str = "margin-pgd-20"
    max_failures: int = 3
    factor: int = 3
    worker_timeout: float = 120.0

    def __post_init__(self) -> None:
        check_choice("tuner", self.tuner, TUNERS)
        if self.max_trials != 0:
            check_positive_integer("max_trials", self.max_trials)
        check_positive_integer("max_failures", self.max_failures)
        check_number("factor", self.factor, 2)
        check_number("worker_timeout", self.worker_timeout, 1.0)
        space = self.parsed_space()
        if self.tuner == "grid":
            space.grid()
        elif space.points:
            raise ValueError(
                "A list of points is a grid; expected tuner='grid', or a range or values for each "
                f"name; received tuner={self.tuner!r}"
            )

    def parsed_space(self) -> Space:
        """Returns the space as an object."""
        return Space(self.space)

    @property
    def num_trials(self) -> int:
        """How many trials there are at most; 0 where the tuner decides."""
        return self.max_trials or _DEFAULT_TRIALS.get(self.tuner, 0)

    def to_plain(self) -> dict:
        """Returns what decides the trials, as JSON-compatible data; not how many there are."""
        return {
            "tuner": self.tuner,
            "space": self.parsed_space().to_plain(),
            "objective": self.objective,
            "factor": self.factor,
        }


def role() -> str:
    """Returns "alone", "chief" or "worker", as keras-tuner's environment variables say."""
    given = {name: os.environ.get(name, "") for name in _VARIABLES}
    if not any(given.values()):
        return "alone"
    missing = [name for name, value in given.items() if not value]
    port = given["KERASTUNER_ORACLE_PORT"]
    if missing or not (port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(
            f"Incomplete addresses of the search; expected {', '.join(_VARIABLES)} (a port number),"
            f" or none of them for a search in one process; received {given}"
        )
    return "chief" if "chief" in given["KERASTUNER_TUNER_ID"] else "worker"
