"""A search that is killed, starved of disk or robbed of a worker loses nothing."""

import json

import pytest
import search_folders
from search_folders import Kill, Trials, make, rows, run, run_until_killed, state

from he_keras import search
from he_keras.search import oracle
from he_keras.search import tuner as tuner_module

RANGES = {"scale": "5:30", "margin": "0:0.4"}
VALUES = {"scale": "5,10,15", "margin": "0,0.2"}
SETTINGS = {
    "random": search.SearchSettings(space=RANGES, max_trials=6),
    "bayesian": search.SearchSettings(tuner="bayesian", space={"scale": "5:30"}, max_trials=5),
    "hyperband": search.SearchSettings(tuner="hyperband", space=RANGES, max_trials=14),
    "grid": search.SearchSettings(tuner="grid", space=VALUES),
}


# scikit-learn's Gaussian process takes seconds.
TUNERS = [
    pytest.param(name, marks=[pytest.mark.slow] if name == "bayesian" else []) for name in SETTINGS
]


def kill(*args, **kwargs):
    raise Kill


@pytest.mark.parametrize("tuner", TUNERS)
@pytest.mark.parametrize("at", [1, 4])
def test_killed_in_a_trial(tmp_path, tuner, at):
    settings = SETTINGS[tuner]
    reference = run(settings, tmp_path / "reference")
    run_until_killed(settings, tmp_path / "killed", at)
    trials = Trials()
    assert run(settings, tmp_path / "killed", trials) == reference
    # The trial that was killed is the first that is run again, and none before it is.
    assert trials.calls[0][1] == reference[at - 1]["run"].split("/")[0]
    assert len(trials.calls) == len(reference) - at + 1


@pytest.mark.parametrize(
    "tuner", ["random", pytest.param("hyperband", marks=pytest.mark.slow), "grid"]
)
@pytest.mark.parametrize("file", ["oracle.json", "trial.json", "result.json"])
@pytest.mark.parametrize("number", [1, 2])
def test_killed_before_a_file_takes_its_name(tmp_path, monkeypatch, tuner, file, number):
    """At each write of the first trials: what is written and what is not must fit together."""
    settings = SETTINGS[tuner]
    reference = run(settings, tmp_path / "reference")
    count = 0

    def strike(path, content, write):
        nonlocal count
        count += path.name == file
        if path.name == file and count == number:
            raise Kill
        write(path, content)

    with monkeypatch.context() as patch:
        for module in (oracle, tuner_module):
            write = module.write_json
            patch.setattr(module, "write_json", lambda path, x, write=write: strike(path, x, write))
        with pytest.raises(Kill):
            run(settings, tmp_path / "killed")
    assert run(settings, tmp_path / "killed") == reference
    ended = state(tmp_path / "killed")["end_order"]
    assert sorted(ended) == sorted(set(ended))


def test_a_finished_trial_is_not_run_again(tmp_path, monkeypatch):
    """Killed after the result was written, before the oracle heard of it."""
    settings = SETTINGS["random"]
    monkeypatch.setattr(oracle.DurableOracle, "end_trial", kill)
    with pytest.raises(Kill):
        run(settings, tmp_path)
    monkeypatch.undo()
    trials = Trials()
    assert len(run(settings, tmp_path, trials)) == 6
    assert len(trials.calls) == 5


def test_more_trials_than_before(tmp_path):
    few = search.SearchSettings(space=RANGES, max_trials=3)
    run(few, tmp_path / "extended")
    trials = Trials()
    assert run(SETTINGS["random"], tmp_path / "extended", trials) == run(
        SETTINGS["random"], tmp_path / "at once"
    )
    assert len(trials.calls) == 3


# Trials that fail


def fail_at(*numbers):
    def strike(number, values):
        if number in numbers:
            raise FloatingPointError(f"loss is NaN in call {number}")

    return Trials(strike)


@pytest.mark.parametrize("tuner", TUNERS)
def test_a_failed_trial_is_recorded_and_the_search_goes_on(tmp_path, tuner, capfd):
    found = run(SETTINGS[tuner], tmp_path, fail_at(2))
    assert [row["status"] for row in found].count("failed") == 1
    assert found[1]["error"] == "FloatingPointError: loss is NaN in call 2"
    assert found[1]["robust_accuracy"] is None
    assert found[-1]["status"] == "completed" and len(found) >= 5
    failure = json.loads((tmp_path / "tuner" / "trial_0001" / "failure.json").read_text())
    assert "in strike" in failure["traceback"]
    assert "Traceback" not in "".join(capfd.readouterr())


def test_a_failed_trial_is_not_run_again(tmp_path, monkeypatch):
    """Killed after the trial's own file says that it failed, before the oracle's does."""
    count = 0

    def strike(path, content):
        nonlocal count
        count += path.name == "oracle.json"
        if count == 3:
            raise Kill
        write_json(path, content)

    write_json = oracle.write_json
    with monkeypatch.context() as patch:
        patch.setattr(oracle, "write_json", strike)
        with pytest.raises(Kill):
            run(SETTINGS["random"], tmp_path, fail_at(1))
    trials = Trials()
    statuses = [row["status"] for row in run(SETTINGS["random"], tmp_path, trials)]
    assert statuses == ["failed", *["completed"] * 5] and len(trials.calls) == 5
    assert len(state(tmp_path)["end_order"]) == 6


def test_several_failures_in_a_row_stop_the_search(tmp_path):
    settings = SETTINGS["random"]
    tuner = make(settings, tmp_path, fail_at(1, 3, 4, 5))
    search.run_trials(tuner)
    statuses = [row["status"] for row in rows(tuner, tmp_path)]
    assert statuses == ["failed", "completed", "failed", "failed", "failed"]
    assert [each.trial_id for each in tuner.oracle.failed_in_a_row()] == ["0002", "0003", "0004"]
    # The cause may be gone when the command is given again: those before do not count.
    tuner = make(settings, tmp_path)
    search.run_trials(tuner)
    assert rows(tuner, tmp_path)[-1]["status"] == "completed"
    assert len(tuner.oracle.trials) == 6 and tuner.oracle.failed_in_a_row() == []


def test_a_full_disk_ends_the_search_and_not_the_trial(tmp_path):
    def strike(number, values):
        if number == 2:
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        run(SETTINGS["random"], tmp_path, Trials(strike))
    assert run(SETTINGS["random"], tmp_path) == run(SETTINGS["random"], tmp_path / "reference")


def test_ctrl_c_is_no_failure(tmp_path):
    def strike(number, values):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(SETTINGS["random"], tmp_path, Trials(strike))
    assert [row["status"] for row in run(SETTINGS["random"], tmp_path)] == ["completed"] * 6


def test_folders_of_searches_are_what_the_helper_says(tmp_path):
    found = run(SETTINGS["grid"], tmp_path)
    assert [row["run"] for row in found] == [f"trial_000{i}/run" for i in range(6)]
    assert search_folders.state(tmp_path)["ongoing_trials"] == {}
