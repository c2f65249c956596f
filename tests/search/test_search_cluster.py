"""Chief and workers, in one process: what the chief's oracle answers, and what a worker does."""

import json
import shutil
import threading
import time

import grpc
import pytest
from search_folders import Trials, become, make, run, run_until_killed
from waiting import wait_until

from he_keras import search
from he_keras.search import cluster, oracle

GRID = search.SearchSettings(tuner="grid", space={"scale": "5,10,15", "margin": "0,0.2"})


@pytest.fixture
def chief(tmp_path, monkeypatch):
    become(monkeypatch, "chief")
    return make(GRID, tmp_path).oracle


def end(chief, trial, robust=0.5):
    folder = chief.trial_folder(trial.trial_id)
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
    again = make(GRID, tmp_path).oracle
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
        tuner = make(GRID, tmp_path)
        tuner.save()
        chief = tuner.oracle
        chief.create_trial("one")
        end(chief, chief.create_trial("two"))
        chief.create_trial("two")
    trials = Trials()
    # Two orphans, one after the other; a kill in the first must not lose the second.
    run_until_killed(GRID, tmp_path, 1)
    found = run(GRID, tmp_path, trials)
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


def test_the_chief_answers_one_thread_at_a_time(chief):
    """As keras-tuner's documentation asks of methods that override its own."""
    first = chief.create_trial("one")
    calls = {
        "create": lambda: chief.create_trial("three"),
        "end": lambda: end(chief, first),
        "forget": chief.forget_lost_workers,
    }
    threads = [threading.Thread(target=each, name=name) for name, each in calls.items()]
    waiting = []

    def listen(_):
        if not waiting:
            for thread in threads:
                thread.start()
                thread.join(0.1)
            waiting.extend(thread.name for thread in threads if thread.is_alive())

    chief.listener = listen
    chief.create_trial("two")
    for thread in threads:
        thread.join()
    assert waiting == ["create", "end", "forget"]
    assert set(chief.ongoing_trials) == {"two", "three"}


def test_the_chief_waits_for_a_worker_that_waits(chief):
    trials = [chief.create_trial(str(number)) for number in range(6)]
    assert chief.create_trial("idle").status == "IDLE"
    for trial in trials:
        end(chief, trial)
    for number in range(6):
        assert chief.create_trial(str(number)).status == "STOPPED"
    assert chief.tuner_ids == {"idle"}
    chief.forget_lost_workers()
    assert chief.tuner_ids == {"idle"}
    assert chief.create_trial("idle").status == "STOPPED"
    assert not chief.tuner_ids


def test_the_chief_leaves_when_all_have_gone(chief, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(oracle.time, "monotonic", lambda: clock[0])
    trials = [chief.create_trial(str(number)) for number in range(6)]
    assert chief.create_trial("dead").status == "IDLE"
    for trial in trials:
        end(chief, trial)
    assert [chief.create_trial(str(number)).status for number in range(6)] == ["STOPPED"] * 6
    chief.forget_lost_workers()
    assert chief.tuner_ids == {"dead"}
    clock[0] = 121.0
    chief.forget_lost_workers()
    assert not chief.tuner_ids and not chief.ongoing_trials


def test_a_port_that_is_taken(monkeypatch):
    import socket

    with socket.socket() as taken:
        # As another chief's: without care, gRPC would share it.
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        become(monkeypatch, "chief", taken.getsockname()[1])
        with pytest.raises(OSError, match="The chief cannot listen; expected a free port"):
            cluster.check_port_is_free()


def test_a_worker_does_not_wait_where_the_search_is_over():
    with pytest.MonkeyPatch.context() as patch:
        become(patch, "worker")
        asked = iter([False, True])
        assert cluster.wait_for_chief(lambda: next(asked)) is False


class Connection:
    """A worker's connection to the chief, which is lost as often as it is told to be."""

    objective = "robust_accuracy"

    def __init__(self, losses, code=grpc.StatusCode.UNAVAILABLE):
        self.losses, self.code = losses, code

    def create_trial(self, tuner_id):
        self.losses -= 1
        if self.losses < 0:
            return tuner_id
        error = grpc.RpcError()
        error.code = lambda: self.code
        raise error


def test_a_call_that_loses_its_connection_is_made_again(monkeypatch):
    monkeypatch.setattr(cluster, "_RETRY_SECONDS", (0.0, 0.0))
    patient = cluster.PatientOracle(Connection(losses=2), lambda: False)
    assert patient.objective == "robust_accuracy"
    assert patient.create_trial("one") == "one"
    with pytest.raises(grpc.RpcError):
        cluster.PatientOracle(Connection(losses=3), lambda: False).create_trial("one")
    other = Connection(losses=1, code=grpc.StatusCode.DEADLINE_EXCEEDED)
    with pytest.raises(grpc.RpcError):
        cluster.PatientOracle(other, lambda: False).create_trial("one")
    with pytest.raises(cluster.SearchIsOver):
        cluster.PatientOracle(Connection(losses=1), lambda: True).create_trial("one")


def test_heartbeat(tmp_path):
    pulse = tmp_path / cluster.HEARTBEAT
    with cluster.heartbeat(tmp_path, timeout_seconds=0.06):
        wait_until(pulse.exists)
        first = pulse.stat().st_mtime_ns
        wait_until(lambda: pulse.stat().st_mtime_ns > first)
        # A folder that cannot be written to is the trial's business, not the pulse's.
        shutil.rmtree(tmp_path)
    assert not [each for each in threading.enumerate() if each.name == "he_keras.search"]
