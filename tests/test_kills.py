"""Training, evaluation and search, each killed by signal 9 at twenty random moments.

The programs run as users start them. A moment is drawn between the start of a process and a little
after the first file that it writes, so that kills strike imports, compilation, work and writing.
After all of them the command ends as if nobody had disturbed it. Serving: test_serving_faults.py.
"""

import json
import pathlib
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from run_comparison import assert_same_run

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).resolve().parents[1]
NUM_KILLS = 20
#: Share of the work, after the first file, in which a kill may strike: none must see the end.
WINDOW = 0.5 / NUM_KILLS
TRAINING = ("tools/train.py", "--config=tests/tiny_config.py", "--config.train.epochs=60")
EVALUATION = ("--attacks=fgsm,pgd-30,square-400", "--num_examples=30", "--batch_size=2")
SEARCH = (
    "tools/search.py",
    "--config=tests/tiny_config.py",
    "--config.train.epochs=20",
    "--tuner=random",
    "--max_trials=3",
    "--objective=margin-pgd-2",
)


def start(arguments, folder):
    return subprocess.Popen(
        [sys.executable, *arguments, f"--output_dir={folder}"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def newest(folder):
    times = [path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()]
    return max(times, default=0)


def to_the_end(arguments, folder):
    """Runs undisturbed; returns the seconds to the first file and those after it."""
    began, first = time.monotonic(), None
    process = start(arguments, folder)
    while process.poll() is None:
        if first is None and newest(folder):
            first = time.monotonic()
        time.sleep(0.01)
    assert process.returncode == 0, process.stderr.read()
    return first - began, time.monotonic() - first


def killed_often(arguments, folder, seconds_before, seconds_after):
    """Kills the program twenty times, lets it end, and returns where kills struck."""
    chance, struck = random.SystemRandom(), {"early": 0, "at work": 0}
    while sum(struck.values()) < NUM_KILLS:
        before = newest(folder)
        process = start(arguments, folder)
        time.sleep(chance.uniform(0.0, seconds_before))
        is_late = chance.random() < 0.7
        while is_late and process.poll() is None and newest(folder) == before:
            time.sleep(0.005)
        time.sleep(chance.uniform(0.0, WINDOW * seconds_after) if is_late else 0.0)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, f"ended too early: {struck}"
        struck["at work" if newest(folder) != before else "early"] += 1
    to_the_end(arguments, folder)
    return struck


def test_training(tmp_path):
    folder, reference = tmp_path / "killed", tmp_path / "reference"
    struck = killed_often(TRAINING, folder, *to_the_end(TRAINING, reference))
    assert_same_run(folder, reference, struck)
    assert struck["at work"] >= NUM_KILLS // 3, struck


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "trained"
    to_the_end(TRAINING[:2], folder)
    return folder


def test_evaluation(trained, tmp_path):
    arguments = ["tools/evaluate.py", f"--run={trained}", *EVALUATION]
    folder, reference = tmp_path / "killed", tmp_path / "reference"
    struck = killed_often(arguments, folder, *to_the_end(arguments, reference))
    assert struck["at work"] >= NUM_KILLS // 3, struck
    with (
        np.load(folder / "per_example.npz") as found,
        np.load(reference / "per_example.npz") as expected,
    ):
        assert sorted(found) == sorted(expected)
        for name in found:
            np.testing.assert_array_equal(found[name], expected[name], err_msg=f"{name} {struck}")
    for path in (folder, reference):
        report = json.loads((path / "report.json").read_text())
        assert report["num_examples"] == 30


def test_search(tmp_path):
    folder, reference = tmp_path / "killed", tmp_path / "reference"
    struck = killed_often(SEARCH, folder, *to_the_end(SEARCH, reference))
    assert struck["at work"] >= NUM_KILLS // 3, struck
    found, expected = (
        json.loads((each / "trials.json").read_text())["trials"] for each in (folder, reference)
    )
    for one, other in zip(found, expected, strict=True):
        assert one | {"seconds": 0} == other | {"seconds": 0}, struck
    assert (folder / "best_config.py").read_text().replace(str(folder), str(reference)) == (
        reference / "best_config.py"
    ).read_text()
