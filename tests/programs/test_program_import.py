"""`he-keras import` and `he-keras zoo`, and what the other programs do with an imported model."""

import json

import numpy as np
import pytest
from programs import assert_one_line_error
from public_checkpoints import FOLDER, golden

import he_keras as he
from he_keras.registry import Registry
from he_keras.zoo import catalog
from he_keras.zoo.tensor_files import write_safetensors

HE_FILE = FOLDER / "at_he_wrn_10_1_legacy_cuda.pt"


@pytest.fixture
def small_entry(monkeypatch):
    """One published file, of the size of the stored one."""
    monkeypatch.setattr(catalog, "ENTRIES", Registry("entry"))

    def publish(clean=85.0, data="cifar10"):
        catalog.ENTRIES.clear()
        catalog.ENTRIES["at_he/small"] = he.zoo.Entry(
            *("at_he/small", "https://example.org/small.pt", "wide_resnet_10_1", "Apache-2.0"),
            **{"clean": clean, "robust": 50.0, "scale": 15.0, "margin": 0.1, "data": str(data)},
        )

    publish()
    return publish


def save_answers(path, model, share):
    """A data set that the model gets right in this share."""
    images = np.random.RandomState(0).uniform(size=(40, 32, 32, 3)).astype("float32")
    labels = np.asarray(model(images)).argmax(1)
    wrong = len(labels) - round(share * len(labels))
    labels[:wrong] = (labels[:wrong] + 1) % 10
    np.savez(path, x_train=images, y_train=labels, x_test=images, y_test=labels, num_classes=10)
    return path


def test_import_writes_a_model_with_the_published_logits(run, tmp_path):
    output = tmp_path / "model.keras"
    code, out, err = run("import", HE_FILE, "--recipe=at_he", f"--output={output}", "--scale=15")
    assert code == 0, err
    assert out.splitlines() == [
        "Network: wide_resnet_10_1, an HE head with scale 15, margin 0.2",
        "Ignored tensors: 7 of *.num_batches_tracked, 12 of sub_block1.*",
        "Beside the tensors: test_acc = 0.8514, test_robust_acc = 0.626",
        "Not checked: a layout has no data set; --data=NAME names one.",
        f"Model: {output}",
    ]
    stored = golden("at_he_wrn_10_1")
    model = he.load_classifier(output)
    np.testing.assert_allclose(model(stored.images), 15 * stored.logits, rtol=0, atol=2e-5)


@pytest.mark.slow
def test_imported_model_is_evaluated_and_exported(run, tmp_path):
    output = tmp_path / "model.keras"
    assert run("import", HE_FILE, "--recipe=at_he", f"--output={output}")[0] == 0
    data = save_answers(tmp_path / "data.npz", he.load_classifier(output), 1.0)
    flags = [f"--model={output}", f"--data={data}", f"--output_dir={tmp_path / 'report'}"]
    code, out, err = run("evaluate", *flags, "--nochecks", "--attacks=fgsm", "--epsilon=8/255")
    assert code == 0, err
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert report["clean_accuracy"] == 1.0 and report["threat"]["epsilon"] == 8 / 255
    code, out, err = run("export", f"--model={output}", f"--output_dir={tmp_path / 'served'}")
    assert code == 0, err
    images = golden("at_he_wrn_10_1").images
    served = he.load_classifier(tmp_path / "served")
    np.testing.assert_allclose(
        served(images), he.load_classifier(output)(images), rtol=0, atol=1e-5
    )


def test_options_that_no_file_stores(run, tmp_path):
    write_safetensors(tmp_path / "file.safetensors", golden("dm_wrn_10_1_mnist").state)
    output = tmp_path / "model.keras"
    flags = ["--options=border=2", "--statistics=0.5,0.5", "--input_shape=28,28,1"]
    file = tmp_path / "file.safetensors"
    code, _, err = run("import", file, "--recipe=deepmind/wrn", f"--output={output}", *flags)
    assert code == 0, err
    stored = golden("dm_wrn_10_1_mnist")
    logits = he.load_classifier(output)(stored.images)
    np.testing.assert_allclose(logits, stored.logits, rtol=0, atol=1e-5)
    write_safetensors(file, golden("rb_wrn_10_1_nosub").state)
    flags = ["--statistics=none", "--show_ignored"]
    code, out, _ = run("import", file, "--recipe=robustbench/wrn", f"--output={output}", *flags)
    assert code == 0 and "  bn1.num_batches_tracked" in out.splitlines()


def test_model_that_does_not_look_like_the_published_one_is_not_written(run, tmp_path, small_entry):
    data = save_answers(tmp_path / "data.npz", he.zoo.load("at_he/small", HE_FILE), 0.85)
    output = tmp_path / "model.keras"
    small_entry(data=data)
    flags = ["--recipe=at_he/small", f"--output={output}"]
    code, out, err = run("import", HE_FILE, *flags)
    assert code == 0, err
    text = "Clean accuracy on the first 40 test images: 85.0%; published on all: 85.00 %."
    assert text in out.splitlines() and output.exists()
    output.unlink()
    small_entry(clean=20.0, data=data)
    code, out, err = run("import", HE_FILE, *flags)
    assert code == 2 and "does not look like the published model" in out
    assert "expected about 20.0 % clean accuracy; received 85.0%: nothing is written" in err
    assert not output.exists()
    assert run("import", HE_FILE, *flags, "--nocheck")[0] == 0 and output.exists()


