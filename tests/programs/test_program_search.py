"""`he-keras search`: its flags, its mistakes, and what it prints."""

import functools
import pathlib
import sys

import pytest
from programs import ROOT, assert_one_line_error, run_here, run_process

from he_keras import experiment
from he_keras.experiment import searching

HE_KERAS = pathlib.Path(sys.executable).with_name("he-keras")
DIGITS = f"--config={ROOT / 'configs' / 'digits_search_scale_margin.py'}"
TINY = f"--config={ROOT / 'tests' / 'builders' / 'tiny_config.py'}"


@pytest.fixture
def run(monkeypatch, capfd, tmp_path):
    program = functools.partial(run_here, monkeypatch, capfd, "search")
    return lambda *flags: program(*flags, f"--output_dir={tmp_path / 'search'}")


@pytest.fixture
def untrained(monkeypatch):
    calls = []

    def trial(self, values, folder, epochs):
        calls.append(values)
        return {"clean_accuracy": 0.9, "robust_accuracy": 0.5, "seconds": 1.0}

    monkeypatch.setattr(searching.Search, "run_trial", trial)
    return calls


def test_help(run):
    code, out, err = run("--help")
    assert (code, err) == (0, "")
    assert "--tuner" in out and "--space" in out and "--max_trials" in out


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ([], ["No configuration"]),
        ([DIGITS, "--tuner=annealing"], ["Unknown tuner", "received tuner='annealing'"]),
        ([DIGITS, "--objective=pgd-20"], ["Unknown objective of a search", "margin-pgd-K"]),
        ([DIGITS, "--objective=robust_acc"], ["Unknown objective of a search"]),
        ([DIGITS, "--space=scael=1:2"], ["Unknown hyperparameter", "received 'scael'"]),
        ([DIGITS, "--space=scale=9:1"], ["Empty range of scale"]),
        ([DIGITS, "--space=scale=0:1"], ["Invalid scale; expected a finite number > 0"]),
        ([DIGITS, "--space=scale"], ["Invalid space", "received --space=scale"]),
        ([DIGITS, "--space=scale=1", "--space=scale=2"], ["each name once"]),
        ([DIGITS, "--tuner=grid"], ["A grid needs values"]),
        ([DIGITS, "--max_trials=-2"], ["Invalid max_trials"]),
        ([DIGITS, "--max_trials=many"], ["max_trials"]),
        ([DIGITS, "--config.head.kind=linear"], ["A linear head has no scale"]),
        ([DIGITS, "--config.data.validation_examples=0"], ["validation split"]),
    ],
)
def test_mistakes(run, tmp_path, untrained, flags, parts):
    assert_one_line_error(run(*flags), *parts)
    assert not (tmp_path / "search").exists() and not untrained


def test_incomplete_addresses(run, monkeypatch):
    monkeypatch.setenv("KERASTUNER_ORACLE_IP", "127.0.0.1")
    assert_one_line_error(run(TINY), "Incomplete addresses", "KERASTUNER_ORACLE_PORT")


@pytest.mark.slow
def test_preset_flags_and_resuming(run, tmp_path, untrained):
    assert run(DIGITS, "--max_trials=1")[1].startswith("Best of 1 trial: 0000, clean 90.00%")
    few = "--max_trials=2"
    code, out, _ = run(DIGITS, few)
    assert code == 0 and len(untrained) == 2
    assert {"scale", "margin"} == set(untrained[0])
    assert out.startswith("Resuming after 1 trial\nBest of 2 trials: 0000, clean 90.00%, robust 50")
    assert f"Config:  {tmp_path / 'search' / 'best_config.py'}" in out
    code, out, _ = run(DIGITS, few)
    assert code == 0 and len(untrained) == 2
    assert out.startswith("Nothing left to search in")
    code, out, _ = run(DIGITS, "--max_trials=3")
    assert code == 0 and len(untrained) == 3
    assert out.startswith("Resuming after 2 trials\nBest of 3 trials")


def test_unknown_settings_of_a_preset(run, tmp_path, untrained):
    path = tmp_path / "misspelt.py"
    path.write_text(
        "from he_keras.experiment.catalog.digits_search_scale_margin import get_config\n"
        "def get_search():\n    return {'objectiv': 'margin-pgd-20'}\n"
    )
    parts = ("Unknown settings of a search", "'objective'", "received ['objectiv']")
    assert_one_line_error(run(f"--config={path}"), *parts)
    assert not untrained


@pytest.mark.slow
def test_flags_replace_the_preset(run, untrained):
    flags = ("--tuner=grid", "--space=scale=5,10", "--space=weight_decay=0,0.001")
    assert run(DIGITS, *flags)[0] == 0
    assert [tuple(values.values()) for values in untrained] == [
        (5.0, 0.0),
        (5.0, 0.001),
        (10.0, 0.0),
        (10.0, 0.001),
    ]


def test_failing_trials(run, monkeypatch):
    def trial(self, values, folder, epochs):
        raise FloatingPointError("loss is NaN")

    monkeypatch.setattr(searching.Search, "run_trial", trial)
    code, out, err = run(DIGITS)
    assert (code, out) == (1, "")
    assert err.splitlines()[-1].startswith("error: The last 3 trials failed;")
    assert "Traceback" not in err


def test_ctrl_c(run, monkeypatch, tmp_path):
    def trial(self, values, folder, epochs):
        raise KeyboardInterrupt

    monkeypatch.setattr(searching.Search, "run_trial", trial)
    code, out, _ = run(DIGITS)
    assert code == 130
    assert out.startswith(
        f"Interrupted; finished trials and checkpoints are in {tmp_path / 'search'}. To resume: "
        "he-keras search --config="
    )


@pytest.mark.slow
def test_smoke_and_training_of_the_winner(tmp_path):
    answer = run_process(
        *(HE_KERAS, "search", "--config=configs/cifar10_search_scale_margin.py", "--smoke"),
        f"--output_dir={tmp_path}",
    )
    assert answer.returncode == 0, answer.stderr
    assert "Best of 2 trials" in answer.stdout
    assert "WARNING" not in answer.stderr and "Traceback" not in answer.stderr
    answer = run_process(
        *(HE_KERAS, "train", f"--config={tmp_path / 'best_config.py'}"),
        f"--output_dir={tmp_path / 'winner'}",
    )
    assert answer.returncode == 0, answer.stderr
    stored = experiment.read_config(tmp_path / "winner")
    assert stored.name.endswith("_smoke_best") and (tmp_path / "winner" / "model.keras").exists()
