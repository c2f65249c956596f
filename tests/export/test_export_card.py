"""Calibration, the model card and the warm-up requests."""

import json
import re

import numpy as np
import pytest
import tensorflow as tf
from exported_models import NAMES, hypersphere_model, random_images, softmax
from google.protobuf import empty_pb2, unknown_fields
from tensorflow.core.framework import tensor_pb2

import he_keras as he
from he_keras.evaluation.run.facts import brief, model_facts, weights_digest
from he_keras.export import Calibration, Provenance, calibrate
from he_keras.export.calibration import expected_calibration_error, fit_temperature
from he_keras.export.card_page import card_page
from he_keras.export.declarations import adversary, article_15
from he_keras.export.model_card import evaluation_entry
from he_keras.export.warm_up import FILE_NAME, write_warm_up

CALIBRATION = Calibration(0.5, "insects", "validation", 90, 1.25, 0.75, 0.3, 0.05)
CONFIG = {
    "name": "insects",
    "data": {"name": "insects", "augmentation": "flip", "data_dir": ""},
    "threat": {"norm": "linf", "epsilon": "8/255"},
}


def report(**changes):
    content = {
        "num_examples": 90,
        "clean_accuracy": 0.7,
        "clean_interval": [0.6, 0.8],
        "worst_case": 0.4,
        "worst_case_interval": [0.3, 0.5],
        "threat": {"norm": "linf", "epsilon": 0.05, "bounds": [0.0, 1.0]},
        "mode": "survivors",
        "protocol": None,
        "attacks": [
            {"name": "pgd-20", "robust_accuracy": 0.45, "settings": {"logit_scale": "unit"}},
            {"name": "cw-linf-20", "robust_accuracy": 0.4, "settings": {}},
        ],
        "checks": [
            {"name": "finite", "verdict": "pass", "figure": "0", "message": "Fine."},
            {"name": "zero", "verdict": "warn", "figure": "3 | 4", "message": "Look."},
        ],
        "settings": {},
    }
    return {**content, **changes}


@pytest.fixture(scope="module")
def model():
    return hypersphere_model()


@pytest.fixture(scope="module")
def exported(model, tmp_path_factory):
    provenance = Provenance(
        source="runs/insects",
        config=CONFIG,
        report=report(settings={"model": brief(model_facts(model))}),
        report_file="runs/insects/evaluation/report.json",
    )
    folder = tmp_path_factory.mktemp("card") / "insects"
    version = he.export_saved_model(
        model, folder, NAMES, calibration=CALIBRATION, provenance=provenance
    )
    return version / "assets.extra"


@pytest.fixture(scope="module")
def card(exported):
    return json.loads((exported / "model_card.json").read_text())


# calibration


def test_temperature_undoes_a_factor():
    """Labels drawn from softmax(logits): of 3 * logits the temperature is 3."""
    random = np.random.RandomState(0)
    logits = random.normal(size=(20_000, 4))
    labels = (softmax(logits).cumsum(axis=1) > random.rand(20_000, 1)).argmax(axis=1)
    assert fit_temperature(3.0 * logits, labels) == pytest.approx(3.0, rel=0.05)


def test_temperature_is_the_minimum():
    random = np.random.RandomState(1)
    logits, labels = 4.0 * random.normal(size=(300, 3)), random.randint(0, 3, 300)
    logits[np.arange(200), labels[:200]] += 3.0
    found = fit_temperature(logits, labels)

    def loss(temperature):
        return -np.log(softmax(logits / temperature)[np.arange(300), labels]).mean()

    grid = np.geomspace(0.5, 20.0, 2001)
    assert found == pytest.approx(grid[np.argmin([loss(each) for each in grid])], rel=0.003)


def test_expected_calibration_error_by_hand():
    # Two bins: confidences 0.55 and 0.57 (one right), 0.95 (right).
    confidence = np.array([0.55, 0.57, 0.95])
    logits = np.log(np.stack([confidence, 1.0 - confidence], axis=1))
    expected = (abs(0.55 + 0.57 - 1.0) + abs(0.95 - 1.0)) / 3
    found = expected_calibration_error(logits, np.array([0, 1, 0]))
    assert found == pytest.approx(expected)
    assert expected_calibration_error(1e4 * logits, np.zeros(3, int)) == 0.0


