"""`he-keras train` and what all programs share: every mistake ends in one line."""

import json
import pathlib
import signal
import sys
import time

import numpy as np
import pytest
from absl import app
from programs import ROOT, assert_one_line_error, run_process, save_npz

import he_keras as he
from he_keras.programs import cli
from he_keras_cli import PROGRAMS

TINY = f"--config={ROOT / 'tests' / 'builders' / 'tiny_config.py'}"
SMALL = f"--config={ROOT / 'configs' / 'cifar10_small.py'}"


# Help and usage


@pytest.mark.parametrize("program", PROGRAMS)
def test_help(run, program):
    code, out, err = run(program, "--help")
    assert (code, err) == (0, "")
    own_flag = {"serve": "--model_dir", "zoo": "--download", "doctor": "--[no]speed"}.get(
        program, "--output"
    )
    assert own_flag in out
    assert out.strip().startswith(sys.modules[f"he_keras.programs.{program}"].__doc__.strip()[:40])


def test_installed_command():
    command = pathlib.Path(sys.executable).with_name("he-keras")
    answer = run_process(command, "train", "--help")
    assert (answer.returncode, answer.stderr) == (0, "")
    assert "--config" in answer.stdout and "--[no]smoke" in answer.stdout
    answer = run_process(command, "trian")
    assert_one_line_error(
        (answer.returncode, answer.stdout, answer.stderr),
        "Unknown program; expected he-keras train|evaluate|merge|verify|gate|compare|transfer"
        "|analyze|search|reproduce|export|import|zoo|serve|quickstart|benchmark|doctor; "
        "received trian",
    )
    answer = run_process(command, "--help")
    assert answer.returncode == 0 and answer.stdout.startswith("usage: he-keras PROGRAM --flags")
    assert [line.split()[0] for line in answer.stdout.splitlines()[1:]] == list(PROGRAMS)


def test_command_line_can_be_pasted(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["tools/train.py", "--output_dir=my runs"])
    assert cli.command_line() == "python tools/train.py '--output_dir=my runs'"
    monkeypatch.setattr(sys, "argv", ["he-keras train", "--smoke"])
    assert cli.command_line() == "he-keras train --smoke"


def test_ctrl_c_before_training_is_no_traceback(monkeypatch, capsys):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(app, "run", interrupt)
    with pytest.raises(SystemExit) as end:
        cli.run(lambda argv: None)
    assert end.value.code == 128 + signal.SIGINT
    assert capsys.readouterr().out == "Interrupted\n"


class _InterruptedAtTheEnd:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)


def _drop_it():
    _InterruptedAtTheEnd()
    for _ in range(3000):
        time.sleep(0.01)


def _change_it():
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        raise SystemError("bad argument to internal function") from None


def _print_it():
    """As native code does that has no other use for an error."""
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        sys.excepthook(SystemError, SystemError("returned a result with an exception set"), None)
    raise RuntimeError("operation failed")


def _refuse_it():
    with cli.one_line_errors():
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ValueError("cannot be converted") from None


@pytest.mark.parametrize("work", [_drop_it, _change_it, _print_it, _refuse_it])
def test_ctrl_c_is_not_lost(monkeypatch, capsys, work):
    """A finaliser drops it, TensorFlow makes another error of it: the program ends all the same."""
    monkeypatch.setattr(app, "run", lambda *args, **kwargs: work())
    before = signal.getsignal(signal.SIGINT), sys.unraisablehook, sys.excepthook
    with pytest.raises(SystemExit) as end:
        cli.run(lambda argv: None)
    assert end.value.code == 128 + signal.SIGINT
    answer = capsys.readouterr()
    assert (answer.out, answer.err) == ("Interrupted\n", "")
    after = signal.getsignal(signal.SIGINT), sys.unraisablehook, sys.excepthook
    assert after == before


# Real processes: nothing but the one line may appear, TensorFlow's own messages included


