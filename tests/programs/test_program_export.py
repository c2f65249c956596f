"""`he-keras export`: what it takes from a run, and its mistakes in one line."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow as tf
import tiny_config
from programs import ROOT, assert_one_line_error, run_process

import he_keras as he
from he_keras.programs import cli

TOOL = ROOT / "tools" / "export.py"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run folder with the files that export reads; the model has not been trained."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    folder.mkdir()
    config = tiny_config.get_config()
    model = he.experiment.build_model(config, steps_per_epoch=4)
    model.save(folder / "model.keras")
    (folder / "config.json").write_text(json.dumps(he.experiment.to_plain(config)))
    return folder


def card_of(version):
    return json.loads((version / "assets.extra" / "model_card.json").read_text())


def test_run_becomes_a_version_with_what_is_known_of_it(run, trained, tmp_path):
    code, out, err = run("export", f"--run={trained}", f"--output_dir={tmp_path}", "--top_k=3")
    assert (code, err) == (0, "")
    assert out == f"SavedModel: {tmp_path / '1'}\n"
    card = card_of(tmp_path / "1")
    assert card["source"] == str(trained)
    assert card["data"]["name"] == "digits" and card["settings"]["train"]["epochs"] == 3
    assert card["threat"] == {"norm": "linf", "epsilon": 0.1, "bounds": [0.0, 1.0]}
    assert card["evaluation"]["status"] == "none"
    assert card["class_names"] == list("0123456789")
    answer = tf.saved_model.load(str(tmp_path / "1")).signatures["serving_default"](
        images=tf.zeros([2, 8, 8, 1])
    )
    assert answer["labels"].shape == (2, 3)


@pytest.mark.slow
def test_evaluation_of_a_run_is_found(run, trained, tmp_path):
    """The report of these weights; `evaluate` writes the digest that export compares."""
    model = he.load_classifier(trained)
    test = he.data.load("digits", "test").take(20)
    threat = he.ThreatModel("linf", 0.1)
    report = he.evaluate_robustness(
        model, test, threat, ["fgsm"], tmp_path / "evaluation", batch_size=20, checks=False
    )
    code, _, err = run(
        "export",
        f"--model={trained}",
        f"--evaluation={tmp_path / 'evaluation'}",
        f"--output_dir={tmp_path / 'served'}",
    )
    assert code == 0, err
    entry = card_of(tmp_path / "served" / "1")["evaluation"]
    assert entry["status"] == "measured"
    assert (entry["clean_accuracy"], entry["worst_case"], entry["num_examples"]) == (
        report.clean_accuracy,
        report.worst_case,
        20,
    )


def test_calibration_uses_the_validation_split(run, trained, tmp_path, monkeypatch):
    from he_keras import export

    seen = []

    def calibrate(model, dataset, bounds):
        seen.append(dataset)
        return export.Calibration(2.0, dataset.name, dataset.split, len(dataset), 1, 0.5, 0.2, 0.1)

    monkeypatch.setattr(export, "calibrate", calibrate)
    code, out, err = run("export", f"--run={trained}", f"--output_dir={tmp_path}", "--calibrate")
    assert code == 0, err
    (dataset,) = seen
    assert (dataset.split, len(dataset)) == ("validation", 20)
    assert "Calibrated: temperature 2.0000" in out
    assert card_of(tmp_path / "1")["probabilities"]["temperature"] == 2.0


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["Missing flag; expected --model=... and --output_dir=..."]),
        (["--output_dir={tmp}/out"], ["Missing flag"]),
        (["--run={run}"], ["Missing flag"]),
        (["--run={tmp}/none", "--output_dir={tmp}/out"], ["No model; expected", "none"]),
        (["--model={tmp}/x.keras", "--output_dir={tmp}/out"], ["No model", "x.keras"]),
        (["--model={tmp}", "--output_dir={tmp}/out"], ["No model", "model.keras"]),
        (["--run={run}", "--output_dir={run}/config.json"], ["Cannot write", "config.json"]),
        (["--run={run}", "--output_dir=/proc/none"], ["Cannot write", "/proc/none"]),
        (["--run={run}", "--output_dir={tmp}/out", "--top_k=11"], ["at most 10", "top_k=11"]),
        (["--run={run}", "--output_dir={tmp}/out", "--top_k=x"], ["top_k=x"]),
        (
            ["--run={run}", "--output_dir={tmp}/out", "--class_names=a,b"],
            ["expected 10 names", "received 2"],
        ),
        (["--run={run}", "--output_dir={tmp}/out", "--formats=tflite"], ["Unknown", "'tflite'"]),
        (
            ["--model={run}/model.keras", "--output_dir={tmp}/out", "--formats=litert"],
            ["Nothing to score the conversions on", "--formats=litert alone"],
        ),
        (
            ["--model={run}/model.keras", "--output_dir={tmp}/out", "--calibrate"],
            ["held out of training", "expected --run=FOLDER", "model.keras alone"],
        ),
        (
            ["--run={run}", "--output_dir={tmp}/out", "--calibrate", "--data=digits"],
            ["held out of training", "--data=digits"],
        ),
        (
            ["--run={run}", "--output_dir={tmp}/out", "--evaluation={tmp}"],
            ["Cannot read report.json"],
        ),
        (
            ["--run={run}", "--output_dir={tmp}/out", "--formats=litert", "--num_examples=-1"],
            ["--num_examples=-1"],
        ),
        (
            ["--run={run}", "--output_dir={tmp}/out", "--formats=litert", "--attack=pdg"],
            ["Unknown attack", "'pdg'"],
        ),
        (
            ["--run={run}", "--output_dir={tmp}/out", "--formats=litert", "--epsilon=1/0"],
            ["1/0"],
        ),
        (
            ["--run={run}", "--output_dir={tmp}/out", "--formats=litert", "--max_loss=-1"],
            ["max_loss=-1"],
        ),
        (
            ["--run={run}", "--output_dir={tmp}/out", "--formats=litert", "--data=nowhere"],
            ["nowhere"],
        ),
    ],
)
def test_mistakes(run, trained, tmp_path, arguments, parts):
    places = {"tmp": tmp_path, "run": trained}
    answer = run("export", *(each.format(**places) for each in arguments))
    assert_one_line_error(answer, *parts)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", ["rubbish", "[]", '{"title": "other"}', '{"attacks": [3]}'])
def test_damaged_report_is_one_line(run, trained, tmp_path, content):
    (tmp_path / "report.json").write_text(content)
    answer = run(
        "export", f"--run={trained}", f"--evaluation={tmp_path}", f"--output_dir={tmp_path / 'out'}"
    )
    assert_one_line_error(answer, "report.json")
    assert not list(tmp_path.glob("out/*"))


def test_run_without_validation_images_cannot_be_calibrated(run, trained, tmp_path):
    config = json.loads((trained / "config.json").read_text())
    config["data"]["validation_examples"] = 0
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.keras").write_bytes((trained / "model.keras").read_bytes())
    answer = run("export", f"--run={tmp_path}", f"--output_dir={tmp_path / 'out'}", "--calibrate")
    assert_one_line_error(answer, "Nothing was held out", "data.validation_examples above 0")


def test_ctrl_c_that_was_lost_before_the_writing(run, trained, tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "was_interrupted", lambda: True)
    with pytest.raises(KeyboardInterrupt):
        run("export", f"--run={trained}", f"--output_dir={tmp_path / 'out'}")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_everything_from_the_command_line(trained, tmp_path):
    answer = run_process(
        sys.executable,
        TOOL,
        f"--run={trained}",
        f"--output_dir={tmp_path}",
        "--formats=saved_model,litert",
        "--num_examples=12",
        "--attack=pgd-2",
        "--max_loss=0",
        "--calibrate",
    )
    assert answer.returncode == 0, answer.stderr
    lines = answer.stdout.splitlines()
    assert lines[0] == f"SavedModel: {tmp_path / '1'}" and lines[1].startswith("Calibrated: ")
    assert "scored on 12 test images" in answer.stdout and "litert-int8" in answer.stdout
    result = json.loads((tmp_path / "1" / "assets.extra" / "conversions.json").read_text())
    assert result["attack"]["name"] == "pgd-2" and result["num_examples"] == 12
    assert result["threat"]["epsilon"] == 0.1
    flagged = [row["name"] for row in result["rows"] if row["is_flagged"]]
    assert [f"WARNING: {name} lost more than 0.00%" in lines for name in flagged] == [True] * len(
        flagged
    )
    files = {path.name for path in (tmp_path / "1/assets.extra/conversions").iterdir()}
    assert files == {"float32.tflite", "float16.tflite", "int8.tflite"}


@pytest.mark.slow
def test_two_programs_at_the_same_time(trained, tmp_path):
    command = [sys.executable, str(TOOL), f"--run={trained}", f"--output_dir={tmp_path}"]
    environment = {**os.environ, "TF_NUM_INTRAOP_THREADS": "1", "OMP_NUM_THREADS": "1"}
    options = {"stdout": subprocess.PIPE, "text": True, "env": environment}
    processes = [subprocess.Popen(command, **options) for _ in range(2)]
    printed = sorted(process.communicate()[0] for process in processes)
    assert printed == [f"SavedModel: {tmp_path / number}\n" for number in "12"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]
    for number in "12":
        answer = tf.saved_model.load(str(tmp_path / number)).signatures["serve_uint8"](
            images=tf.zeros([1, 8, 8, 1], tf.uint8)
        )
        assert np.isfinite(answer["logits"]).all()


def exporter_in_the_middle(run_folder, tmp_path):
    """Returns a real exporter that is writing, stopped, and the folder that it writes into.

    Stopped, it cannot go on while this process looks whether it is in the middle. Where that looks
    too late, on a busy machine, another exporter is started.
    """
    for attempt in range(20):
        folder = tmp_path / str(attempt)
        command = [sys.executable, str(TOOL), f"--run={run_folder}", f"--output_dir={folder}"]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)
        while not list(folder.glob(".partial-*")) and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        # The card is the last file: before it, much is left to do until the renaming.
        if list(folder.glob(".partial-*")) and not list(folder.glob("*/*/model_card.md")):
            return process, folder
        process.kill()
        _, err = process.communicate()
        assert process.returncode in (0, -signal.SIGKILL), err
    raise AssertionError("every exporter was faster")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ended_in_the_middle(trained, tmp_path, number):
    """Nothing that a server would load; and the next export clears up."""
    process, folder = exporter_in_the_middle(trained, tmp_path)
    process.send_signal(number)
    process.send_signal(signal.SIGCONT)
    out, err = process.communicate()
    assert not list(folder.glob("[0-9]*")) and "Traceback" not in err
    if number == signal.SIGINT:
        assert (process.returncode, out) == (130, "Interrupted\n")
        assert os.listdir(folder) == []
    he.export_saved_model(he.load_classifier(trained), folder)
    assert os.listdir(folder) == ["1"]
