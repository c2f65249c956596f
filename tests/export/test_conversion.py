"""LiteRT and ONNX files: their numbers, their scores beside the original, and the flags."""

import dataclasses
import hashlib
import importlib.util
import json
import warnings

import numpy as np
import pytest
import tensorflow as tf
from exported_models import NAMES, hypersphere_model, random_images, softmax

import he_keras as he
from he_keras.export import ConversionPlan, conversions
from he_keras.export.card_page import conversion_summary
from he_keras.export.conversions import convert_and_score, parse_formats
from he_keras.export.float32_copy import compute_dtypes, in_float32
from he_keras.export.litert import LiteRTClassifier, convert_to_litert
from he_keras.export.onnx_file import OnnxClassifier, convert_to_onnx
from he_keras.export.served_classifier import ServedClassifier

THREAT = he.ThreatModel("linf", 0.05)


@pytest.fixture(scope="module")
def model():
    return hypersphere_model()


def labelled(model, count=48, split="test"):
    """Images whose labels the model gets right, all but every fourth."""
    images, floats = random_images(count, seed=5)
    labels = model.predict(floats, verbose=0).argmax(axis=1)
    labels[::4] = (labels[::4] + 1) % 5
    return he.data.ImageDataset("insects", split, images, labels, 5, NAMES)


def plan(model, formats, **options):
    test, train = labelled(model), labelled(model, 72, "train")
    return ConversionPlan(formats, test, train, THREAT, batch_size=24, **options)


@pytest.fixture(scope="module")
def converted(model, tmp_path_factory):
    """The result for LiteRT, and the folder of the files."""
    folder = tmp_path_factory.mktemp("converted")
    served = ServedClassifier(model, NAMES, temperature=2.0)
    return convert_and_score(served, plan(model, ["litert"]), folder), folder


def rows_of(result):
    return {row["name"]: row for row in result["rows"]}


# what can be asked for


@pytest.mark.parametrize(
    ("formats", "names"),
    [
        (["litert-int8"], ("litert-int8",)),
        (["litert-int8", "litert"], ("litert-int8", "litert-float32", "litert-float16")),
    ],
)
def test_formats(formats, names):
    assert parse_formats(formats) == names


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"formats": ["tflite"]}, r"Unknown format; expected some of \('litert', 'onnx'.*tflite"),
        ({"formats": []}, "Unknown format"),
        ({"attack": "pdg"}, "Unknown attack"),
        ({"attack": "cw-l2"}, "cw-l2 is not defined for this norm"),
        (
            {"attack": "fab"},
            "Images transfer only if .*; expected an attack .*received fab",
        ),
        ({"max_loss": -0.1}, "max_loss"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"num_representative": 0}, "num_representative=0"),
    ],
)
def test_mistakes_in_a_plan(changes, message):
    test = he.data.synthetic((8, 8, 3), 5, 10, split="test")
    options = {"formats": ["litert"], "test": test, "train": test, "threat": THREAT, **changes}
    with pytest.raises(ValueError, match=message):
        ConversionPlan(**options)


def test_missing_libraries_are_named(monkeypatch):
    find = importlib.util.find_spec
    hidden = {"tf2onnx": None}
    monkeypatch.setattr(importlib.util, "find_spec", lambda *name: hidden.get(*name, find(*name)))
    test = he.data.synthetic((8, 8, 3), 5, 10, split="test")
    with pytest.raises(ValueError, match=r"he_keras\[onnx\].*received no .*tf2onnx"):
        ConversionPlan(["onnx"], test, test, THREAT)


def test_default_attack_ignores_the_scale_and_goes_on_to_the_end():
    test = he.data.synthetic((8, 8, 3), 5, 10, split="test")
    attack = ConversionPlan(["litert"], test, test, THREAT).attack
    assert (attack.name, attack.loss, attack.num_steps) == ("margin-pgd-20", "cw", 20)
    assert not attack.stop_when_broken


# scores, without any conversion