@pytest.mark.fast_cases("evaluate-arguments2-parts2")
@pytest.mark.parametrize(
    ("program", "arguments", "parts"),
    [
        (
            "train",
            ["--config=configs/quickstart_digits.py", "--config.head.scael=10"],
            ["Unknown configuration key", "scale", "margin", "num_classes", "head.scael"],
        ),
        (
            "train",
            ["--config=configs/quickstart_digits.py", "--config.data.name={spoilt}"],
            ["outside [0, 1] or hold NaN", "images.min()=nan"],
        ),
        (
            "evaluate",
            ["--model={missing}.keras", "--data=digits"],
            ["No model; expected an existing .keras file", "missing.keras"],
        ),
    ],
)
def test_mistakes_in_a_process(tmp_path, program, arguments, parts):
    places = {"spoilt": save_npz(tmp_path / "x.npz", spoil=True), "missing": tmp_path / "missing"}
    arguments = [argument.format(**places) for argument in arguments]
    folder = tmp_path / "run"
    answer = run_process(
        sys.executable, f"tools/{program}.py", *arguments, f"--output_dir={folder}"
    )
    assert_one_line_error((answer.returncode, answer.stdout, answer.stderr), *parts)
    assert not folder.exists()


# train: mistakes


@pytest.fixture
def no_training(monkeypatch):
    def fit(*args, **kwargs):
        raise AssertionError("training began")

    monkeypatch.setattr(he.HEAdversarialModel, "fit", fit)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["No configuration; expected --config=FILE, or a name"]),
        (["--config=nowhere.py"], ["nowhere.py", "No configuration file"]),
        ([TINY, "--colour=red"], ["Unknown flag; expected one of --config", "'--colour'"]),
        ([TINY, "extra"], ["Unknown argument", "received extra"]),
        ([TINY, "--config.sede=1"], ["Unknown configuration key", "seed", "received sede"]),
        (
            [TINY, "--config.objective.steps=1"],
            ["name, num_steps, random_start, step_size", "received objective.steps"],
        ),
        ([TINY, "--config.seed.x=1"], ["Not a section; expected --config.seed=..."]),
        ([TINY, "--config.head.scale=big"], ["--config.head.scale=big"]),
        ([TINY, "--config.head.scale=-1"], ["scale=-1"]),
        ([TINY, "--config.head.kind=cos"], ["Unknown head", "m_he", "'cos'"]),
        ([TINY, "--config.train.epochs=2.5"], ["--config.train.epochs=2.5"]),
        ([TINY, "--config.train.epochs=0"], ["train.epochs=0"]),
        ([TINY, "--config.train.batch_size=0"], ["train.batch_size=0"]),
        ([TINY, "--config.threat.epsilon=8/0"], ["8/0"]),
        ([TINY, "--config.threat.epsilon=-0.1"], ["-0.1"]),
        ([TINY, "--config.threat.epsilon=2"], ["2"]),
        ([TINY, "--config.threat.epsilon=eight"], ["eight"]),
        ([TINY, "--config.threat.norm=l3"], ["l3"]),
        ([TINY, "--config.head.num_classes=7"], ["Class count mismatch", "num_classes=10", "=7"]),
        ([TINY, "--config.network.input_shape=(9,9,1)"], ["Image shape mismatch", "(9, 9, 1)"]),
        ([TINY, "--config.network.name=resnet-19"], ["resnet-19", "resnet-50"]),
        ([TINY, "--config.data.augmentation=rotate"], ["Unknown augmentation", "'rotate'"]),
        ([TINY, "--config.data.validation_examples=5000"], ["validation_examples=5000"]),
        ([TINY, "--config.evaluation.attacks=('gpd-5',)"], ["Unknown attack", "pgd-K", "gpd-5"]),
        ([TINY, "--config.evaluation.validation_attack=gpd"], ["Unknown attack", "gpd"]),
        ([TINY, "--config.schedule.name=straight"], ["Unknown schedule", "straight"]),
        ([TINY, "--config.train.dtype=half"], ["Unknown train.dtype", "half"]),
        ([SMALL, "--config.data.data_dir={tmp}"], ["'cifar10' is not prepared", "{tmp}"]),
        ([TINY, "--config.data.name={tmp}/no.npz"], ["no.npz"]),
        ([TINY, "--config.data.name={nan}"], ["hold NaN"]),
        ([TINY, "--config.data.name={large}"], ["Image shape mismatch", "(9, 9, 1)"]),
        ([TINY, "--config.data.name={few}"], ["Class count mismatch", "num_classes=3"]),
    ],
)
def test_mistakes_before_training(run, tmp_path, no_training, arguments, parts):
    places = {
        "tmp": tmp_path,
        "nan": save_npz(tmp_path / "nan.npz", spoil=True),
        "large": save_npz(tmp_path / "large.npz", shape=(40, 9, 9, 1)),
        "few": save_npz(tmp_path / "few.npz", num_classes=3),
    }
    folder = tmp_path / "run"
    answer = run("train", *(each.format(**places) for each in arguments), f"--output_dir={folder}")
    assert_one_line_error(answer, *(part.format(**places) for part in parts))
    assert not folder.exists()


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("def get_config(", ["never closed"]),
        ("x = 1", ["get_config"]),
        (
            "from he_keras.experiment import default_config\n"
            "def get_config():\n"
            "    config = default_config()\n"
            "    config.train.epoch = 3\n"
            "    return config\n",
            ["epoch", "epochs", "locked"],
        ),
        (
            "from he_keras.experiment import default_config\n"
            "def get_config():\n"
            "    config = default_config()\n"
            "    with config.unlocked():\n"
            "        config.train.epoch = 3\n"
            "    return config\n",
            ["train.[batch_size", "epochs", "received unknown=['epoch']"],
        ),
    ],
    ids=["syntax", "no function", "locked", "unlocked"],
)
def test_mistakes_in_a_configuration_file(run, tmp_path, no_training, text, parts):
    path = tmp_path / "mine.py"
    path.write_text(text)
    answer = run("train", f"--config={path}", f"--output_dir={tmp_path / 'run'}")
    assert_one_line_error(answer, *parts)
    assert not (tmp_path / "run").exists()


