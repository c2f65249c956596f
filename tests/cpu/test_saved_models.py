"""Files of models hold nothing of the CPU tuning, and those of earlier versions still load."""

import json
import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf

import he_keras as he

#: What earlier versions wrote in place of Keras's own class.
OLD_CLASS = {
    "module": "he_keras.layers.convolution",
    "class_name": "Conv2D",
    "registered_name": "he_keras>Conv2D",
}


@pytest.fixture
def model():
    network = he.networks.PreActResNet((8, 8, 3), (16, 32), (1, 1))
    return he.HEAdversarialModel(network, he.CosineHead(3))


def configuration(path):
    with zipfile.ZipFile(path) as archive:
        return json.loads(archive.read("config.json"))


def parts(config):
    """All serialised objects inside a configuration."""
    if isinstance(config, dict):
        if "class_name" in config:
            yield config
        config = list(config.values())
    if isinstance(config, list):
        for each in config:
            yield from parts(each)


def as_earlier_versions_wrote_it(path, target):
    config = configuration(path)
    for part in parts(config):
        if part["class_name"] == "Conv2D":
            part.update(OLD_CLASS)
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(target, "w") as archive:
        for name in source.namelist():
            archive.writestr(
                name, json.dumps(config) if name == "config.json" else source.read(name)
            )


def test_convolutions_are_saved_as_keras_s(model, tmp_path):
    model.save(tmp_path / "model.keras")
    saved = list(parts(configuration(tmp_path / "model.keras")))
    assert "AveragePooling2D" not in {part["class_name"] for part in saved}
    convolutions = [part for part in saved if part["class_name"] == "Conv2D"]
    assert len(convolutions) == 6
    assert {(part["module"], part["registered_name"]) for part in convolutions} == {
        ("keras.layers", None)
    }


def test_a_file_of_an_earlier_version_loads_and_is_saved_anew(model, tmp_path):
    model.save(tmp_path / "new.keras")
    as_earlier_versions_wrote_it(tmp_path / "new.keras", tmp_path / "old.keras")
    assert "he_keras>Conv2D" in json.dumps(configuration(tmp_path / "old.keras"))
    loaded = he.load_model(tmp_path / "old.keras")
    images = np.random.default_rng(0).random((2, 8, 8, 3)).astype("float32")
    np.testing.assert_array_equal(loaded.plain_logits(images), model.plain_logits(images))
    assert type(loaded.network.get_layer("stem_conv")) is keras.layers.Conv2D
    loaded.save(tmp_path / "again.keras")
    assert "he_keras>Conv2D" not in json.dumps(configuration(tmp_path / "again.keras"))


def test_a_model_for_serving_is_exported_as_keras_runs_it(model, tmp_path):
    """It may be served on another device than the one that exported it."""
    folder = he.export_saved_model(model, tmp_path / "serving")
    graph = tf.saved_model.load(str(folder)).signatures["serving_default"].graph
    kinds = [operation.type for operation in graph.get_operations()]
    assert "BiasAdd" not in kinds
