"""`he-keras gate`: exit codes, where data and threat model come from, and the files."""

import json
import shutil

import evaluation_program as program
import numpy as np
import pytest
from programs import assert_one_line_error

import he_keras as he


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gate")
    program.model().save(folder / "model.keras")
    images, labels = program.examples()
    np.savez(folder / "data.npz", x_test=images, y_test=labels)
    return folder


def flags(files, *more):
    own = [f"--model={files / 'model.keras'}", f"--data={files / 'data.npz'}", "--pixels=0..1"]
    return [*own, "--batch_size=10", *more]


@pytest.fixture
def baseline(run, files, tmp_path):
    kept = files / "kept"
    if not kept.exists():
        more = ("--epsilon=0.06", "--attacks=pgd-2", "--nochecks", f"--output_dir={kept}")
        assert run("evaluate", *flags(files, *more))[0] == 0
    return shutil.copytree(kept, tmp_path / "last" / "evaluation")


def test_the_exit_code_and_the_files(run, files, baseline, tmp_path):
    out_dir = tmp_path / "gate"
    arguments = flags(files, f"--baseline={baseline.parent}", f"--output_dir={out_dir}")
    code, out, err = run("gate", *arguments, "--max_loss=0.2", "--min_worst_case=0.2")
    assert code == 0, err
    assert "PASS (min_worst_case)" in out and "Gate: passed." in out
    # The baseline's attack and radius, without a word on the command line.
    report = json.loads((out_dir / "report.json").read_text())
    assert [row["name"] for row in report["attacks"]] == ["pgd-2"]
    assert report["threat"]["epsilon"] == 0.06 and report["mode"] == "survivors"
    assert (out_dir / "gate.junit.xml").exists() and (out_dir / "gate.sarif").exists()
    code, out, err = run("gate", *arguments, "--max_loss=0.001")
    assert code == 1, err
    assert "UNDECIDED (max_loss)" in out and "Too few images" in out
    assert "NOT passed, because of max_loss" in out
    assert 'failures="1"' in (out_dir / "gate.junit.xml").read_text()


def test_checks_can_close_the_gate(run, files, baseline, tmp_path, monkeypatch):
    from he_keras.evaluation import robustness
    from he_keras.evaluation.checks.check import Check

    failed = Check("planted", "after", "fail", "3", "Look at it.")
    monkeypatch.setattr(robustness, "preflight", lambda *_, **__: (failed,))
    monkeypatch.setattr(robustness, "sanity_checks", lambda *_, **__: ())
    monkeypatch.setattr(robustness, "epsilon_curve", lambda *_, **__: None)
    more = ("--attacks=fgsm", "--epsilon=0.06", f"--output_dir={tmp_path / 'gate'}")
    code, out, err = run("gate", *flags(files, *more), "--min_worst_case=0.01", "--checks")
    assert code == 1, err
    assert "FAIL (checks): 1 checks, 1 failed. planted: 3. Look at it." in out


@pytest.mark.parametrize(
    ("more", "part"),
    [
        (["--max_loss=0.1", "--epsilon=0.01"], "another threat model"),
        (["--max_loss=0.1", "--num_examples=7"], "other images"),
        (["--max_loss=0.1", "--step_size=0.01"], "expected neither --step_size"),
        (["--max_loss=0.1", "--attacks=fast"], "Other attacks than the baseline's"),
        (["--min_worst_case=0.1"], "received a baseline alone"),
        (["--min_worst_case=45", "--max_loss=0.1"], "did you mean 0.45?"),
    ],
)
def test_a_mistake_in_the_call_is_a_line_and_2(run, files, baseline, tmp_path, more, part):
    out_dir = tmp_path / "gate"
    arguments = flags(files, f"--baseline={baseline}", f"--output_dir={out_dir}")
    assert_one_line_error(run("gate", *arguments, *more), part)
    assert not out_dir.exists()


def test_without_data_it_says_where_data_could_come_from(run, files, baseline):
    model = f"--model={files / 'model.keras'}"
    answer = run("gate", model, f"--baseline={baseline}", "--max_loss=0.1")
    assert_one_line_error(answer, "No data set; expected --data=NAME")
    assert_one_line_error(run("gate", "--min_worst_case=0.1"), "No model")


def test_the_data_of_the_baselines_run_are_taken(run, files, baseline, tmp_path):
    """As in the documentation: --model and --baseline, and nothing else is known."""
    config = he.experiment.default_config()
    config.data.update({"name": str(files / "data.npz")})
    (baseline.parent / "config.json").write_text(config.to_json())
    own = [flag for flag in flags(files) if not flag.startswith("--data")]
    limits = (f"--baseline={baseline}", "--max_loss=0.2", f"--output_dir={tmp_path / 'gate'}")
    code, out, err = run("gate", *own, *limits)
    assert code == 0, err
    assert "0 lost and 0 gained" in out
