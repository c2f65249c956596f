"""Searches in processes of their own: Ctrl-C, `kill -9`, one chief and two workers."""

import random
import shutil
import signal
import socket
import time

import pytest
from forked_programs import Program, run_script
from run_comparison import assert_same_run

from he_keras import search

pytestmark = pytest.mark.slow

COMMAND = ("tools/search.py", "--config=tests/builders/tiny_config.py")
GRID = ("--tuner=grid", "--space=scale=5,10,15,20", "--objective=margin-pgd-2")
# Three trials of one epoch, of which the best goes on to three.
HYPERBAND = ("--tuner=hyperband", "--max_trials=4", "--objective=margin-pgd-2")
CHANCE = random.Random(0)
ONE_THREAD = {"TF_NUM_INTRAOP_THREADS": "1", "OMP_NUM_THREADS": "1"}


class Search:
    """One process of a search."""

    def __init__(self, folder, flags, **variables):
        self.folder = folder
        command = [*COMMAND, *flags, f"--output_dir={folder}"]
        self.program = Program(run_script, *command, **ONE_THREAD, **variables)

    def log(self):
        return "".join(self.program.texts())

    def wait_for(self, pattern):
        self.program.wait_for(lambda: list(self.folder.glob(pattern)))

    def end(self, number):
        """Sends a signal after a while, and returns how the process ended."""
        time.sleep(CHANCE.random())
        self.program.send_signal(number)
        return self.program.wait()

    def finish(self):
        assert self.program.wait() == 0, self.log()
        assert "Traceback" not in self.log()


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A search over the grid that nothing interrupts."""
    folder = tmp_path_factory.mktemp("reference")
    Search(folder, GRID).finish()
    return folder


def trials(folder):
    found = search.read_tables(folder)
    assert found["complete"] is True
    return found["best"], [{**row, "seconds": None} for row in found["trials"]]


def assert_same_search(folder, reference):
    assert trials(folder) == trials(reference)
    runs = {row["run"] for row in search.read_tables(reference)["trials"]}
    for run in runs:
        assert_same_run(folder / "tuner" / run, reference / "tuner" / run, run)
    one, other = ((each / "best_config.py").read_text() for each in (folder, reference))
    assert one.replace(str(folder), str(reference)) == other


def checkpoint(number):
    return f"tuner/trial_{number:04}/run/checkpoints/latest.npz"


def test_interrupted_and_killed(tmp_path, reference):
    process = Search(tmp_path, GRID)
    process.wait_for(checkpoint(0))
    assert process.end(signal.SIGINT) == 130
    assert "Interrupted; finished trials and checkpoints are in" in process.log()
    for number in (1, 2):
        process = Search(tmp_path, GRID)
        process.wait_for(checkpoint(number))
        assert process.end(signal.SIGKILL) == -signal.SIGKILL
        assert not (tmp_path / "tuner" / f"trial_{number:04}" / "result.json").exists()
    process = Search(tmp_path, GRID)
    process.finish()
    assert_same_search(tmp_path, reference)
    assert "Resuming after 2 trials" in process.log()


def test_hyperband_killed_where_it_goes_on_with_a_trial(tmp_path):
    folder, copy = tmp_path / "killed", tmp_path / "reference"
    process = Search(folder, HYPERBAND)
    process.wait_for("tuner/trial_0003/heartbeat")
    process.program.send_signal(signal.SIGSTOP)
    shutil.copytree(folder, copy)
    process.program.send_signal(signal.SIGCONT)
    process.end(signal.SIGKILL)
    Search(copy, HYPERBAND).finish()
    Search(folder, HYPERBAND).finish()
    assert_same_search(folder, copy)
    assert [row["epochs"] for row in search.read_tables(folder)["trials"]] == [1, 1, 1, 3]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_chief_and_two_workers_one_killed_and_the_chief_too(tmp_path, reference):
    port = free_port()

    def start(tuner_id):
        address = {"KERASTUNER_ORACLE_IP": "127.0.0.1", "KERASTUNER_ORACLE_PORT": port}
        member = Search(folder, GRID, KERASTUNER_TUNER_ID=tuner_id, **address)
        logs[tuner_id].append(member)
        return member

    folder, logs = tmp_path / "search", {"chief": [], "one": [], "two": []}
    members = {name: start(name) for name in logs}
    try:
        members["two"].wait_for(checkpoint(0))
        members["two"].wait_for(checkpoint(1))
        assert members["one"].end(signal.SIGKILL) == -signal.SIGKILL
        members["one"] = start("one")
        assert members["chief"].end(signal.SIGKILL) == -signal.SIGKILL
        members["chief"] = start("chief")
        for name in ("one", "two", "chief"):
            members[name].finish()
    finally:
        for member in members.values():
            member.program.kill()
    assert_same_search(folder, reference)
    shares = [
        sum(each.log().count(": clean ") for each in logs[name]) for name in ("one", "two", "chief")
    ]
    assert shares[2] == 0 and shares[0] > 0 and shares[1] > 0
