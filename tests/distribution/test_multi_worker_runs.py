"""Runs of `tools/train.py` in two workers: who writes, and what remains when a worker dies."""

import signal

import numpy as np
import pytest
from run_comparison import assert_same_run
from worker_processes import answers, run_workers, workers

pytestmark = pytest.mark.slow

COMMAND = ("tools/train.py", "--config=tests/builders/tiny_config.py", "--strategy=multi_worker")


def saved_at(folder):
    path = folder / "checkpoints" / "latest.npz"
    return path.stat().st_mtime_ns if path.exists() else 0


def interrupted(folder, victim, signal_number):
    """Starts both workers, signals one of them after its first checkpoint, and waits."""
    before = saved_at(folder)
    with workers(*COMMAND, f"--output_dir={folder}") as running:
        running[victim].wait_for(lambda: saved_at(folder) > before)
        running[victim].send_signal(signal_number)
        return answers(running)


def place_in(folder):
    with np.load(folder / "checkpoints" / "latest.npz") as archive:
        return str(archive["meta"])


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """An uninterrupted run, in which each worker is told to write to a folder of its own."""
    folder = tmp_path_factory.mktemp("reference")
    ended = run_workers(*COMMAND, f"--output_dir={folder}/worker-{{index}}")
    for code, _, err in ended:
        assert code == 0, err
    return folder, ended


def test_only_the_first_worker_writes(reference):
    folder, ended = reference
    assert [each.name for each in folder.iterdir()] == ["worker-0"]
    written = {each.name for each in (folder / "worker-0").iterdir()}
    assert {"config.json", "history.csv", "checkpoints", "logs", "model.keras"} <= written
    assert "2 replicas in 2 workers; this is worker 0" in ended[0][1]
    assert "2 replicas in 2 workers; this is worker 1" in ended[1][1]
    assert "epoch 3/3" in ended[0][1] and "epoch" not in ended[1][1]


def test_workers_that_see_other_checkpoints_are_refused(reference):
    folder, _ = reference
    for code, _, err in run_workers(*COMMAND, f"--output_dir={folder}/worker-{{index}}"):
        assert code == 2, err
        assert len(err.splitlines()) == 1, err
        assert err.startswith("error: Workers disagree about the checkpoint; expected a run folder")


def test_killed_workers_resume_with_the_same_result(reference, tmp_path):
    """The second one by `kill -9`, the first one by `kill -9`, and Ctrl-C at one of them."""
    folder = tmp_path / "run"
    places = []
    for victim in (1, 0):
        ended = interrupted(folder, victim, signal.SIGKILL)
        assert ended[victim][0] == -signal.SIGKILL
        code, _, err = ended[1 - victim]
        assert code == 1, err
        assert err.splitlines()[-1].startswith(
            "error: Another worker has stopped, and this one cannot go on without it; start all "
            f"workers again with the same command to resume {folder}"
        )
        assert "Traceback" not in err
        places.append(place_in(folder))
    for code, out, err in interrupted(folder, 1, signal.SIGINT):
        assert code == 130, err
        assert out.splitlines()[-1].startswith("Interrupted; the checkpoint is in ")
    places.append(place_in(folder))
    assert not (folder / "model.keras").exists() and len(set(places)) > 1
    for code, out, err in run_workers(*COMMAND, f"--output_dir={folder}"):
        assert code == 0, err
        assert "Resuming at epoch" in out
    assert_same_run(folder, reference[0] / "worker-0")
