"""The SavedModel for serving: signatures, outputs, assets, and what is refused."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from exported_models import NAMES, SCALE, hypersphere_model, random_images, softmax

import he_keras as he
from he_keras.export import saved_model
from he_keras.export.served_classifier import ServedClassifier
from he_keras.export.warm_up import FILE_NAME
from he_keras.model_files import load_classifier

SIGNATURES = ("serving_default", "serve_uint8", "serve_bytes")


@pytest.fixture(scope="module")
def model():
    return hypersphere_model()


@pytest.fixture(scope="module")
def version(model, tmp_path_factory):
    return he.export_saved_model(model, tmp_path_factory.mktemp("export") / "insects", NAMES)


@pytest.fixture(scope="module")
def served(version):
    return tf.saved_model.load(str(version)).signatures


def encoded(images):
    return tf.constant([tf.io.encode_png(image).numpy() for image in images])


def request(signature, count=7, seed=1):
    """The input of a signature, and the float images that it stands for."""
    images, floats = random_images(count, seed=seed)
    inputs = {"serving_default": floats, "serve_uint8": images}
    return inputs.get(signature, encoded(images)), floats


@pytest.fixture(scope="module")
def answers(served):
    return {
        name: {key: value.numpy() for key, value in served[name](images=request(name)[0]).items()}
        for name in SIGNATURES
    }


def test_these_signatures_and_no_others(served):
    assert set(served) == set(SIGNATURES)
    outputs = {"logits", "probabilities", "classes", "scores", "labels", "cosines"}
    for name in SIGNATURES:
        assert set(served[name].structured_outputs) == outputs
        assert served[name].structured_outputs["classes"].dtype == tf.int64
        (spec,) = served[name].structured_input_signature[1].values()
        assert spec.name == "images" and spec.shape[0] is None


@pytest.mark.parametrize("name", SIGNATURES)
def test_logits_are_those_of_predict(model, answers, name):
    expected = model.predict(request(name)[1], verbose=0)
    np.testing.assert_allclose(answers[name]["logits"], expected, rtol=0, atol=1e-5)
    assert answers[name]["logits"].dtype == np.float32
    assert np.abs(expected).max() > 1.0
    np.testing.assert_array_equal(answers[name]["classes"], expected.argmax(axis=1))
    np.testing.assert_allclose(answers[name]["probabilities"], softmax(expected), atol=1e-5)


@pytest.mark.parametrize("name", SIGNATURES)
def test_cosines_are_the_logits_without_scale(model, answers, name):
    np.testing.assert_allclose(
        answers[name]["cosines"], model.cosines(request(name)[1]).numpy(), atol=1e-6
    )
    np.testing.assert_allclose(SCALE * answers[name]["cosines"], answers[name]["logits"], atol=1e-5)


def test_scores_and_labels_are_sorted_by_probability(answers):
    answer = answers["serve_uint8"]
    order = np.argsort(-answer["probabilities"], axis=1, kind="stable")
    expected = np.take_along_axis(answer["probabilities"], order, axis=1)
    np.testing.assert_array_equal(answer["scores"], expected)
    labels = [[name.decode() for name in row] for row in answer["labels"]]
    assert labels == [[NAMES[number] for number in row] for row in order]
    assert len({tuple(row) for row in labels}) > 1


@pytest.mark.parametrize("name", SIGNATURES)
@pytest.mark.parametrize("count", [1, 3])
def test_batches_of_any_size(model, served, name, count):
    images, floats = request(name, count, seed=9)
    answer = served[name](images=tf.constant(images))
    assert answer["labels"].shape == (count, len(NAMES))
    np.testing.assert_allclose(answer["logits"], model(floats, training=False), atol=1e-5)


def test_top_k_and_temperature(model):
    served = ServedClassifier(model, NAMES, temperature=2.5, top_k=2)
    floats = random_images(4)[1]
    answer = served(tf.constant(floats))
    logits = model.predict(floats, verbose=0)
    np.testing.assert_allclose(answer["logits"], logits, atol=1e-5)
    np.testing.assert_allclose(answer["probabilities"], softmax(logits / 2.5), atol=1e-5)
    assert answer["scores"].shape == answer["labels"].shape == (4, 2)
    best = np.sort(answer["probabilities"], axis=1)[:, :2:-1]
    np.testing.assert_allclose(answer["scores"], best, rtol=0)


def test_ties_of_rounded_probabilities_go_by_logits():
    """A saturated softmax says 0 of several classes, whose logits still have an order."""
    head = keras.layers.Dense(3, use_bias=False)
    model = keras.Sequential([keras.Input((1, 1, 1)), keras.layers.Flatten(), head])
    head.set_weights([np.array([[-400.0, 900.0, -300.0]])])
    answer = ServedClassifier(model, ("a", "b", "c"))(tf.ones([1, 1, 1, 1]))
    assert answer["probabilities"].numpy().tolist() == [[0.0, 1.0, 0.0]]
    assert answer["labels"].numpy().tolist() == [[b"b", b"c", b"a"]]


@pytest.mark.parametrize(
    ("head", "has_cosines"),
    [
        (lambda: keras.layers.Dense(5), False),
        (lambda: he.CosineHead(5, weight_norm=False), False),
        (lambda: he.CosineHead(5, angle="arc"), True),
    ],
)
def test_cosines_only_where_there_are_some(head, has_cosines):
    served = ServedClassifier(hypersphere_model(head=head()))
    answer = served(tf.constant(random_images(2)[1]))
    assert served.has_cosines is has_cosines
    assert ("cosines" in answer) is has_cosines
    if has_cosines:
        angles = -np.arccos(answer["cosines"])
        np.testing.assert_allclose(answer["logits"], 15.0 * angles, atol=1e-3)


def test_functional_model_ends_in_a_cosine_head():
    inputs = keras.Input((4,))
    features = keras.layers.Dense(3)(inputs)
    model = keras.Model(inputs, he.CosineHead(2, scale=7.0)(features))
    images = tf.random.uniform([3, 4])
    answer = ServedClassifier(model)(images)
    np.testing.assert_allclose(answer["logits"], model(images), atol=1e-6)
    np.testing.assert_allclose(7.0 * answer["cosines"], answer["logits"], atol=1e-6)


@pytest.mark.slow
def test_mixed_precision_answers_in_float32(tmp_path):
    model = hypersphere_model(dtype="mixed_bfloat16")
    folder = he.export_saved_model(model, tmp_path)
    images, floats = random_images(6)
    answer = tf.saved_model.load(str(folder)).signatures["serve_uint8"](images=tf.constant(images))
    for name in ("logits", "probabilities", "scores", "cosines"):
        assert answer[name].dtype == tf.float32
    # Compiled as a whole, half precision rounds elsewhere.
    np.testing.assert_allclose(answer["logits"], model(floats, training=False), atol=0.05)
    facts = json.loads((folder / "assets.extra" / "model_card.json").read_text())["model"]
    assert (facts["compute_dtypes"], facts["output_dtype"]) == (["bfloat16"], "float32")


def test_plain_keras_model_with_free_image_size(tmp_path):
    model = keras.Sequential(
        [
            keras.Input((None, None, 1)),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(3, kernel_initializer="ones"),
        ]
    )
    folder = he.export_saved_model(model, tmp_path, ("x", "y", "z"))
    signatures = tf.saved_model.load(str(folder)).signatures
    answer = signatures["serve_uint8"](images=tf.constant(np.full((1, 4, 6, 1), 51, np.uint8)))
    np.testing.assert_allclose(answer["logits"], [[0.2, 0.2, 0.2]], rtol=1e-6)
    # Files of several sizes do not make a batch.
    assert "serve_bytes" not in signatures
    card = json.loads((folder / "assets.extra" / "model_card.json").read_text())
    assert card["preprocessing"]["serve_bytes"].startswith("not offered")


def test_weights_are_stored_once(model, version):
    size = (version / "variables" / "variables.data-00000-of-00001").stat().st_size
    weights = sum(value.nbytes for value in model.get_weights())
    assert weights <= size < weights + 2 * 20_000  # Each variable brings a name and a checksum.
    stored = [name for name, shape in tf.train.list_variables(str(version / "variables/variables"))]
    assert len([name for name in stored if "VARIABLE_VALUE" in name]) == len(model.weights)


def test_layout(version):
    assert version.name == "1"
    assert (version / "saved_model.pb").is_file() and (version / "fingerprint.pb").is_file()
    extra = {path.name for path in (version / "assets.extra").iterdir()}
    assert extra == {"labels.txt", "model_card.json", "model_card.md", FILE_NAME}
    assert (version / "assets.extra" / "labels.txt").read_text() == "".join(
        f"{name}\n" for name in NAMES
    )


def test_class_numbers_are_the_default_names(model):
    assert ServedClassifier(model).class_names == tuple("01234")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"class_names": ["a", "b"]}, "Class names do not match.*expected 5.*received 2"),
        ({"class_names": ["a", "b", "c", "d", "e\nf"]}, r"without line breaks; received 'e\\nf'"),
        ({"class_names": ["a", "b", "c", "d", " "]}, "A class name is a line.*received ' '"),
        ({"resize": "stretch"}, "Unknown resize; expected one of .*centre-crop.*'stretch'"),
        ({"top_k": 6}, "expected top_k of at most 5; received top_k=6"),
        ({"top_k": 0}, "top_k=0"),
    ],
)
def test_mistakes_are_refused_before_any_work(model, tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        he.export_saved_model(model, tmp_path / "served", **arguments)
    assert not (tmp_path / "served").exists()


@pytest.mark.parametrize("thing", [None, keras.Sequential([keras.layers.Dense(2)])])
def test_only_built_models_are_exported(thing, tmp_path):
    with pytest.raises(ValueError, match="Nothing to export; expected a built keras.Model"):
        he.export_saved_model(thing, tmp_path)


def test_probabilities_in_place_of_logits_are_refused(tmp_path):
    layers = [keras.Input((4,)), keras.layers.Dense(3, activation="softmax")]
    with pytest.raises(ValueError, match="returns probabilities; expected logits"):
        he.export_saved_model(keras.Sequential(layers), tmp_path)


def test_models_of_several_outputs_are_refused(tmp_path):
    layers = [keras.Input((4, 4, 1)), keras.layers.Conv2D(2, 1)]
    with pytest.raises(ValueError, match=r"Not a classifier; .* received \(4, 4, 4, 2\)"):
        he.export_saved_model(keras.Sequential(layers), tmp_path)


@pytest.mark.fast_cases("False-bounds0")
@pytest.mark.parametrize("bounds", [(0.0, 255.0), (-1.0, 1.0)])
@pytest.mark.parametrize("is_trained", [True, False])
def test_every_signature_brings_images_to_the_bounds_of_the_model(bounds, is_trained, tmp_path):
    threat = he.ThreatModel("linf", 0.1, bounds)
    layers = [keras.Input((2, 3, 1)), keras.layers.Rescaling(1 / threat.width)]
    network = keras.Sequential([*layers, keras.layers.Flatten(), keras.layers.Dense(3)])
    model = he.HEAdversarialModel(network, keras.layers.Dense(2), he.objectives.PGDAT(threat))
    if is_trained:
        folder = he.export_saved_model(model, tmp_path)
        with pytest.raises(ValueError, match=r"bounds=.*received bounds=\(0.0, 1.0\)"):
            he.export_saved_model(model, tmp_path, bounds=(0, 1))
    else:
        images = keras.Input((2, 3, 1))
        model = keras.Model(images, model.head(network(images)))
        folder = he.export_saved_model(model, tmp_path, bounds=bounds)
    pixels = np.random.RandomState(0).randint(0, 256, (4, 2, 3, 1)).astype("uint8")
    given = threat.from_unit(pixels.astype("float32") / 255)
    signatures = tf.saved_model.load(str(folder)).signatures
    files = [tf.io.encode_png(each).numpy() for each in pixels]
    expected = model(given, training=False)
    for name, images in (
        ("serving_default", given), ("serve_uint8", pixels), ("serve_bytes", np.array(files))
    ):  # fmt: skip
        found = signatures[name](images=tf.constant(images))["logits"]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5, err_msg=name)
    card = json.loads((folder / "assets.extra" / "model_card.json").read_text())
    assert card["model"]["bounds"] == list(bounds)
    low, high = (f"{bound:g}" for bound in bounds)
    assert f"values in [{low}, {high}]" in card["preprocessing"]["serving_default"]
    loaded = load_classifier(folder)
    assert loaded.bounds == bounds and loaded.threat == (threat if is_trained else None)
    with pytest.raises(ValueError, match="Other pixel values than the model was trained on"):
        he.attacks.get("fgsm", he.ThreatModel())(loaded, np.zeros_like(given), np.zeros(4, int))


def test_failed_export_leaves_nothing(model, tmp_path, monkeypatch):
    def fail(served, resize, folder):
        (folder / "saved_model.pb").touch()
        raise OSError("disk full")

    monkeypatch.setattr(saved_model, "_write", fail)
    with pytest.raises(OSError, match="disk full"):
        he.export_saved_model(model, tmp_path)
    assert list(tmp_path.iterdir()) == []
