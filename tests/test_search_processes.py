"""Searches in processes of their own: Ctrl-C, `kill -9`, one chief and two workers."""

import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
from run_comparison import assert_same_run

from he_keras import search

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).resolve().parents[1]
COMMAND = (sys.executable, "tools/search.py", "--config=tests/tiny_config.py")
GRID = ("--tuner=grid", "--space=scale=5,10,15,20", "--objective=margin-pgd-2")
# Three trials of one epoch, of which the best goes on to three.
HYPERBAND = ("--tuner=hyperband", "--max_trials=4", "--objective=margin-pgd-2")
PATIENCE_SECONDS = 300


class Program:
    """One process of a search; its output goes to files."""

    def __init__(self, folder, flags, log, **variables):
        self.folder = folder
        self.log = log
        one_thread = {"TF_NUM_INTRAOP_THREADS": "1", "OMP_NUM_THREADS": "1"}
        with open(log, "a") as output:
            self.process = subprocess.Popen(
                [*COMMAND, *flags, f"--output_dir={folder}"],
                cwd=ROOT,
                stdout=output,
                stderr=output,
                env={**os.environ, **one_thread, **variables},
                # As a shell starts a program in the foreground: SIGINT not ignored.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )

    def wait_for(self, pattern):
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not list(self.folder.glob(pattern)):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)

    def end(self, number):
        """Sends a signal after a while, and returns how the process ended."""
        time.sleep(random.SystemRandom().random())
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_SECONDS)

    def finish(self):
        assert self.process.wait(PATIENCE_SECONDS) == 0, self.log.read_text()
        assert "Traceback" not in self.log.read_text()


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A search over the grid that nothing interrupts."""
    folder = tmp_path_factory.mktemp("reference")
    Program(folder, GRID, folder / "log").finish()
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
    log = tmp_path / "log"
    program = Program(tmp_path, GRID, log)
    program.wait_for(checkpoint(0))
    assert program.end(signal.SIGINT) == 130
    assert "Interrupted; finished trials and checkpoints are in" in log.read_text()
    for number in (1, 2):
        program = Program(tmp_path, GRID, log)
        program.wait_for(checkpoint(number))
        assert program.end(signal.SIGKILL) == -signal.SIGKILL
        assert not (tmp_path / "tuner" / f"trial_{number:04}" / "result.json").exists()
    Program(tmp_path, GRID, log).finish()
    assert_same_search(tmp_path, reference)
    assert "Resuming after 2 trials" in log.read_text()


def test_hyperband_killed_where_it_goes_on_with_a_trial(tmp_path):
    folder, copy, log = tmp_path / "killed", tmp_path / "reference", tmp_path / "log"
    program = Program(folder, HYPERBAND, log)
    program.wait_for("tuner/trial_0003/heartbeat")
    program.process.send_signal(signal.SIGSTOP)
    shutil.copytree(folder, copy)
    program.process.send_signal(signal.SIGCONT)
    program.end(signal.SIGKILL)
    Program(copy, HYPERBAND, log).finish()
    Program(folder, HYPERBAND, log).finish()
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
        log = tmp_path / f"{tuner_id}.log"
        return Program(folder, GRID, log, KERASTUNER_TUNER_ID=tuner_id, **address)

    folder = tmp_path / "search"
    members = {name: start(name) for name in ("chief", "one", "two")}
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
            member.process.kill()
    assert_same_search(folder, reference)
    shares = [
        (tmp_path / f"{name}.log").read_text().count(": clean ") for name in ("one", "two", "chief")
    ]
    assert shares[2] == 0 and shares[0] > 0 and shares[1] > 0