def test_unwritable_folder(run, tmp_path, no_training):
    (tmp_path / "file").write_text("")
    answer = run("train", TINY, f"--output_dir={tmp_path / 'file' / 'run'}")
    assert_one_line_error(answer, "Cannot write to the output folder", str(tmp_path / "file"))
    answer = run("train", TINY, f"--output_dir={tmp_path / 'file'}")
    assert_one_line_error(answer, "Cannot write to the output folder")
    assert (tmp_path / "file").read_text() == ""


@pytest.mark.slow
def test_folder_of_another_run(run, trained, no_training):
    before = sorted(trained.rglob("*"))
    answer = run("train", TINY, f"--output_dir={trained}", "--config.head.scale=9")
    assert_one_line_error(answer, "another configuration", "head.scale: 15.0 -> 9.0")
    assert sorted(trained.rglob("*")) == before


@pytest.mark.parametrize("name", ["checkpoints/latest.npz", "config.json", "environment.json"])
def test_damaged_run_folder(run, tmp_path, no_training, name):
    folder = tmp_path / "run"
    (folder / name).parent.mkdir(parents=True)
    (folder / name).write_text("rubbish")
    answer = run("train", TINY, f"--output_dir={folder}")
    assert_one_line_error(answer, str(folder / name))
    assert (folder / name).read_text() == "rubbish"


# train: runs


@pytest.mark.slow
def test_smoke_then_nothing_left(run, tmp_path):
    folder = tmp_path / "run"
    code, out, err = run("train", TINY, "--smoke", f"--output_dir={folder}")
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0].startswith("epoch 1/1: accuracy ") and "val_robust_accuracy" in lines[0]
    assert lines[-1] == f"Saved {folder / 'model.keras'}"
    # The last line of the progress: batches done, time taken, loss.
    assert "training 100%" in err and "batch 2/2" in err and "loss=" in err
    assert json.loads((folder / "config.json").read_text())["name"] == "tiny_smoke"

    weights = he.load_model(folder / "model.keras").get_weights()
    code, out, err = run("train", TINY, "--smoke", f"--output_dir={folder}")
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == f"Nothing left to train in {folder}"
    again = he.load_model(folder / "model.keras").get_weights()
    for now, then in zip(again, weights, strict=True):
        np.testing.assert_array_equal(now, then)


@pytest.mark.slow
def test_diverging_training_is_one_line_and_exit_code_1(run, tmp_path):
    code, out, err = run(
        "train",
        TINY,
        f"--output_dir={tmp_path / 'run'}",
        "--config.head.kind=linear",
        "--config.optimizer.learning_rate=1e30",
    )
    assert code == 1
    assert err.splitlines()[-1].startswith("error: The loss is not finite; expected a number")
    assert "Traceback" not in err
    assert not (tmp_path / "run" / "model.keras").exists()