@pytest.mark.slow
def test_scores_and_flags(model, monkeypatch, tmp_path):
    """Conversions that are known functions of the original."""
    original = he.attacks.Victim(model).logits

    def confused(images):
        """Swaps two classes."""
        return np.asarray(original(images))[:, [1, 0, 2, 3, 4]]

    fakes = {b"same": lambda images: np.asarray(original(images)) + 0.25, b"confused": confused}
    contents = {"float32": b"same", "int8": b"confused"}
    monkeypatch.setattr(conversions, "convert_to_litert", lambda *_: contents)
    monkeypatch.setattr(conversions, "LiteRTClassifier", fakes.get)
    asked = plan(model, ["litert-float32", "litert-int8"], max_loss=0.02, attack="fgsm")
    rows = rows_of(convert_and_score(ServedClassifier(model), asked, tmp_path))
    images, labels = asked.test.as_float()
    right = original(images).numpy().argmax(axis=1) == labels
    attacked = asked.attack(model, images, labels).x_adv
    robust = original(attacked).numpy().argmax(axis=1) == labels
    assert rows["keras"]["clean_accuracy"] == right.mean() == 0.75
    assert rows["keras"]["transferred_accuracy"] == robust.mean() < 0.7
    same, swapped = rows["litert-float32"], rows["litert-int8"]
    assert (same["clean_change"], same["transferred_change"], same["agreement"]) == (0.0, 0.0, 1.0)
    assert same["largest_logit_difference"] == pytest.approx(0.25, rel=1e-4)
    assert not same["is_flagged"] and not rows["keras"]["is_flagged"]
    wrong_now = confused(images).argmax(axis=1)
    assert swapped["clean_accuracy"] == (wrong_now == labels).mean()
    assert swapped["agreement"] == (wrong_now == original(images).numpy().argmax(axis=1)).mean()
    assert swapped["is_flagged"]
    assert swapped["sha256"] == hashlib.sha256(b"confused").hexdigest()


def test_errors_of_converters_are_one_line(model, monkeypatch, tmp_path):
    def fail(*_):
        raise RuntimeError("unknown operation\n" * 500)

    monkeypatch.setattr(conversions, "convert_to_litert", fail)
    with pytest.raises(
        ValueError, match="expected operations that LiteRT has; received unknown"
    ) as caught:
        convert_and_score(ServedClassifier(model), plan(model, ["litert-float32"]), tmp_path)
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("clean", "attacked", "flagged"),
    [(0.49, 0.30, False), (0.48, 0.30, True), (0.60, 0.28, True), (0.60, 0.29, False)],
)
def test_either_accuracy_may_flag(clean, attacked, flagged):
    original = conversions._Answers(np.zeros((100, 2)), 0.5, 0.3)
    answer = dataclasses.replace(original, clean=clean, attacked=attacked)
    assert conversions._row("onnx", answer, original, b"", 0.01).is_flagged is flagged


def test_representative_images_are_spread(model, monkeypatch, tmp_path):
    """A data set that is sorted by class must not give one class alone."""
    given = []

    def convert(served, precisions, images):
        given.append(images)
        raise RuntimeError("seen enough")

    monkeypatch.setattr(conversions, "convert_to_litert", convert)
    labels = np.repeat(np.arange(5), 10)
    images = np.zeros((50, 2, 2, 1), np.uint8) + labels[:, None, None, None].astype(np.uint8)
    train = he.data.ImageDataset("sorted", "train", images, labels, 5)
    asked = ConversionPlan(
        ["litert-int8"], train, train, THREAT, num_representative=10, batch_size=4
    )
    with pytest.raises(ValueError, match="seen enough"):
        convert_and_score(ServedClassifier(model), asked, tmp_path)
    (found,) = given
    assert found.dtype == np.float32 and len(found) == 10
    levels = np.round(found[:, 0, 0, 0] * 255).astype(int)
    assert np.bincount(levels).tolist() == [2] * 5


# half precision


