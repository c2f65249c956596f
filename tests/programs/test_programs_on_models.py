"""`he-keras evaluate` and `he-keras export` on a run folder and on model files."""

import json

import numpy as np
import pytest
import tensorflow as tf
from programs import assert_one_line_error, save_npz

import he_keras as he

# evaluate


def read_report(folder):
    return json.loads((folder / "report.json").read_text())


def test_evaluate_a_run(run, trained):
    code, out, err = run("evaluate", f"--run={trained}", "--nochecks")
    assert code == 0, err
    report = read_report(trained / "evaluation")
    assert report["num_examples"] == 30  # The configuration's test_examples.
    assert [row["name"] for row in report["attacks"]] == ["fgsm", "pgd-2"]
    assert report["threat"]["epsilon"] == 0.1
    assert "(worst case)" in out and "n = 30" in out
    assert out.splitlines()[-1] == f"Report: {trained / 'evaluation' / 'report.html'}"
    with np.load(trained / "evaluation" / "per_example.npz") as flags_:
        assert {"labels", "clean", "fgsm", "pgd-2"} < set(flags_.files)


def test_evaluate_flags_override_the_run(run, trained, tmp_path):
    code, _, err = run(
        "evaluate",
        "--nochecks",
        f"--run={trained}",
        f"--model={trained / 'checkpoints' / 'best.keras'}",
        "--attacks=pgd-1,fgsm",
        "--epsilon=4/255",
        "--step_size=0.002",
        "--num_examples=13",
        "--batch_size=8",
        f"--output_dir={tmp_path}",
    )
    assert code == 0, err
    report = read_report(tmp_path)
    assert report["num_examples"] == 13 and report["threat"]["epsilon"] == 4 / 255
    pgd, fgsm = report["attacks"]
    assert pgd["settings"]["step_size"] == 0.002 and pgd["settings"]["batch_size"] == 8
    assert fgsm["settings"]["step_size"] == 4 / 255


@pytest.mark.slow
def test_evaluate_a_model_file_on_other_data(run, trained, tmp_path):
    data = save_npz(tmp_path / "mine.npz")
    code, _, err = run(
        "evaluate",
        "--nochecks",
        f"--model={trained / 'model.keras'}",
        f"--data={data}",
        "--attacks=fgsm",
        "--epsilon=0.1",
        "--logit_scale=unit",
        f"--output_dir={tmp_path / 'out'}",
    )
    assert code == 0, err
    report = read_report(tmp_path / "out")
    assert report["num_examples"] == 40
    # A cross-entropy attack at scale 1 comes with a scale-free one beside it.
    names = [(row["name"], row["settings"]["logit_scale"]) for row in report["attacks"]]
    assert names == [("fgsm", "unit"), ("cw-linf-20", "model")]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["No model; expected --run=FOLDER or --model=FILE"]),
        (["--model=a.keras"], ["No data set; expected --data=NAME"]),
        (["--run={tmp}/none"], ["No model; expected", "{tmp}/none"]),
        (["--run={run}", "--model={tmp}/none.keras"], ["No model", "{tmp}/none.keras"]),
        (["--run={run}", "--model={run}/history.csv"], ["No model", "history.csv"]),
        (["--run={run}", "--model={damaged}"], ["Cannot load the model", "{damaged}"]),
        (["--run={run}", "--attacks=pdg-20"], ["Unknown attack", "fgsm", "pgd-K", "'pdg-20'"]),
        (["--run={run}", "--attacks=pgd-0"], ["num_steps=0"]),
        (["--run={run}", "--attacks=fgsm,fgsm"], ["different names"]),
        (["--run={run}", "--step_size=-1"], ["-1"]),
        (["--run={run}", "--step_size=tiny"], ["tiny"]),
        (["--run={run}", "--epsilon=1/0"], ["1/0"]),
        (["--run={run}", "--norm=l0"], ["l0"]),
        (["--run={run}", "--logit_scale=huge"], ["Invalid logit_scale", "huge"]),
        (["--run={run}", "--batch_size=0"], ["batch_size=0"]),
        (["--run={run}", "--batch_size=x"], ["batch_size=x"]),
        (["--run={run}", "--num_examples=-3"], ["num_examples", "-3"]),
        (["--run={run}", "--data=cifar10", "--data_dir={tmp}"], ["'cifar10' is not prepared"]),
        (["--run={run}", "--data={large}"], ["(None, 8, 8, 1)", "9"]),
        (["--run={run}", "--data={many}"], ["Label outside the classes; expected 0..9"]),
        (["--run={run}", "--data={nan}"], ["NaN"]),
        (["--run={run}", "--output_dir={damaged}/x"], ["Cannot write the report", "{damaged}/x"]),
    ],
)
def test_mistakes_in_evaluation(run, trained, tmp_path, arguments, parts):
    damaged = tmp_path / "damaged.keras"
    damaged.write_text("rubbish")
    places = {
        "tmp": tmp_path,
        "run": trained,
        "damaged": damaged,
        "nan": save_npz(tmp_path / "nan.npz", spoil=True),
        "large": save_npz(tmp_path / "large.npz", shape=(8, 9, 9, 1)),
        "many": save_npz(tmp_path / "many.npz", num_classes=12),
    }
    arguments = [each.format(**places) for each in arguments]
    if not any("--output_dir" in each for each in arguments):
        arguments.append(f"--output_dir={tmp_path / 'out'}")
    answer = run("evaluate", *arguments)
    assert_one_line_error(answer, *(part.format(**places) for part in parts))
    assert not (tmp_path / "out" / "report.json").exists()


# export


@pytest.mark.fast_cases("True")
@pytest.mark.parametrize("from_file", [True, False])
def test_export(run, trained, tmp_path, from_file):
    names = ",".join("abcdefghij")
    code, out, err = run(
        "export",
        f"--model={trained / 'model.keras' if from_file else trained}",
        f"--output_dir={tmp_path}",
        f"--class_names={names}",
    )
    assert (code, err) == (0, "")
    assert out == f"SavedModel: {tmp_path / '1'}\n"
    images = np.random.RandomState(0).rand(3, 8, 8, 1).astype("float32")
    answer = tf.saved_model.load(str(tmp_path / "1")).signatures["serving_default"](
        images=tf.constant(images)
    )
    expected = he.load_model(trained / "model.keras")(images, training=False)
    np.testing.assert_allclose(answer["logits"], expected, atol=1e-5)
    labels = (tmp_path / "1" / "assets.extra" / "labels.txt").read_text().split()
    assert labels == list("abcdefghij")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["Missing flag; expected --model=... and --output_dir=..."]),
        (["--model={tmp}/x.keras", "--output_dir={tmp}/out"], ["No model", "x.keras"]),
        (["--model={tmp}", "--output_dir={tmp}/out"], ["No model", "model.keras"]),
        (
            ["--model={run}", "--output_dir={tmp}/out", "--class_names=a,b"],
            ["Class names do not match", "expected 10", "received 2"],
        ),
        (["--model={run}", "--output_dir={run}/history.csv"], ["history.csv"]),
    ],
)
def test_mistakes_in_export(run, trained, tmp_path, arguments, parts):
    places = {"tmp": tmp_path, "run": trained}
    answer = run("export", *(each.format(**places) for each in arguments))
    assert_one_line_error(answer, *parts)
    assert not (tmp_path / "out").exists()
