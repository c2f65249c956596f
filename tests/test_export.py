"""The SavedModel for serving: same numbers without he_keras, complete versions, labels."""

import json
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import he_keras as he
from he_keras import export

SCALE = 12.0
# Reads the SavedModel as a server would: TensorFlow alone, in a process of its own.
READER = """
import json, sys
import numpy as np, tensorflow as tf
folder, inputs, outputs = sys.argv[1:]
model = tf.saved_model.load(folder)
images = np.load(inputs)
results = {}
for signature, key in (("serving_default", "floats"), ("serve_uint8", "bytes")):
    answer = model.signatures[signature](images=tf.constant(images[key]))
    results.update({f"{key}_{name}": value.numpy() for name, value in answer.items()})
np.savez(outputs, **results)
print(json.dumps({"he_keras": "he_keras" in sys.modules, "keras": "keras" in sys.modules}))
"""


@pytest.fixture(scope="module")
def model():
    keras.utils.set_random_seed(1)
    network = he.networks.get(
        "preact-resnet", (8, 8, 3), stage_widths=(16, 16), blocks_per_stage=(1, 1)
    )
    model = he.HEAdversarialModel(
        network,
        he.CosineHead(5, scale=SCALE, margin=0.2),
        he.objectives.PGDAT(he.ThreatModel("linf", 0.1), num_steps=1),
    )
    model.compile(optimizer=he.optimizers.SGD(0.1))
    images = np.random.RandomState(0).rand(32, 8, 8, 3).astype("float32")
    # A step of training, so that batch-norm statistics and weights are not those of a fresh model.
    model.fit(images, np.arange(32) % 5, batch_size=16, verbose=0)
    return model


@pytest.fixture(scope="module")
def served(model, tmp_path_factory):
    """The outputs of a fresh process, and the images that it was given."""
    folder = tmp_path_factory.mktemp("export")
    saved = he.export_saved_model(model, folder / "served", ["a", "b", "c", "d", "e"])
    images = np.random.RandomState(1).randint(0, 256, (7, 8, 8, 3)).astype(np.uint8)
    inputs = {"bytes": images, "floats": images.astype(np.float32) / np.float32(255.0)}
    np.savez(folder / "inputs.npz", **inputs)
    answer = subprocess.run(
        [sys.executable, "-c", READER, saved, folder / "inputs.npz", folder / "outputs.npz"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    loaded = json.loads(answer.stdout.splitlines()[-1])
    with np.load(folder / "outputs.npz") as archive:
        return saved, inputs, dict(archive), loaded


def test_reader_needs_no_he_keras(served):
    assert served[3]["he_keras"] is False


@pytest.mark.parametrize("kind", ["floats", "bytes"])
def test_logits_equal_the_models(model, served, kind):
    _, inputs, outputs, _ = served
    expected = model(inputs["floats"], training=False).numpy()
    np.testing.assert_allclose(outputs[f"{kind}_logits"], expected, rtol=0, atol=1e-5)
    assert outputs[f"{kind}_logits"].dtype == np.float32
    np.testing.assert_array_equal(outputs[f"{kind}_classes"], expected.argmax(axis=1))
    exponentials = np.exp(expected.astype(np.float64) - expected.max(axis=1, keepdims=True))
    probabilities = exponentials / exponentials.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(outputs[f"{kind}_probabilities"], probabilities, atol=1e-5)


def test_logits_include_the_scale(model, served):
    _, inputs, outputs, _ = served
    cosines = model.cosines(inputs["floats"]).numpy()
    np.testing.assert_allclose(outputs["floats_logits"], SCALE * cosines, atol=1e-4)
    assert np.abs(outputs["floats_logits"]).max() > 1.0


def test_labels_file(served):
    text = (served[0] / "assets.extra" / "labels.txt").read_text()
    assert text == "a\nb\nc\nd\ne\n"


def test_versions_increase_past_foreign_files(model, tmp_path):
    (tmp_path / "7").mkdir()
    (tmp_path / "8-old").mkdir()
    (tmp_path / "notes.txt").write_text("")
    assert he.export_saved_model(model, tmp_path) == tmp_path / "8"
    assert he.export_saved_model(model, str(tmp_path)) == tmp_path / "9"
    assert not (tmp_path / "9" / "assets.extra").exists()
    names = {each.name for each in tmp_path.iterdir()}
    assert names == {"7", "8", "8-old", "9", "notes.txt"}


def test_plain_keras_model_with_free_image_size(tmp_path):
    model = keras.Sequential(
        [
            keras.Input((None, None, 1)),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(3, kernel_initializer="ones"),
        ]
    )
    folder = he.export_saved_model(model, tmp_path, ("x", "y", "z"))
    answer = tf.saved_model.load(folder).signatures["serve_uint8"](
        images=tf.constant(np.full((1, 4, 6, 1), 51, np.uint8))
    )
    np.testing.assert_allclose(answer["logits"], [[0.2, 0.2, 0.2]], rtol=1e-6)


@pytest.mark.parametrize("stage", ["before", "after"])
def test_failed_export_leaves_nothing(model, tmp_path, monkeypatch, stage):
    write = export._write

    def fail(model, image_shape, folder):
        if stage == "after":
            write(model, image_shape, folder)
        else:
            folder.mkdir()
        raise OSError("disk full")

    monkeypatch.setattr(export, "_write", fail)
    with pytest.raises(OSError, match="disk full"):
        he.export_saved_model(model, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_remains_of_a_killed_export_are_replaced(model, tmp_path):
    remains = tmp_path / ".partial-1"
    remains.mkdir()
    (remains / "saved_model.pb").write_text("half")
    assert he.export_saved_model(model, tmp_path) == tmp_path / "1"
    assert [each.name for each in tmp_path.iterdir()] == ["1"]


def test_wrong_class_names_are_refused_before_any_work(model, tmp_path):
    with pytest.raises(ValueError, match="Class names do not match.*expected 5.*received 2"):
        he.export_saved_model(model, tmp_path / "served", ["a", "b"])
    assert not (tmp_path / "served").exists()


@pytest.mark.parametrize("thing", [None, keras.Sequential([keras.layers.Dense(2)])])
def test_only_built_models_are_exported(thing, tmp_path):
    with pytest.raises(ValueError, match="Nothing to export; expected a built keras.Model"):
        he.export_saved_model(thing, tmp_path)
