"""Runs in processes of their own, ended by `kill -9` and Ctrl-C, and resumed."""

import pathlib
import random
import re
import signal
import subprocess
import sys
import time

import pytest
import tiny_config
from run_comparison import assert_same_run

from he_keras.experiment import prepare_training

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).resolve().parents[1]
STEPS = 4

# Runs tests/tiny_config.py and kills itself, without any clean-up, when its moment has come.
KILLED_RUN = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import tiny_config
import keras
from he_keras import atomic_files
from he_keras.experiment import prepare_training

folder, moment, number = sys.argv[2], sys.argv[3], int(sys.argv[4])
count = 0

def strike(*_, **__):
    global count
    count += 1
    if count == number:
        os.kill(os.getpid(), signal.SIGKILL)

training = prepare_training(tiny_config.get_config(), folder)
if moment == "write":
    original = os.replace
    def replace(source, target):
        if "latest.npz" in str(target):
            strike()
        original(source, target)
    atomic_files.os.replace = replace
elif moment != "never":
    killer = keras.callbacks.Callback()
    setattr(killer, moment, strike)
    # After history and best checkpoint, before the checkpoint that knows of them.
    training.stateful.append(killer)
training.run()
"""


def run_process(folder, moment, number):
    command = [sys.executable, "-c", KILLED_RUN, ROOT / "tests", folder, moment, str(number)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def test_killed_three_times_by_signal_9(tmp_path):
    folder, reference = tmp_path / "killed", tmp_path / "reference"
    answer = run_process(reference, "never", 0)
    assert answer.returncode == 0, answer.stderr
    step = random.SystemRandom().randint(1, STEPS + 2)
    kills = [("on_train_batch_end", step), ("on_test_batch_begin", 2), ("on_epoch_end", 1)]
    for moment, number in kills:
        answer = run_process(folder, moment, number)
        assert answer.returncode == -signal.SIGKILL, (moment, number, answer.stderr)
        assert not (folder / "model.keras").exists()
    answer = run_process(folder, "never", 0)
    assert answer.returncode == 0, answer.stderr
    assert_same_run(folder, reference, kills)


@pytest.mark.slow
@pytest.mark.parametrize("round_number", range(3))
def test_killed_at_random_steps_by_signal_9(tmp_path, round_number):
    del round_number
    moments = ["on_train_batch_begin", "on_train_batch_end", "on_test_batch_end", "write"]
    chance = random.SystemRandom()
    kills = [(chance.choice(moments), chance.randint(1, 5)) for _ in range(3)]
    folder, reference = tmp_path / "killed", tmp_path / "reference"
    run_process(reference, "never", 0)
    for moment, number in kills:
        # A run near its end may finish before its moment comes.
        assert run_process(folder, moment, number).returncode in (0, -signal.SIGKILL), kills
    assert run_process(folder, "never", 0).returncode == 0
    assert_same_run(folder, reference, kills)


def test_ctrl_c_leaves_a_checkpoint_and_says_how_to_resume(tmp_path):
    folder = tmp_path / "run"
    command = [sys.executable, "tools/train.py", "--config=tests/tiny_config.py"]
    command += [f"--output_dir={folder}", "--config.train.epochs=100000"]
    # As a shell starts a program in the foreground: SIGINT not ignored.
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        deadline = time.monotonic() + 240
        while not (folder / "history.csv").exists() and time.monotonic() < deadline:
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert "Stopping after this batch (again to stop at once)" in err
    assert "Traceback" not in err
    last = out.strip().splitlines()[-1]
    assert re.fullmatch(
        rf"Interrupted; the checkpoint is in {re.escape(str(folder))}. To resume: python "
        rf"tools/train.py --config=tests/tiny_config.py --output_dir={re.escape(str(folder))} "
        r"--config.train.epochs=100000",
        last,
    ), out
    config = tiny_config.get_config()
    config.train.epochs = 100000
    training = prepare_training(config, folder)
    assert training.place > (0, 0)
    epoch, batch = training.place
    assert int(training.model.optimizer.iterations) == STEPS * epoch + batch