def test_calibrate_reports_before_and_after(model):
    images, floats = random_images(120)
    logits = model.predict(floats, verbose=0)
    labels = np.where(np.arange(120) % 3 == 0, np.arange(120) % 5, logits.argmax(axis=1))
    found = calibrate(model, (images, labels), batch_size=50)
    assert (found.num_examples, found.split) == (120, "validation")
    rows = np.arange(120)
    assert found.nll_before == pytest.approx(-np.log(softmax(logits)[rows, labels]).mean(), 1e-5)
    after = -np.log(softmax(logits / found.temperature)[rows, labels]).mean()
    assert found.nll_after == pytest.approx(after, rel=1e-5)
    assert found.nll_after < found.nll_before
    assert found.ece_before == pytest.approx(expected_calibration_error(logits, labels), rel=1e-4)
    cooled = expected_calibration_error(logits / found.temperature, labels)
    assert found.ece_after == pytest.approx(cooled, rel=1e-4)
    assert f"{found.ece_before:.4f} -> {found.ece_after:.4f} on 120 images" in found.summary()


def test_calibration_never_sees_the_test_set(model):
    test = he.data.synthetic((8, 8, 3), 5, 10, split="test")
    with pytest.raises(ValueError, match="test set is not for calibration.*split='test'"):
        calibrate(model, test)


@pytest.mark.parametrize("label", [0, 1])
def test_nothing_to_calibrate(label):
    """All right: any lower temperature is better; all wrong: any higher one."""
    with pytest.raises(ValueError, match=f"No temperature fits.*accuracy={1 - label:.4f}"):
        fit_temperature(np.array([[2.0, 1.0]] * 4), np.full(4, label))


def test_labels_beyond_the_classes_are_refused(model):
    with pytest.raises(ValueError, match="Label outside the classes; expected 0..4; received 5"):
        calibrate(model, (random_images(6)[0], np.arange(6)))


# the card


def test_card_names_the_weights_and_the_model(model, card):
    facts = card["model"]
    assert facts["weights_sha256"] == weights_digest(model)
    assert facts["head"] == {"class": "CosineHead", "scale": 12.0, "margin": 0.2, "angle": "cosine"}
    assert (facts["image_shape"], facts["num_classes"]) == ([8, 8, 3], 5)
    assert facts["num_parameters"] == sum(value.size for value in model.get_weights())
    assert card["threat"] == {"norm": "linf", "epsilon": 0.05, "bounds": [0.0, 1.0]}
    assert card["data"] == CONFIG["data"] and card["settings"] == CONFIG
    assert card["class_names"] == list(NAMES)
    assert card["environment"]["tensorflow"] == tf.__version__


def test_card_lists_the_signatures(card):
    inputs = {name: entry["input"] for name, entry in card["signatures"].items()}
    assert {name: (entry["dtype"], entry["shape"]) for name, entry in inputs.items()} == {
        "serving_default": ("float32", [None, 8, 8, 3]),
        "serve_uint8": ("uint8", [None, 8, 8, 3]),
        "serve_bytes": ("string", [None]),
    }
    assert "cosines" in card["signatures"]["serve_bytes"]["outputs"]


def test_card_has_the_figures_of_the_report(card):
    entry = card["evaluation"]
    assert entry["status"] == "unverified"
    assert (entry["clean_accuracy"], entry["worst_case"], entry["num_examples"]) == (0.7, 0.4, 90)
    assert [(row["name"], row["logit_scale"]) for row in entry["attacks"]] == [
        ("pgd-20", "unit"),
        ("cw-linf-20", "model"),
    ]
    assert [check["verdict"] for check in entry["checks"]] == ["pass", "warn"]
    assert card["probabilities"]["temperature"] == 0.5
    assert card["probabilities"]["calibration"]["ece_after"] == 0.05


def test_page_says_what_the_card_says(exported, card):
    page = (exported / "model_card.md").read_text()
    assert page == card_page(card)
    for part in (
        card["model"]["weights_sha256"],
        "| (clean) | 70.00% (60.00% to 80.00%) |",
        "| (worst case) | 40.00% (30.00% to 50.00%) |",
        "| pgd-20 (logit scale unit) | 45.00% |",
        "Each attack ran on what all before it left.",
        "Sanity checks: 2, of which 1 warn or fail.",
        r"| zero | warn | 3 \| 4 | Look. |",
        "temperature 0.5, fitted on 90 images (insects, split validation)",
        "| expected calibration error | 0.3000 | 0.0500 |",
        "5: ant, bee, cat, dog, eel",
        "| knowledge: white-box | pgd-20, cw-linf-20 |",
        "| mitigation | adversarial training (PGDAT), perturbations of linf norm up to 0.05",
        "| 15(4) robustness to errors and faults | not recorded |",
        "## Intended use",
        "## Limits",
        '"tensorflow"',
    ):
        assert part in page
    # No row of a table has more cells than its header.
    for table in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE):
        cells = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(cells) == 1, table