def test_float32_copy_has_the_same_weights():
    model = hypersphere_model(dtype="mixed_bfloat16")
    copy = in_float32(model)
    assert compute_dtypes(model) == ("bfloat16",) and compute_dtypes(copy) == ("float32",)
    for theirs, ours in zip(copy.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(theirs, ours)
    floats = random_images(3)[1]
    np.testing.assert_allclose(copy(floats), hypersphere_model()(floats), atol=1e-5)


def test_float32_models_are_not_copied(model):
    assert in_float32(model) is model


# files


def interpreter(content):
    """TensorFlow's own, which warns that it will move to another package."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tf.lite.Interpreter(model_content=content)


@pytest.mark.slow
def test_litert_float32_is_the_model(model, converted):
    result, folder = converted
    images, floats = random_images(7, seed=8)
    content = (folder / "conversions" / "float32.tflite").read_bytes()
    classifier = LiteRTClassifier(content)
    for count in (7, 2):
        expected = model.predict(floats[:count], verbose=0)
        np.testing.assert_allclose(classifier(floats[:count]), expected, atol=1e-4)
    both = interpreter(content).get_signature_runner()(images=floats)
    expected = softmax(model.predict(floats, verbose=0) / 2.0)
    np.testing.assert_allclose(both["probabilities"], expected, atol=1e-5)
    assert rows_of(result)["litert-float32"]["agreement"] == 1.0


@pytest.mark.slow
def test_smaller_files_differ_but_not_much(converted):
    result, folder = converted
    rows = rows_of(result)
    assert set(rows) == {"keras", "litert-float32", "litert-float16", "litert-int8"}
    for name in ("litert-float16", "litert-int8"):
        assert 0.0 < rows[name]["largest_logit_difference"] < 3.0
        assert rows[name]["agreement"] > 0.8
    for row in result["rows"][1:]:
        content = (folder / row["file"]).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (
            row["num_bytes"],
            row["sha256"],
        )
    assert json.loads((folder / "conversions.json").read_text()) == result


@pytest.mark.slow
def test_float16_stores_its_weights_in_float16(converted):
    content = (converted[1] / "conversions" / "float16.tflite").read_bytes()
    details = interpreter(content).get_tensor_details()
    found = {(tuple(each["shape"]), each["dtype"]) for each in details}
    assert ((8, 3, 3, 3), np.float16) in found
    assert np.int8 not in {dtype for _, dtype in found}


@pytest.mark.slow
def test_int8_computes_in_integers(converted):
    content = (converted[1] / "conversions" / "int8.tflite").read_bytes()
    details = interpreter(content).get_tensor_details()
    # The convolution's kernel and what it returns.
    shapes = {tuple(each["shape"]) for each in details if each["dtype"] == np.int8}
    assert {(8, 3, 3, 3), (1, 3, 3, 8)} <= shapes
    wide = {tuple(each["shape"]) for each in details if each["dtype"] == np.float32}
    assert wide <= {(1, 8, 8, 3), (1, 8), (1, 5), (1, 1)}


@pytest.mark.slow
def test_half_precision_model_is_converted_in_float32(tmp_path):
    model = hypersphere_model(dtype="mixed_bfloat16")
    result = convert_and_score(ServedClassifier(model), plan(model, ["litert-float32"]), tmp_path)
    floats = random_images(7)[1]
    content = (tmp_path / "conversions" / "float32.tflite").read_bytes()
    expected = in_float32(model).predict(floats, verbose=0)
    np.testing.assert_allclose(LiteRTClassifier(content)(floats), expected, atol=1e-4)
    # Beside the original, which rounds to bfloat16.
    assert 1e-4 < rows_of(result)["litert-float32"]["largest_logit_difference"] < 0.5


@pytest.mark.slow
def test_card_and_summary_show_the_table(model, tmp_path):
    folder = he.export_saved_model(
        model, tmp_path, NAMES, conversions=plan(model, ["litert-float16"], max_loss=0.0)
    )
    page = (folder / "assets.extra" / "model_card.md").read_text()
    card = json.loads((folder / "assets.extra" / "model_card.json").read_text())
    row = rows_of(card["conversions"])["litert-float16"]
    line = f"| litert-float16 | {row['num_bytes']:,} | {row['clean_accuracy']:.2%} |"
    assert line in page and line in conversion_summary(folder)
    assert "crafted its images for the original" in page


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_onnx_is_the_model(tmp_path, dtype):
    pytest.importorskip("tf2onnx")
    onnx = pytest.importorskip("onnx")
    model = hypersphere_model(dtype=dtype)
    served = ServedClassifier(model, NAMES, temperature=2.0)
    result = convert_and_score(served, plan(model, ["onnx"]), tmp_path)
    content = (tmp_path / "conversions" / "model.onnx").read_bytes()
    onnx.checker.check_model(onnx.load_from_string(content), full_check=True)
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    assert (given.name, given.shape) == ("images", ["batch", 8, 8, 3])
    floats = random_images(7)[1]
    expected = in_float32(model).predict(floats, verbose=0)
    np.testing.assert_allclose(OnnxClassifier(content)(floats), expected, atol=1e-5)
    found = session.run(["probabilities"], {"images": floats[:2]})[0]
    np.testing.assert_allclose(found, softmax(expected[:2] / 2.0), atol=1e-5)
    assert rows_of(result)["onnx"]["agreement"] >= (1.0 if dtype == "float32" else 0.9)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["preact-resnet-small", "wide-resnet-10-1"])
def test_converters_know_every_operation(name):
    """Above all our batch norm, which is not Keras's, and the head of angles."""
    network = he.networks.get(name, (32, 32, 3))
    model = he.HEAdversarialModel(network, he.CosineHead(5, angle="arc"))
    served = ServedClassifier(model)
    images = np.random.RandomState(0).rand(4, 32, 32, 3).astype("float32")
    files = convert_to_litert(served, ["float32", "int8"], images)
    classifiers = [LiteRTClassifier(files["float32"])]
    if importlib.util.find_spec("tf2onnx"):
        classifiers.append(OnnxClassifier(convert_to_onnx(served)))
    expected = model.predict(images, verbose=0)
    for classifier in classifiers:
        np.testing.assert_allclose(classifier(images), expected, atol=1e-3)
    assert LiteRTClassifier(files["int8"])(images).shape == (4, 5)