def test_data_that_is_not_prepared_is_not_checked(run, tmp_path, small_entry):
    flags = ["--recipe=at_he/small", f"--output={tmp_path / 'model.keras'}"]
    code, out, err = run("import", HE_FILE, *flags, f"--data_dir={tmp_path}")
    assert code == 0, err
    assert "Not checked: cifar10 is not prepared on this machine." in out.splitlines()
    flags += [f"--data_dir={tmp_path}", "--data=cifar10"]
    code, _, err = run("import", HE_FILE, *flags)
    assert code == 2 and len(err.splitlines()) == 1


def test_downloaded_file_is_taken(run, tmp_path, small_entry):
    flags = ["--recipe=at_he/small", f"--output={tmp_path / 'model.keras'}", "--nocheck"]
    missing = run("import", *flags, f"--folder={tmp_path}")
    expected = f"expected {tmp_path}/at_he/small.pt; received no such file: run he-keras zoo"
    assert_one_line_error(missing, expected, "fetch https://example.org/small.pt and put it there")
    (tmp_path / "at_he").mkdir()
    (tmp_path / "at_he" / "small.pt").write_bytes(HE_FILE.read_bytes())
    code, out, err = run("import", *flags, f"--folder={tmp_path}")
    assert code == 0, err
    assert out.splitlines()[:3] == [
        "at_he/small: wide_resnet_10_1, cifar10, linf 8/255, clean 85.00 %, AutoAttack 50.00 %, "
        "licence Apache-2.0",
        "  https://example.org/small.pt",
        "Network: wide_resnet_10_1, an HE head with scale 15, margin 0.1",
    ]


def test_mistakes_end_in_one_line(run, tmp_path):
    output = f"--output={tmp_path / 'model.keras'}"
    assert_one_line_error(run("import", HE_FILE, output), "expected --recipe=NAME and --output=")
    assert_one_line_error(run("import", HE_FILE, "--recipe=at_he"), "received --recipe=at_he and")
    assert_one_line_error(run("import", "--recipe=at_he", output), "No file; expected he-keras im")
    assert_one_line_error(run("import", HE_FILE, "--recipe=athe", output), "mean 'at_he'")
    at_he = [HE_FILE, "--recipe=at_he", output]
    assert_one_line_error(run("import", *at_he, "--options=relu"), "expected NAME=VALUE,...")
    assert_one_line_error(run("import", *at_he, "--options=a=b"), "no such option", "a='b'")
    assert_one_line_error(run("import", *at_he, "--statistics=1,2,3"), "as many deviations")
    assert_one_line_error(run("import", *at_he, "--statistics=one"), "expected numbers separated")
    assert_one_line_error(
        run("import", HE_FILE, "--recipe=trades", output), "expected tensors only"
    )
    hostile = FOLDER / "hostile" / "pwned_zip.pt"
    assert_one_line_error(run("import", hostile, "--recipe=trades", output), "be read safely")
    assert not (tmp_path / "model.keras").exists()


def test_zoo_lists_source_licence_and_published_figures(run):
    code, out, err = run("zoo")
    assert code == 0, err
    lines = out.splitlines()
    assert [line.partition(":")[0] for line in lines if line[0] != " "] == he.zoo.recipes()
    place = lines.index(
        "  at_he/wrn-34-20: wide_resnet_34_20, cifar10, linf 8/255, clean 85.14 %, "
        "AutoAttack 53.74 %, licence Apache-2.0"
    )
    assert lines[place + 1].startswith("    http://ml.cs.tsinghua.edu.cn/")
    assert sum(line.startswith("  ") for line in lines) == 2 * len(he.zoo.entries())
    code, out, err = run("zoo", "--recipe=trades")
    assert code == 0 and len(out.splitlines()) == 3
    assert_one_line_error(run("zoo", "--recipe=trade"), "Unknown recipe", "did you mean 'trades'")


def test_zoo_downloads_nothing_unless_asked(run, tmp_path):
    folder = f"--folder={tmp_path}"
    assert run("zoo", folder)[0] == 0 and not list(tmp_path.iterdir())
    answer = run("zoo", "--download=fast_adversarial/preact-resnet-18", folder)
    assert_one_line_error(answer, "open https://drive.google.com", "put the file at")
    (tmp_path / "trades").mkdir()
    (tmp_path / "trades" / "wrn-34-10.pt").write_bytes(b"123")
    code, out, _ = run("zoo", "--download=trades/wrn-34-10", folder)
    assert code == 0 and out.splitlines() == [
        f"File: {tmp_path}/trades/wrn-34-10.pt",
        "SHA-256: a665a45920422f9d417e4867efdc4fb8a04a1f3fff1fa07e998e86f7f7a27ae3 (none is "
        "published to compare it with)",
        "Next: he-keras import --recipe=trades/wrn-34-10 --output=model.keras",
    ]
