"""What a submission to RobustBench asks for, from a model and the reports of its evaluations."""

import functools
import json

import keras
import numpy as np
import pytest
from programs import assert_one_line_error, run_here
from public_checkpoints import golden

import he_keras as he
from he_keras.evaluation.run.facts import weights_digest
from he_keras.export import export_robustbench
from he_keras.zoo.layouts import layout_of


@pytest.fixture(scope="module")
def model():
    network = he.networks.get("wide-resnet-10-1")
    return he.HEAdversarialModel(network, he.CosineHead(10, scale=15.0))


@pytest.fixture
def run(monkeypatch, capfd):
    return functools.partial(run_here, monkeypatch, capfd)


def report(model, rows, mode="individual"):
    """The part of a `report.json` that counts; a row is logit scale, version, robust accuracy."""
    attacks = [
        {
            "name": "autoattack",
            "robust_accuracy": accuracy,
            "settings": {"logit_scale": scale, "version": version},
        }
        for scale, version, accuracy in rows
    ]
    return {
        "attacks": attacks,
        "clean_accuracy": 0.8514,
        "mode": mode,
        "num_examples": 10_000,
        "settings": {"model": {"weights": weights_digest(model)}},
        "threat": {"norm": "linf", "epsilon": 8 / 255, "bounds": [0.0, 1.0]},
        "worst_case": min(accuracy for _, _, accuracy in rows),
    }


def entry_of(folder):
    return json.loads((folder / "Mine2026.json").read_text())


def test_entry_holds_the_figures_of_the_cosines_and_the_issue_those_of_both(model, tmp_path):
    reports = [
        report(model, [("unit", "standard", 0.5374)]),
        report(model, [("model", "standard", 0.5251), ("model", "plus", 0.1)]),
    ]
    export_robustbench(model, tmp_path, "Mine2026", reports)
    assert entry_of(tmp_path) == {
        "link": "",
        "name": "",
        "authors": "",
        "additional_data": None,
        "number_forward_passes": 1,
        "dataset": "cifar10",
        "venue": "",
        "architecture": "WideResNet-10-1",
        "eps": "8/255",
        "clean_acc": "85.14",
        "reported": "53.74",
        "autoattack_acc": "53.74",
    }
    issue = (tmp_path / "Mine2026_issue.md").read_text()
    assert "- **Robust accuracy**: 53.74\n" in issue and "Linf, eps = 8/255" in issue
    assert "standard version, by he_keras, 10,000 test images\n" in issue
    assert "* cosines (scale 1): clean 85.14 %, AutoAttack (standard) 53.74 %, 10,000" in issue
    assert "* logits (scale 15): clean 85.14 %, AutoAttack (standard) 52.51 %, 10,000" in issue
    assert "Mine2026.pt or Mine2026.safetensors for the class BoostingWideResNet" in issue


def test_without_a_report_the_figures_are_empty(model, tmp_path):
    scaled = report(model, [("model", "standard", 0.5)])
    survivors = report(model, [("model", "standard", 0.6), ("unit", "standard", 0.5)], "survivors")
    reordered = report(model, [("unit", "standard", 0.5)])
    reordered["attacks"][0]["settings"]["order"] = "fast-first"
    for reports in ((), [scaled], [survivors], [reordered]):
        export_robustbench(model, tmp_path, "Mine2026", reports)
        assert entry_of(tmp_path)["autoattack_acc"] == entry_of(tmp_path)["clean_acc"] == ""
        issue = (tmp_path / "Mine2026_issue.md").read_text()
        assert "- **Robust accuracy**: (to be filled in)" in issue


def test_linear_head_and_what_a_class_does_not_store(tmp_path):
    network = he.networks.get("wide-resnet-10-1")
    linear = he.HEAdversarialModel(network, keras.layers.Dense(10))
    export_robustbench(linear, tmp_path, "Mine2026", [report(linear, [("model", "standard", 0.5)])])
    assert entry_of(tmp_path)["autoattack_acc"] == "50.00"
    issue = (tmp_path / "Mine2026_issue.md").read_text()
    assert "class WideResNet, with the buffers mu and sigma, which a subclass applies" in issue
    assert "both outputs" not in issue


def test_report_of_another_model_is_refused(model, tmp_path):
    other = he.HEAdversarialModel(he.networks.get("wide-resnet-16-1"), he.CosineHead(10))
    wrong = report(other, [("unit", "standard", 0.5)])
    with pytest.raises(ValueError, match="The report is of another model"):
        export_robustbench(model, tmp_path, "Mine2026", [wrong])
    with pytest.raises(ValueError, match="Not the report of an evaluation"):
        export_robustbench(model, tmp_path, "Mine2026", [{"attacks": []}])
    with pytest.raises(ValueError, match="Invalid name of a submission"):
        export_robustbench(model, tmp_path, "../Mine")
    assert not list(tmp_path.iterdir())


def test_program_writes_the_files(run, model, tmp_path):
    model.save(tmp_path / "model.keras")
    reports = []
    for scale, accuracy in (("unit", 0.54), ("model", 0.53)):
        folder = tmp_path / scale
        folder.mkdir()
        content = json.dumps(report(model, [(scale, "standard", accuracy)]))
        (folder / "report.json").write_text(content)
        reports.append(str(folder))
    flags = [f"--model={tmp_path / 'model.keras'}", f"--output_dir={tmp_path / 'Mine2026'}"]
    form = "--format=torch-robustbench"
    code, out, err = run("export", *flags, form, f"--evaluation={','.join(reports)}")
    assert code == 0, err
    assert out.splitlines()[0] == "Layout: robustbench/boosting, wide_resnet_10_1"
    assert entry_of(tmp_path / "Mine2026")["autoattack_acc"] == "54.00"
    again = he.zoo.load("robustbench/boosting", tmp_path / "Mine2026" / "Mine2026.pt", scale=15.0)
    images = golden("at_he_wrn_10_1").images
    np.testing.assert_array_equal(again(images), model(images))
    assert layout_of(again).network == "wide_resnet_10_1"
    both = run("export", *flags, "--format=torch-robustbench,onnx")
    assert_one_line_error(both, "expected --format=torch-robustbench alone")
