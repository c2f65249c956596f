"""`he-keras evaluate` on models of every kind of file, and with attacks that name a file."""

import functools
import json

import golden_models
import numpy as np
import pytest
from attack_victims import functional, images, labels
from programs import assert_one_line_error

import he_keras as he
from he_keras.attacks import cleverhans_bridge, transfer  # noqa: F401

TRAINING = {"name": "trained", "seed": 4}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with the same model in every kind of file, and data for it."""
    folder = tmp_path_factory.mktemp("Files")
    model = functional()
    (folder / "run").mkdir()
    (folder / "run" / "config.json").write_text(json.dumps(TRAINING))
    for path in (folder / "any.keras", folder / "run" / "model.keras"):
        model.save(path)
    he.export_saved_model(model, folder / "served")
    model.export(folder / "exported", verbose=False)
    np.savez(folder / "data.npz", x_test=images(), y_test=labels())
    np.savez(folder / "large.npz", x_test=np.zeros((4, 3, 3, 3), "float32"), y_test=np.arange(4))
    np.savez(folder / "one_set.npz", images=images(), labels=labels())
    (folder / "damaged.keras").write_text("rubbish")
    (folder / "damaged").mkdir()
    (folder / "damaged" / "saved_model.pb").write_text("rubbish")
    return folder


@functools.cache
def expected():
    attack = he.attacks.get("bim-5", he.ThreatModel("linf", "8/255"))
    return attack(functional(), images(), labels())


@pytest.mark.fast_cases("any.keras")
@pytest.mark.parametrize("path", ["any.keras", "run", "run/model.keras", "served", "exported"])
def test_a_model_of_every_kind_of_file(run, files, tmp_path, path):
    code, out, err = run(
        "evaluate",
        "--nochecks",
        f"--model={files / path}",
        f"--data={files / 'data.npz'}",
        "--attacks=bim-5",
        "--epsilon=8/255",
        f"--output_dir={tmp_path}",
    )
    assert code == 0, err
    report = json.loads((tmp_path / "report.json").read_text())
    clean = (functional()(images(), training=False).numpy().argmax(axis=1) == labels()).mean()
    assert report["clean_accuracy"] == pytest.approx(clean)
    bim = report["attacks"][0]
    assert (bim["name"], bim["settings"]["num_steps"]) == ("bim-5", 5)
    assert bim["robust_accuracy"] == pytest.approx(expected().robust_accuracy)
    assert 0 < expected().robust_accuracy < clean
    with np.load(tmp_path / "per_example.npz") as flags:
        np.testing.assert_array_equal(flags["bim-5"], ~expected().success)
    assert report["training"] == (TRAINING if path.startswith("run") else None)
    assert out.splitlines()[-1] == f"Report: {tmp_path / 'report.html'}"


@pytest.mark.slow
def test_attacks_that_name_a_file_or_a_library(run, files, tmp_path):
    paths = [files / "run", files / "served"]
    chosen = ["cleverhans:pgd-5", "cleverhans:fgsm", *(f"transfer:{path}" for path in paths)]
    code, out, err = run(
        "evaluate",
        "--nochecks",
        f"--model={files / 'any.keras'}",
        f"--data={files / 'data.npz'}",
        f"--attacks={','.join(chosen)}",
        "--epsilon=8/255",
        "--step_size=0.01",
        "--num_examples=13",
        f"--output_dir={tmp_path}",
    )
    assert code == 0, err
    rows = json.loads((tmp_path / "report.json").read_text())["attacks"]
    assert [row["name"] for row in rows] == chosen
    assert all(name in out for name in chosen)
    pgd, fgsm, run_folder, served = rows
    assert pgd["settings"]["step_size"] == run_folder["settings"]["step_size"] == 0.01
    assert fgsm["settings"]["step_size"] == 8 / 255
    assert pgd["backward_passes"] > fgsm["backward_passes"] > 0
    # One pass for images that are wrong from the start, two for the others.
    assert run_folder["backward_passes"] == 0 and 1 < run_folder["forward_passes"] <= 2
    # The substitute is the model itself, once from a file and once from a SavedModel.
    assert run_folder["robust_accuracy"] == served["robust_accuracy"] < 1
    with np.load(tmp_path / "per_example.npz") as flags:
        assert set(chosen) < set(flags.files)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--model={files}/none"], ["No model; expected an existing .keras file, run", "none"]),
        (["--model={files}"], ["No model in this folder; expected model.keras", "{files}"]),
        (["--model={files}/data.npz"], ["No model; expected an existing .keras file", "data.npz"]),
        (["--model={files}/damaged.keras"], ["Cannot load the model", "{files}/damaged.keras"]),
        (["--model={files}/damaged"], ["Cannot load the model", "{files}/damaged"]),
        (["--data={files}/large.npz"], ["Images do not fit the SavedModel", "(None, 2, 2, 3)"]),
        (["--data={files}/none.npz"], ["none.npz"]),
        (
            ["--data={files}/one_set.npz"],
            ["one set without splits", "images_test", "test_fraction"],
        ),
        (["--epsilon=8/0"], ["8/0"]),
        (["--epsilon=8"], ["epsilon is wider than the pixel bounds", "8"]),
        (["--attacks=pdg-20"], ["Unknown attack", "cleverhans:ATTACK", "transfer:PATH", "pdg-20"]),
        (["--attacks=transfer"], ["Unknown attack", "transfer:PATH"]),
        (["--attacks=transfer:"], ["Unknown attack", "transfer:PATH"]),
        (["--attacks=fgsm,transfer:{files}/none"], ["No model; expected", "{files}/none"]),
        (["--attacks=transfer:{files}/damaged"], ["Cannot load the model", "{files}/damaged"]),
        (["--attacks=cleverhans:cgw"], ["Unknown attack of cleverhans", "mim", "'cgw'"]),
        (["--attacks=cleverhans:spsa-100"], ["spsa-K", "'spsa-100'"]),
        (["--attacks=cleverhans:pgd-0"], ["num_steps=0"]),
        (["--attacks=cleverhans:cw-l2"], ["norm='linf'"]),
        (["--attacks=fgsm", "--corruptions=nowhere"], ["A file of the benchmark is missing"]),
    ],
)
def test_mistakes_end_in_one_line_before_any_attack(
    run, files, tmp_path, monkeypatch, arguments, parts
):
    def work(*args, **kwargs):
        raise AssertionError("an attack began")

    monkeypatch.setattr(he.attacks.Attack, "__call__", work)
    given = [argument.format(files=files) for argument in arguments]
    for default in (f"--model={files / 'served'}", f"--data={files / 'data.npz'}"):
        if not any(each.startswith(default.split("=")[0]) for each in given):
            given.append(default)
    answer = run("evaluate", *given, f"--output_dir={tmp_path / 'out'}")
    assert_one_line_error(answer, *(part.format(files=files) for part in parts))
    assert not (tmp_path / "out" / "report.json").exists()


@pytest.mark.real_data
def test_the_promised_command_on_cifar10(run, tmp_path):
    """The golden HE model, trained on CIFAR-10, as a SavedModel from elsewhere would be."""
    golden_models.classifier("he").export(tmp_path / "model", verbose=False)
    code, out, err = run(
        "evaluate",
        "--nochecks",
        f"--model={tmp_path / 'model'}",
        "--data=cifar10",
        "--attacks=pgd-20,autoattack",
        "--epsilon=8/255",
        "--num_examples=24",
        f"--output_dir={tmp_path}",
    )
    assert code == 0, err
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["num_examples"] == 24
    pgd, *rest = report["attacks"]
    assert pgd["name"] == "pgd-20"
    assert rest[-1]["robust_accuracy"] <= pgd["robust_accuracy"] <= report["clean_accuracy"]
    assert report["clean_accuracy"] > 0.25
