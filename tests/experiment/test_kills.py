"""Training, evaluation and search, each killed by signal 9 at five moments.

The moments are drawn with a seed. They lie between the start of a process and a little after its
first file, so that kills strike compilation, work and writing. Then the disk is full once. After
all of it the command ends as if nobody had disturbed it. Serving: test_serving_faults.py.
"""

import contextlib
import json
import os
import random
import resource
import signal
import time

import numpy as np
import pytest
from forked_programs import Program, run_script
from run_comparison import assert_same_run

pytestmark = pytest.mark.slow

NUM_KILLS = 5
#: How many of them strike after the first file that a process writes.
NUM_LATE = 4
#: Share of the work, after the first file, in which a kill may strike: few see the end.
WINDOW = 0.5 / NUM_KILLS
TRAINING = ("tools/train.py", "--config=tests/builders/tiny_config.py", "--config.train.epochs=20")
EVALUATION = (
    "--attacks=fgsm,pgd-30,square-200",
    "--num_examples=30",
    "--batch_size=3",
    "--nochecks",
)
SEARCH = (
    "tools/search.py",
    "--config=tests/builders/tiny_config.py",
    "--config.train.epochs=8",
    "--tuner=random",
    "--max_trials=2",
    "--objective=margin-pgd-2",
)


def start(arguments, folder):
    return Program(run_script, *arguments, f"--output_dir={folder}")


def run_with_small_files(size, *arguments):
    """A limit on the size of files stands for a full disk: the largest cannot be written."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(size), int(size)))
    run_script(*arguments)


def newest(folder):
    """The time of the newest file; files that are renamed meanwhile are passed over."""
    newest = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                newest = max(newest, os.stat(os.path.join(place, name)).st_mtime_ns)
    return newest


def to_the_end(arguments, folder):
    """Runs undisturbed; returns the seconds to the first file and those after it."""
    began, first = time.monotonic(), None
    process = start(arguments, folder)
    while process.poll() is None:
        if first is None and newest(folder):
            first = time.monotonic()
        time.sleep(0.01)
    assert process.returncode == 0, process.texts()
    return first - began, time.monotonic() - first


def on_a_full_disk(arguments, folder, reference):
    files = {path: path.stat() for path in reference.rglob("*") if path.is_file()}
    last = max(files, key=lambda path: files[path].st_mtime_ns)
    if (folder / last.relative_to(reference)).exists():
        # The last kill struck between the result and the end of the process.
        return
    size = max(status.st_size for status in files.values()) // 2
    process = Program(run_with_small_files, size, *arguments, f"--output_dir={folder}")
    _, errors = process.communicate()
    assert process.returncode in (1, 2) and "File too large" in errors, errors
    assert "Traceback" not in errors, errors


def killed_often(arguments, folder, reference):
    """Kills the program five times, fills the disk, and lets it end.

    Kills at work fall a random time after the first new file; early ones before it. A program that
    ends before its kill, because the machine has become faster, goes on in a new folder.

    Returns:
        The folders, each with a complete result, and where the kills struck.
    """
    seconds_before, seconds_after = to_the_end(arguments, reference)
    chance, struck = random.Random(arguments[0]), {"early": 0, "at work": 0}
    are_late = [True] * NUM_LATE + [False] * (NUM_KILLS - NUM_LATE)
    chance.shuffle(are_late)
    folders = [folder / "0"]
    while are_late:
        before = newest(folders[-1])
        process = start(arguments, folders[-1])
        deadline = time.monotonic() + (600 if are_late[-1] else chance.uniform(0, seconds_before))
        while process.poll() is None and newest(folders[-1]) == before:
            if time.monotonic() > deadline:
                break
            time.sleep(0.005)
        time.sleep(chance.uniform(0.0, WINDOW * seconds_after) if are_late[-1] else 0.0)
        process.send_signal(signal.SIGKILL)
        _, errors = process.communicate()
        if process.returncode == 0:
            folders.append(folder / str(len(folders)))
            continue
        assert process.returncode == -signal.SIGKILL, errors
        struck["at work" if newest(folders[-1]) != before else "early"] += 1
        are_late.pop()
    on_a_full_disk(arguments, folders[-1], reference)
    to_the_end(arguments, folders[-1])
    assert struck["at work"] >= NUM_LATE, struck
    return folders, struck


def test_training(tmp_path):
    reference = tmp_path / "reference"
    folders, struck = killed_often(TRAINING, tmp_path / "killed", reference)
    for folder in folders:
        assert_same_run(folder, reference, struck)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "trained"
    to_the_end(TRAINING[:2], folder)
    return folder


def test_evaluation(trained, tmp_path):
    arguments = ["tools/evaluate.py", f"--run={trained}", *EVALUATION]
    reference = tmp_path / "reference"
    folders, struck = killed_often(arguments, tmp_path / "killed", reference)
    with np.load(reference / "per_example.npz") as archive:
        expected = dict(archive)
    for folder in folders:
        with np.load(folder / "per_example.npz") as found:
            assert sorted(found) == sorted(expected)
            for name in found:
                np.testing.assert_array_equal(found[name], expected[name], f"{name} {struck}")
        assert json.loads((folder / "report.json").read_text())["num_examples"] == 30


def test_search(tmp_path):
    reference = tmp_path / "reference"
    folders, struck = killed_often(SEARCH, tmp_path / "killed", reference)
    best = (reference / "best_config.py").read_text()
    for folder in folders:
        found, expected = (
            json.loads((each / "trials.json").read_text())["trials"] for each in (folder, reference)
        )
        for one, other in zip(found, expected, strict=True):
            assert one | {"seconds": 0} == other | {"seconds": 0}, struck
        assert (folder / "best_config.py").read_text().replace(str(folder), str(reference)) == best
