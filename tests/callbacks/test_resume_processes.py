"""Runs in processes of their own, ended by `kill -9` and Ctrl-C, and resumed."""

import os
import re
import signal

import keras
import pytest
import tiny_config
from forked_programs import Program, run_script
from run_comparison import assert_same_run

from he_keras import files
from he_keras.experiment import prepare_training

pytestmark = pytest.mark.slow

STEPS = 4


def killed_run(folder, moment, number):
    """Trains the tiny experiment and kills itself, without any clean-up, at its moment."""
    count = 0

    def strike(*_, **__):
        nonlocal count
        count += 1
        if count == int(number):
            os.kill(os.getpid(), signal.SIGKILL)

    training = prepare_training(tiny_config.get_config(), folder)
    if moment == "write":
        original = os.replace

        def replace(source, target):
            if "latest.npz" in str(target):
                strike()
            original(source, target)

        files.os.replace = replace
    elif moment != "never":
        killer = keras.callbacks.Callback()
        setattr(killer, moment, strike)
        # After history and best checkpoint, before the checkpoint that knows of them.
        training.stateful.append(killer)
    training.run()


def run_process(folder, moment, number):
    program = Program(killed_run, folder, moment, number)
    _, errors = program.communicate()
    return program.returncode, errors


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume") / "reference"
    code, errors = run_process(folder, "never", 0)
    assert code == 0, errors
    return folder


@pytest.mark.parametrize(
    "kills",
    [
        [("on_train_batch_end", 3), ("on_test_batch_begin", 2), ("on_epoch_end", 1)],
        [("write", 2), ("on_train_batch_begin", 4), ("on_test_batch_end", 3)],
    ],
)
def test_killed_three_times_by_signal_9(tmp_path, reference, kills):
    folder = tmp_path / "killed"
    for moment, number in kills:
        code, errors = run_process(folder, moment, number)
        assert code == -signal.SIGKILL, (moment, number, errors)
        assert not (folder / "model.keras").exists()
    code, errors = run_process(folder, "never", 0)
    assert code == 0, errors
    assert_same_run(folder, reference, kills)


def test_ctrl_c_leaves_a_checkpoint_and_says_how_to_resume(tmp_path):
    folder = tmp_path / "run"
    command = ["tools/train.py", "--config=tests/builders/tiny_config.py", f"--output_dir={folder}"]
    process = Program(run_script, *command, "--config.train.epochs=100000")
    try:
        process.wait_for((folder / "history.csv").exists)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert "Stopping after this batch (again to stop at once)" in err
    assert "Traceback" not in err
    last = out.strip().splitlines()[-1]
    assert re.fullmatch(
        rf"Interrupted; the checkpoint is in {re.escape(str(folder))}. To resume: python "
        rf"tools/train.py --config=tests/builders/tiny_config.py "
        rf"--output_dir={re.escape(str(folder))} "
        r"--config.train.epochs=100000",
        last,
    ), out
    config = tiny_config.get_config()
    config.train.epochs = 100000
    training = prepare_training(config, folder)
    assert training.place > (0, 0)
    epoch, batch = training.place
    assert int(training.model.optimizer.iterations) == STEPS * epoch + batch
