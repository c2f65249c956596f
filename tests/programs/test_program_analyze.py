"""`he-keras analyze` on run folders and model files, and its mistakes."""

import functools
import json
import sys

import numpy as np
import pytest
import tiny_config
from programs import assert_one_line_error, run_here, save_npz

import he_keras as he
import he_keras_cli
from he_keras import analysis
from he_keras.files import write_json
from he_keras.programs import cli, model_flags


@pytest.fixture
def run(monkeypatch, capfd):
    return functools.partial(run_here, monkeypatch, capfd, "analyze")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two run folders with untrained models, linear and HE, and data sets."""
    folder = tmp_path_factory.mktemp("runs")
    for kind in ("linear", "he"):
        config = tiny_config.get_config()
        config.head.kind = kind
        write_json(folder / kind / "config.json", he.experiment.to_plain(config))
        he.experiment.build_model(config, 1).save(folder / kind / "model.keras")
    save_npz(folder / "data.npz")
    save_npz(folder / "many.npz", num_classes=12)
    save_npz(folder / "large.npz", shape=(8, 9, 9, 1))
    save_npz(folder / "nan.npz", spoil=True)
    return folder


def test_without_a_name_all_are_listed(run):
    code, out, err = run()
    assert (code, err) == (0, "")
    listed = {line.split()[0]: line for line in out.splitlines()[1:]}
    assert sorted(listed) == analysis.names()
    assert "HE paper, Fig. 3" in listed["gradient-norms"]


@pytest.mark.slow
def test_run_folders_with_their_own_settings(run, folder, monkeypatch):
    splits = []
    load_split = he.experiment.load_split
    monkeypatch.setattr(
        he.experiment,
        "load_split",
        lambda config, split: splits.append(split) or load_split(config, split),
    )
    paths = f"{folder / 'linear'},{folder / 'he'}"
    code, out, err = run("class-weights", f"--run={paths}", "--num_examples=7")
    assert code == 0, err
    # Equal data are read once.
    assert splits == ["test"]
    written = folder / "linear" / "analysis" / "class-weights"
    content = json.loads(written.with_suffix(".json").read_text())
    linear, he_run = content["subjects"]
    assert (linear["name"], he_run["name"]) == ("linear", "he")
    assert he_run["settings"]["head"]["kind"] == "he" and he_run["num_examples"] == 7
    assert he_run["threat"]["epsilon"] == 0.1
    assert he_run["folder"] == str(folder / "he")
    expected = analysis.class_weight_geometry(
        he.load_model(folder / "he" / "model.keras").head.kernel.numpy()
    )
    np.testing.assert_allclose(content["numbers"]["he"]["norms"], expected["norms"], rtol=1e-6)
    assert written.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    lines = out.splitlines()
    assert lines.pop(0).startswith("Measured at linf, epsilon ")
    assert lines[0].startswith("linear: angles ") and lines[1].startswith("he: angles ")
    assert lines[2:] == [f"Numbers: {written}.json", f"Picture: {written}.png"]


def test_a_model_file_on_other_data_with_options(run, folder, tmp_path, monkeypatch):
    seen = {}

    def measure(self, subjects):
        seen.update(options=self.options, subject=subjects[0])
        ratios = ("mean_ratio", "median_ratio", "ratio_of_means")
        return {"mine": {"layers": ["a"], **{key: [1.0] for key in ratios}}}

    import he_keras.analysis.gradient_norms as module

    monkeypatch.setattr(module.GradientNorms, "measure", measure)
    code, _, err = run(
        "gradient-norms",
        f"--run={folder / 'he' / 'model.keras'}",
        f"--data={folder / 'data.npz'}",
        "--norm=l2",
        "--epsilon=64/255",
        "--num_examples=0",
        "--option=num_steps=3",
        "--option",
        "seed=5",
        f"--output_dir={tmp_path}",
    )
    assert code == 0, err
    assert seen["options"] == {"num_steps": 3, "batch_size": 1, "seed": 5}
    subject = seen["subject"]
    assert (subject.name, subject.settings, subject.folder) == ("model.keras", {}, None)
    assert (subject.threat.norm, subject.threat.epsilon) == ("l2", 64 / 255)
    with np.load(folder / "data.npz") as data:
        np.testing.assert_array_equal(subject.images, data["x_test"])
        np.testing.assert_array_equal(subject.labels, data["y_test"])
    assert sorted(path.name for path in tmp_path.iterdir()) == (
        ["gradient-norms.json", "gradient-norms.png"]
    )


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["gradients"], ["Unknown analysis", "gradient-norms", "received 'gradients'"]),
        (["class-weights"], ["No model; expected --run=FOLDER"]),
        (["class-weights", "--run={f}/none"], ["No model", "{f}/none"]),
        (["class-weights", "--run={f}"], ["No model in this folder", "{f}"]),
        (["class-weights", "--run={f}/he,{f}/he/"], ["expected no path twice"]),
        (["class-weights", "--run={f}/he/model.keras"], ["No data set; expected --data=NAME"]),
        (["class-weights", "--runs={f}/he", "more"], ["Unknown flag", "did you mean '--run'?"]),
        (["class-weights", "more", "--run={f}/he"], ["Unknown argument", "received more"]),
        (
            ["gradient-norms", "--run={f}/he", "--option", "steps=2"],
            ["Unknown option of gradient-norms", "num_steps, batch_size, seed", "received steps"],
        ),
        (["gradient-norms", "--run={f}/he", "--option=seed"], ["expected key=value", "'seed'"]),
        (["gradient-norms", "--run={f}/he", "--option=num_steps=x"], ["of type int", "'x'"]),
        (["gradient-norms", "--run={f}/he", "--option=num_steps=0"], ["num_steps=0"]),
        (["class-weights", "--run={f}/he", "--epsilon=1/0"], ["1/0"]),
        (["class-weights", "--run={f}/he", "--norm=l0"], ["l0"]),
        (["class-weights", "--run={f}/he", "--split=all"], ["split", "all"]),
        (["class-weights", "--run={f}/he", "--num_examples=-1"], ["num_examples", "-1"]),
        (["class-weights", "--run={f}/he", "--data={f}/no.npz"], ["no.npz"]),
        (["class-weights", "--run={f}/he", "--data={f}/many.npz"], ["expected 0..9"]),
        (["class-weights", "--run={f}/he", "--data={f}/large.npz"], ["9"]),
        (["class-weights", "--run={f}/he", "--data={f}/nan.npz"], ["NaN"]),
        (["class-weights", "--run={f}/he", "--output_dir={f}/data.npz/x"], ["Cannot write"]),
        (["attack-steps", "--run={f}/he"], ["at least 2 models", "['he']"]),
        (["attack-steps", "--run={f}/he,{f}/linear"], ["differ in objective.num_steps"]),
    ],
)
def test_mistakes(run, folder, tmp_path, arguments, parts):
    arguments = [each.format(f=folder) for each in arguments]
    if not any("--output_dir" in each for each in arguments):
        arguments.append(f"--output_dir={tmp_path / 'out'}")
    answer = run(*arguments)
    assert_one_line_error(answer, *(part.format(f=folder) for part in parts))
    assert not list((tmp_path / "out").glob("*"))


def test_installed_under_one_name(monkeypatch):
    steps = []
    monkeypatch.setattr(cli, "check_command", lambda program: steps.append(program) or sys.argv)
    monkeypatch.setattr(cli, "run_program", lambda *given: steps.append(given))
    monkeypatch.setattr(sys, "argv", ["he-keras", "analyze", "class-weights"])
    he_keras_cli.main()
    assert steps == ["analyze", ("analyze", ["he-keras analyze", "class-weights"])]
    assert sys.argv == ["he-keras analyze", "class-weights"]


def test_short_names():
    assert model_flags.short_names(["runs/a/x", "runs/b/x"]) == ["a/x", "b/x"]
    assert model_flags.short_names(["runs/a", "b"]) == ["a", "b"]
    assert model_flags.short_names(["runs/a"]) == ["a"]
