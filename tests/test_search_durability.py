"""A search that is killed, starved of disk or robbed of a worker loses nothing."""

import json
import shutil
import threading
import time

import pytest
import search_folders
from search_folders import Trials, become, make, rows, run, state

from he_keras import search
from he_keras.search import cluster, oracle

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


class Kill(BaseException):
    """Stands for the end of the process: nothing in its way catches it."""


def kill(*args, **kwargs):
    raise Kill


def run_until_killed(settings, folder, at):
    def strike(number, values):
        if number == at:
            raise Kill

    with pytest.raises(Kill):
        run(settings, folder, Trials(strike))


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
@pytest.mark.parametrize("file", ["oracle.json", "trial.json", "tuner.json", "result.json"])
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
        for module in (oracle, search.tuner):
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


# Chief and workers, in this process: what the chief's oracle answers


@pytest.fixture
def chief(tmp_path, monkeypatch):
    become(monkeypatch, "chief")
    return make(SETTINGS["grid"], tmp_path).oracle


def end(chief, trial, robust=0.5):
    folder = chief._trial_folder(trial.trial_id)
    result = {"robust_accuracy": robust, "clean_accuracy": 0.9, "epochs": 9, "run": ""}
    (folder / "result.json").write_text(json.dumps(result))
    chief.update_trial(trial.trial_id, {"robust_accuracy": robust, "clean_accuracy": 0.9})
    trial.status = "COMPLETED"
    chief.end_trial(trial)


def test_a_restarted_worker_gets_its_trial_back(chief):
    first, second = chief.create_trial("one"), chief.create_trial("two")
    assert first.trial_id != second.trial_id
    assert chief.create_trial("one").trial_id == first.trial_id


def test_a_restarted_chief_knows_who_does_what(chief, tmp_path):
    first, second = chief.create_trial("one"), chief.create_trial("two")
    end(chief, second)
    third = chief.create_trial("two")
    again = make(SETTINGS["grid"], tmp_path).oracle
    again.reload()
    # Worker one goes on and ends what it had; worker two was restarted as well.
    assert again.create_trial("two").trial_id == third.trial_id
    end(again, first)
    assert again.create_trial("one").trial_id not in (
        first.trial_id,
        second.trial_id,
        third.trial_id,
    )
    assert again.end_order == [second.trial_id, first.trial_id]


def test_one_process_finishes_what_a_chief_and_workers_began(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        become(patch, "chief")
        tuner = make(SETTINGS["grid"], tmp_path)
        tuner.save()
        chief = tuner.oracle
        chief.create_trial("one")
        end(chief, chief.create_trial("two"))
        chief.create_trial("two")
    trials = Trials()
    # Two orphans, one after the other; a kill in the first must not lose the second.
    run_until_killed(SETTINGS["grid"], tmp_path, 1)
    found = run(SETTINGS["grid"], tmp_path, trials)
    assert [row["status"] for row in found] == ["completed"] * 6
    assert sorted(call[1] for call in trials.calls) == [f"trial_000{i}" for i in (0, 2, 3, 4, 5)]


def test_another_worker_takes_over_from_a_silent_one(chief, monkeypatch, tmp_path):
    clock = [0.0]
    monkeypatch.setattr(oracle.time, "monotonic", lambda: clock[0])
    lost, alive = chief.create_trial("lost"), chief.create_trial("alive")
    for number in range(4):
        end(chief, chief.create_trial(f"quick {number}"))
    pulse = tmp_path / "tuner" / f"trial_{alive.trial_id}" / cluster.HEARTBEAT
    statuses = []
    for clock[0] in (0.0, 60.0, 119.0, 121.0):
        pulse.touch()
        statuses.append(chief.create_trial("quick 0").status)
        time.sleep(0.02)
    # It waits as long as the lost one may come back, then takes over.
    assert statuses == ["IDLE", "IDLE", "IDLE", "RUNNING"]
    assert chief.create_trial("quick 0").trial_id == lost.trial_id
    assert "lost" not in chief.tuner_ids
    end(chief, lost)
    # The lost one was only slow: its end comes twice, and counts once.
    again = chief.get_trial(lost.trial_id)
    chief.end_trial(again)
    assert chief.end_order.count(lost.trial_id) == 1
    end(chief, alive)
    assert chief.create_trial("quick 0").status == "STOPPED"


def test_of_two_silent_workers_each_gets_its_own_trial_back(chief, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(oracle.time, "monotonic", lambda: clock[0])
    one, two = chief.create_trial("one"), chief.create_trial("two")
    chief.create_trial("three")
    clock[0] = 119.0
    # Restarted just in time: the two minutes begin again.
    assert chief.create_trial("one").trial_id == one.trial_id
    clock[0] = 121.0
    assert chief.create_trial("two").trial_id == two.trial_id
    assert chief.ongoing_trials["one"].trial_id == one.trial_id
    # Silent again, all three: who comes back has the first claim to its own.
    clock[0] = 400.0
    assert chief.create_trial("one").trial_id == one.trial_id


def test_the_chief_waits_for_a_worker_that_waits(chief):
    trials = [chief.create_trial(str(number)) for number in range(6)]
    assert chief.create_trial("idle").status == "IDLE"
    for trial in trials:
        end(chief, trial)
    for number in range(6):
        assert chief.create_trial(str(number)).status == "STOPPED"
    assert not chief.has_been_left()
    assert chief.create_trial("idle").status == "STOPPED"
    assert chief.has_been_left()


def test_the_chief_leaves_when_all_have_gone(chief, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(oracle.time, "monotonic", lambda: clock[0])
    for _ in range(6):
        trial = chief.create_trial("one")
        assert not chief.has_been_left()
        end(chief, trial)
    chief.tuner_ids.add("dead")
    chief._contacts["dead"] = 0.0
    assert chief.create_trial("one").status == "STOPPED"
    assert not chief.has_been_left()
    clock[0] = 121.0
    assert chief.has_been_left()


def test_a_port_that_is_taken(chief, monkeypatch):
    import socket

    with socket.socket() as taken:
        # As another chief's: without care, gRPC would share it.
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        become(monkeypatch, "chief", taken.getsockname()[1])
        with pytest.raises(OSError, match="The chief cannot listen; expected a free port"):
            cluster.serve(chief)


def test_a_worker_does_not_wait_where_the_search_is_over():
    class Client:
        stub = None

    with pytest.MonkeyPatch.context() as patch:
        become(patch, "worker")
        asked = iter([False, True])
        assert cluster.connect(Client(), lambda: next(asked)) is False


def test_heartbeat(tmp_path):
    pulse = tmp_path / cluster.HEARTBEAT
    with cluster.heartbeat(tmp_path, timeout_seconds=0.06):
        deadline = time.monotonic() + 20
        while not pulse.exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        first = pulse.stat().st_mtime_ns
        while pulse.stat().st_mtime_ns == first and time.monotonic() < deadline:
            time.sleep(0.005)
        assert pulse.stat().st_mtime_ns > first
        # A folder that cannot be written to is the trial's business, not the pulse's.
        shutil.rmtree(tmp_path)
    assert not [each for each in threading.enumerate() if "beat" in each.name]


def test_folders_of_searches_are_what_the_helper_says(tmp_path):
    found = run(SETTINGS["grid"], tmp_path)
    assert [row["run"] for row in found] == [f"trial_000{i}/run" for i in range(6)]
    assert search_folders.state(tmp_path)["ongoing_trials"] == {}