def test_the_adversary_is_named_in_the_terms_of_nist(card):
    found = card["nist_ai_100_2"]
    assert (found["attack"], found["objective"]) == ("evasion", "integrity violation")
    assert found["knowledge"]["white_box"] == ["pgd-20", "cw-linf-20"]
    assert found["knowledge"]["black_box"] == found["knowledge"]["unknown"] == []
    # What was attacked, not what the run was trained for.
    assert found["capability"]["perturbation"] == card["evaluation"]["threat"]
    mitigation = {"kind": "adversarial training", "objective": "PGDAT", "threat": card["threat"]}
    assert found["mitigation"] == mitigation


def test_training_on_clean_images_is_no_mitigation(card):
    trained = hypersphere_model()
    assert adversary({"status": "none"}, trained)["mitigation"] is not None
    standard = he.objectives.Standard(he.ThreatModel("linf", 0.05))
    clean = he.HEAdversarialModel(trained.network, trained.head, standard)
    assert adversary({"status": "none"}, clean)["mitigation"] is None
    page = card_page({**card, "model": {**card["model"], "objective": "Standard"}})
    assert "Trained on clean images only." in page and "Trained against" not in page


def test_attacks_are_told_apart_by_what_they_know():
    names = ["autoattack", "rays-5", "transfer:other.keras", "mine"]
    evaluation = {
        "status": "measured",
        "threat": {"norm": "linf", "epsilon": 0.1, "bounds": [0.0, 1.0]},
        "attacks": [{"name": name} for name in names],
    }
    found = adversary(evaluation, None)
    assert found["mitigation"] is None
    assert found["knowledge"]["black_box"] == [
        "autoattack: square",
        "rays-5",
        "transfer:other.keras",
    ]
    assert len(found["knowledge"]["white_box"]) == 3
    assert found["knowledge"]["unknown"] == ["mine"]


def test_article_15_repeats_the_figures_and_claims_nothing(card):
    found = card["eu_ai_act_article_15"]
    assert found["evidence"]["status"] == card["evaluation"]["status"]
    assert (found["accuracy"]["value"], found["accuracy"]["interval"]) == (0.7, [0.6, 0.8])
    tested = found["cybersecurity"]["adversarial_examples"]["tested"]
    assert (tested["value"], tested["interval"], tested["num_examples"]) == (0.4, [0.3, 0.5], 90)
    assert (
        found["robustness_to_errors"] is None and found["cybersecurity"]["data_poisoning"] is None
    )
    section = {"mean_corruption_accuracy": 0.6, "num_images": 9, "source": "tfds"}
    with_section = article_15(card["evaluation"], None, {"corruptions": section})
    assert with_section["robustness_to_errors"]["value"] == 0.6
    assert article_15({"status": "other-model"}, None, {"corruptions": section}) == {
        **article_15({"status": "none"}, None, None),
        "evidence": {"status": "other-model", "report": None},
    }
    page = card_page({**card, "eu_ai_act_article_15": with_section})
    assert "no statement of conformity" in page
    assert "accuracy on test images: 70.00% (60.00% to 80.00%), n = 90 |" in page
    assert "mean accuracy on corrupted test images: 60.00%, n = 9 |" in page


@pytest.mark.parametrize(
    ("given", "status"),
    [
        (lambda model: None, "none"),
        (lambda model: report(), "unverified"),
        (lambda model: report(settings={"model": "f" * 64}), "other-model"),
        # As earlier versions wrote it: the same weights may have another head.
        (lambda model: report(settings={"model": weights_digest(model)}), "unverified"),
        # Equal weights and configurations are no equal functions: the answers must be there.
        (lambda model: report(settings={"model": brief(model_facts(model))}), "unverified"),
    ],
)
def test_figures_only_where_they_are_of_this_model(model, given, status):
    entry = evaluation_entry(Provenance(report=given(model)), model)
    assert entry["status"] == status
    assert ("clean_accuracy" in entry) == (status in ("unverified", "measured"))
    assert entry["note"]


def evaluated(model, folder):
    images, labels = random_images(6)[1], np.arange(6) % 5
    threat = he.ThreatModel("linf", 0.01)
    he.evaluate_robustness(model, (images, labels), threat, ["fgsm"], folder, checks=False)
    path = folder / "report.json"
    return Provenance(report=json.loads(path.read_text()), report_file=str(path))


@pytest.mark.slow
def test_the_same_weights_behind_another_scale_are_another_model(tmp_path):
    model = hypersphere_model()
    provenance = evaluated(model, tmp_path)
    assert evaluation_entry(provenance, model)["status"] == "measured"
    model.head.scale *= 3
    entry = evaluation_entry(provenance, model)
    assert entry["status"] == "other-model" and "clean_accuracy" not in entry
    answers = tmp_path / "adversarial" / "answers.npz"
    assert "(head scale: " in entry["note"] and answers.exists()


def test_what_no_configuration_says_shows_in_the_answers(tmp_path):
    """A layer of one's own with a number that it does not return from `get_config`."""
    import keras

    class Factor(keras.layers.Layer):
        factor = 1.0

        def call(self, images):
            return images * self.factor

    images = keras.Input((8, 8, 3))
    factor = Factor()
    flat = keras.layers.Flatten()(factor(images))
    model = keras.Model(images, keras.layers.Dense(5)(flat))
    provenance = evaluated(model, tmp_path)
    assert evaluation_entry(provenance, model)["status"] == "measured"
    factor.factor = 2.0
    entry = evaluation_entry(provenance, model)
    assert entry["status"] == "other-model" and "on probe images" in entry["note"]


def test_nothing_is_invented(tmp_path):
    """A bare Keras model: the page has no figure of accuracy at all."""
    import keras

    model = keras.Sequential(
        [keras.Input((2, 2, 1)), keras.layers.Flatten(), keras.layers.Dense(2)]
    )
    extra = he.export_saved_model(model, tmp_path / "bare") / "assets.extra"
    card = json.loads((extra / "model_card.json").read_text())
    for key in ("data", "threat", "settings", "conversions", "source"):
        assert card[key] is None
    for key in ("attack", "objective", "knowledge", "capability", "mitigation"):
        assert card["nist_ai_100_2"][key] is None
    article = card["eu_ai_act_article_15"]
    assert article["accuracy"] is None and article["evidence"]["status"] == "none"
    assert article["cybersecurity"]["adversarial_examples"] == {"measure": None, "tested": None}
    page = (extra / "model_card.md").read_text()
    assert "No evaluation report was found" in page and "%" not in page
    assert "What the model was trained against is not recorded." in page


# the warm-up


def test_warm_up_is_read_back(exported):
    """By Serving's field numbers, not by the writer's table."""
    found = {}
    for record in tf.data.TFRecordDataset(str(exported / FILE_NAME)).as_numpy_iterator():
        predict_request = field(field(record, 6), 1)
        model_spec = field(predict_request, 1)
        entry = field(predict_request, 2)
        assert field(model_spec, 1) == b"insects" and field(entry, 1) == b"images"
        tensor = tf.make_ndarray(tensor_pb2.TensorProto.FromString(field(entry, 2)))
        found[field(model_spec, 3).decode()] = tensor
    signatures = tf.saved_model.load(str(exported.parent)).signatures
    assert set(found) == set(signatures)
    for name, images in found.items():
        answer = signatures[name](images=tf.constant(images))
        assert answer["classes"].shape == (1,)


def test_warm_up_is_what_serving_defines(tmp_path):
    prediction_log_pb2 = pytest.importorskip("tensorflow_serving.apis.prediction_log_pb2")
    images = np.arange(4, dtype=np.uint8).reshape(1, 2, 2, 1)
    write_warm_up(tmp_path / FILE_NAME, "mine", {"serve_uint8": images})
    (record,) = tf.data.TFRecordDataset(str(tmp_path / FILE_NAME)).as_numpy_iterator()
    request = prediction_log_pb2.PredictionLog.FromString(record).predict_log.request
    assert (request.model_spec.name, request.model_spec.signature_name) == ("mine", "serve_uint8")
    np.testing.assert_array_equal(tf.make_ndarray(request.inputs["images"]), images)


def field(message, number):
    """The bytes of one field, by protobuf's parser of fields that it has no names for."""
    fields = unknown_fields.UnknownFieldSet(empty_pb2.Empty.FromString(message))
    (found,) = [each.data for each in fields if each.field_number == number]
    return found
