"""`evaluate_corruptions`: numbers counted by hand, the published files, TFDS, and mistakes."""

import json
import re
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf
from prepared_data import prepare_tfds

from he_keras import ThreatModel, data
from he_keras.data import corruptions
from he_keras.evaluation import corruption_benchmark, evaluate_robustness
from he_keras.evaluation.corruption_benchmark import ALEXNET_ERRORS, evaluate_corruptions
from he_keras.evaluation.report import add_to_report

ALL = (*corruptions.CORRUPTIONS, *corruptions.EXTRA_CORRUPTIONS)
SEVERITIES = (1, 2, 3, 4, 5)


def random_set(count=12, seed=0):
    random = np.random.RandomState(seed)
    images = random.randint(0, 256, (count, 32, 32, 3), dtype=np.uint8)
    return images, random.randint(0, 3, count)


def weights():
    return np.random.RandomState(1).normal(size=(32 * 32 * 3, 3)).astype(np.float32)


def linear(images):
    return tf.reshape(images, [tf.shape(images)[0], -1]) @ weights()


def accuracy_by_hand(images, labels):
    logits = images.reshape(len(images), -1).astype(np.float32) / np.float32(255) @ weights()
    return float((logits.argmax(1) == labels).mean())


# Generated


def test_accuracies_are_those_of_a_count_by_hand():
    images, labels = random_set()
    report = evaluate_corruptions(linear, (images, labels), batch_size=5, seed=4)
    assert tuple(report.accuracy) == ALL
    for name in ALL:
        expected = tuple(
            accuracy_by_hand(corruptions.corrupt(images, name, severity, seed=4), labels)
            for severity in SEVERITIES
        )
        assert report.accuracy[name] == expected
    fifteen = [report.accuracy[name] for name in corruptions.CORRUPTIONS]
    assert report.mean_corruption_accuracy == pytest.approx(np.mean(fifteen))
    extra = [report.accuracy[name] for name in corruptions.EXTRA_CORRUPTIONS]
    assert report.mean_extra_accuracy == pytest.approx(np.mean(extra))
    assert report.clean_accuracy == accuracy_by_hand(images, labels)
    assert (report.num_images, report.severities, report.is_complete) == (12, SEVERITIES, True)
    assert report.mean_corruption_error is None
    assert report.source == "generated, procedural frost (not the published pictures)"


def test_the_batch_size_and_the_kind_of_examples_change_nothing():
    images, labels = random_set()
    names = ["shot_noise", "fog"]
    expected = evaluate_corruptions(linear, (images, labels), names, batch_size=250)
    floats = images.astype(np.float32) / np.float32(255)
    stream = tf.data.Dataset.from_tensor_slices((floats, labels)).batch(5)
    dataset = data.ImageDataset("some", "test", images, labels, 3)
    for examples in ((floats, labels), stream, dataset):
        assert evaluate_corruptions(linear, examples, names, batch_size=7) == expected


def test_results_on_other_images_do_not_go_into_a_report(tmp_path):
    images, labels = random_set()
    examples = images.astype(np.float32) / np.float32(255), labels
    evaluate_robustness(linear, examples, ThreatModel(), ["fgsm"], tmp_path, checks=False)
    same, others = (
        evaluate_corruptions(linear, (each, labels), ["fog"], [1]).to_json()
        for each in (images, images[::-1])
    )
    add_to_report(tmp_path, corruptions=same)
    with pytest.raises(ValueError, match="received data: other images or labels for"):
        add_to_report(tmp_path, corruptions=others)
    first = evaluate_corruptions(linear, (images, labels), ["fog"], [1], num_examples=5)
    assert first.data is None


def test_some_examples_corruptions_and_severities():
    images, labels = random_set()
    report = evaluate_corruptions(
        linear, (images, labels), ["saturate", "contrast"], (5, 2), num_examples=7, batch_size=4
    )
    for name, row in report.accuracy.items():
        expected = [
            accuracy_by_hand(corruptions.corrupt(images[:7], name, severity), labels[:7])
            for severity in (5, 2)
        ]
        assert list(row) == expected
    assert report.clean_accuracy == accuracy_by_hand(images[:7], labels[:7])
    assert report.num_images == 7
    assert not report.is_complete
    assert report.mean_corruption_accuracy == np.mean(report.accuracy["contrast"])
    assert report.mean_extra_accuracy == np.mean(report.accuracy["saturate"])
    assert "not the mCA of all 15 x 5" in report.table()
    only_extra = evaluate_corruptions(linear, (images, labels), ["saturate"])
    assert only_extra.mean_corruption_accuracy is None
    assert evaluate_corruptions(linear, (images, labels), ["fog"]).mean_extra_accuracy is None


def test_a_keras_model_runs_in_inference_mode_and_compiles_once():
    traces = []

    class Watched(keras.layers.Layer):
        def call(self, images, training=None):
            if isinstance(images, tf.Tensor):
                traces.append(training)
            return images

    model = keras.Sequential(
        [
            keras.Input((32, 32, 3)),
            Watched(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.9),
            keras.layers.Dense(3),
        ]
    )
    traces.clear()
    images, labels = random_set()
    report = evaluate_corruptions(model, (images, labels), ["contrast"], batch_size=5)
    # One image to learn the number of classes, one trace for all batches of any size.
    assert traces == [False, False]
    corrupted = corruptions.corrupt(images, "contrast", 3).astype(np.float32) / np.float32(255)
    expected = (model(corrupted, training=False).numpy().argmax(1) == labels).mean()
    assert report.accuracy["contrast"][2] == expected


def test_logits_that_are_nan_count_as_wrong():
    images, _ = random_set()
    labels = np.zeros(12, int)

    def model(images):
        logits = tf.one_hot(tf.zeros(tf.shape(images)[0], tf.int32), 3)
        broken = images[:, 0, 0, :1] > 0.5
        return tf.where(broken, np.float32("nan"), logits)

    report = evaluate_corruptions(model, (images, labels), ["contrast"], (1,))
    left = corruptions.corrupt(images, "contrast", 1)[:, 0, 0, 0] <= 127
    assert 0 < left.mean() < 1
    assert report.accuracy["contrast"] == (left.mean(),)


def test_an_added_corruption_is_evaluated_but_in_no_mean(monkeypatch):
    monkeypatch.setattr(corruptions.registry, "ENTRIES", corruptions.registry.ENTRIES.copy())

    @corruptions.register("night", small=(0.0,) * 5, large=(0.0,) * 5)
    def night(images, setting):
        return images * setting.level

    images, labels = random_set()
    report = evaluate_corruptions(linear, (images, labels), ["night", "fog"])
    assert report.accuracy["night"] == ((labels == 0).mean(),) * 5
    assert report.mean_corruption_accuracy == np.mean(report.accuracy["fog"])


def test_frost_pictures_are_named(tmp_path):
    import PIL.Image

    PIL.Image.fromarray(np.full((200, 200, 3), 9, np.uint8)).save(tmp_path / "ice.png")
    examples = random_set()
    report = evaluate_corruptions(linear, examples, ["frost"], frost_dir=tmp_path)
    assert report.source == "generated, frost pictures ice.png"
    assert evaluate_corruptions(linear, examples, ["fog"]).source == "generated"


# What a report says


def sample_report(**changes):
    rows = {name: (0.8, 0.7, 0.6, 0.5, 0.4) for name in ALL}
    rows["fog"] = (1.0,) * 5
    facts = {"source": "generated", "num_images": 100, "severities": SEVERITIES, "accuracy": rows}
    return corruption_benchmark.CorruptionReport(**{**facts, **changes})


def test_json_and_table():
    report = sample_report(clean_accuracy=0.9)
    assert len(repr(report)) < 400
    stored = json.loads(json.dumps(report.to_json()))
    assert stored["source"] == "generated" and stored["num_images"] == 100
    assert stored["mean_corruption_accuracy"] == pytest.approx((14 * 0.6 + 1) / 15)
    assert stored["mean_extra_accuracy"] == pytest.approx(0.6)
    assert stored["accuracy"]["frost"] == [0.8, 0.7, 0.6, 0.5, 0.4]
    assert stored["is_complete"] is True and stored["mean_corruption_error"] is None
    heading, *table = report.table().splitlines()
    assert heading == "Accuracy by severity; no adversary, pixels 0 to 1"
    assert table[0].split() == ["corruption", "1", "2", "3", "4", "5", "mean"]
    assert len({len(line) for line in table[:20]}) == 1
    assert table[10].split() == ["fog", *["100.00%"] * 6]
    assert "(clean) 90.00%" in table
    assert "(mCA (15 corruptions x 5 severities)) 62.67%" in table
    assert "(mean of the extra corruptions) 60.00%" in table
    assert table[-1] == "n = 100 images each; generated"


def test_mean_corruption_error():
    images, labels = random_set()
    by_severity = {name: [0.5, 0.6, 0.7, 0.8, 0.9] for name in corruptions.CORRUPTIONS}
    report = evaluate_corruptions(linear, (images, labels), baseline_errors=by_severity)
    errors = [5 - sum(report.accuracy[name]) for name in corruptions.CORRUPTIONS]
    assert report.mean_corruption_error == pytest.approx(np.mean(errors) / 3.5)
    assert "mCE" in report.table()
    assert report.to_json()["mean_corruption_error"] == report.mean_corruption_error
    report = evaluate_corruptions(linear, (images, labels), baseline_errors=ALEXNET_ERRORS)
    alexnet = [5 * ALEXNET_ERRORS[name] for name in corruptions.CORRUPTIONS]
    assert report.mean_corruption_error == pytest.approx(np.mean(np.divide(errors, alexnet)))


# Published files


@pytest.fixture
def published(tmp_path):
    """A folder as CIFAR-10-C is published, with eight images."""
    random = np.random.RandomState(2)
    labels = random.randint(0, 3, 8)
    np.save(tmp_path / "labels.npy", np.tile(labels, 5).astype(np.uint8))
    for name in ALL:
        images = random.randint(0, 256, (40, 32, 32, 3), dtype=np.uint8)
        np.save(tmp_path / f"{name}.npy", images)
    return tmp_path


def test_published_files(published):
    labels = np.load(published / "labels.npy")[:8]
    report = evaluate_corruptions(linear, source=published, batch_size=3)
    for name in ALL:
        images = np.load(published / f"{name}.npy")
        expected = [
            accuracy_by_hand(images[8 * block : 8 * block + 8], labels) for block in range(5)
        ]
        assert list(report.accuracy[name]) == expected
    assert report.source == f"published files in {published.name}"
    assert (report.num_images, report.clean_accuracy) == (8, None)
    some = evaluate_corruptions(linear, None, ["snow"], (4,), str(published), num_examples=3)
    images = np.load(published / "snow.npy")
    assert some.accuracy == {"snow": (accuracy_by_hand(images[24:27], labels[:3]),)}
    clean = random_set()
    with_clean = evaluate_corruptions(linear, clean, ["snow"], source=published)
    assert with_clean.clean_accuracy == accuracy_by_hand(*clean)
    assert with_clean.num_images == 8


def damage(folder, kind):
    path = folder / "fog.npy"
    images, labels = np.load(path), np.load(folder / "labels.npy")
    if kind == "short":
        path.write_bytes(path.read_bytes()[:-100])
    elif kind == "missing":
        path.unlink()
    elif kind == "float":
        np.save(path, images / 255.0)
    elif kind == "few":
        np.save(path, images[:-1])
    elif kind == "text":
        path.write_text("no array")
    elif kind == "objects":
        np.save(path, np.array([{}]), allow_pickle=True)
    elif kind == "archive":
        np.savez(folder / "fog", images=images)
        (folder / "fog.npz").rename(path)
    elif kind == "other labels":
        np.save(folder / "labels.npy", np.arange(40) % 3)
    elif kind == "negative labels":
        np.save(folder / "labels.npy", np.full(40, -1))
    elif kind == "odd labels":
        np.save(folder / "labels.npy", labels[:-1])
    elif kind == "float labels":
        np.save(folder / "labels.npy", labels / 1.0)
    elif kind == "no labels":
        (folder / "labels.npy").unlink()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("short", "fog.npy cannot be read; expected a complete .npy file"),
        ("missing", "missing; expected a folder with labels.npy.*received no .*fog.npy"),
        ("float", r"fog.npy does not fit.*expected uint8 of shape \(40, .*dtype=float64"),
        ("few", r"expected uint8 of shape \(40, height, width, 3\).*shape=\(39, 32, 32, 3\)"),
        ("text", "fog.npy cannot be read"),
        ("objects", "fog.npy cannot be read"),
        ("archive", "fog.npy is no .npy file"),
        ("other labels", "labels.npy does not repeat"),
        ("negative labels", "expected the same labels >= 0"),
        ("odd labels", r"labels.npy does not hold labels.*shape=\(39,\)"),
        ("float labels", "labels.npy does not hold labels.*dtype=float64"),
        ("no labels", "received no .*labels.npy"),
    ],
)
def test_damaged_files_are_noticed_before_any_work(published, kind, message):
    damage(published, kind)
    with pytest.raises(ValueError, match=message):
        evaluate_corruptions(never_called, source=published, corruptions=["snow", "fog"])


def never_called(images):
    raise RuntimeError("the model was called")


# TFDS


def prepare_configuration(data_dir, configuration, images):
    """Prepares one configuration of cifar10_corrupted; its labels are 0, 1, 2, ..."""
    folder = prepare_tfds(data_dir / "building", "cifar10_corrupted", {"test": images})
    target = data_dir / "cifar10_corrupted" / configuration / "1.0.0"
    shutil.copytree(folder, target)
    shutil.rmtree(data_dir / "building")


def test_tfds(tmp_path, monkeypatch):
    keys = [(name, severity) for name in ("glass_blur", "fog") for severity in (2, 5)]
    stored = {key: random_set(9, seed)[0] for seed, key in enumerate(keys)}
    labels = np.arange(9) % 10
    for (name, severity), images in stored.items():
        tfds_name = {"glass_blur": "frosted_glass_blur"}.get(name, name)
        prepare_configuration(tmp_path, f"{tfds_name}_{severity}", images)

    def model(images):
        return tf.pad(linear(images), [[0, 0], [0, 7]], constant_values=-1e9)

    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    report = evaluate_corruptions(model, None, ["glass_blur", "fog"], (2, 5), "tfds")
    for name in ("glass_blur", "fog"):
        expected = [accuracy_by_hand(stored[name, severity], labels) for severity in (2, 5)]
        assert list(report.accuracy[name]) == expected
    assert report.source == "cifar10_corrupted of TFDS"
    with pytest.raises(ValueError, match=r"elastic_1/<version>.*tfds build cifar10_corrupted/elas"):
        evaluate_corruptions(
            never_called, None, ["elastic_transform"], (1,), "tfds", data_dir=tmp_path
        )


# Mistakes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"corruptions": ["hail"]}, "Unknown corruption"),
        ({"corruptions": []}, "Invalid corruptions; expected at least one"),
        ({"corruptions": ["fog", "fog"]}, "none twice"),
        ({"corruptions": "fog"}, "expected a sequence of each"),
        ({"severities": 3}, "expected a sequence of each"),
        ({"severities": (0,)}, "Invalid severity.*severity=0"),
        ({"severities": (6,)}, "Invalid severity.*severity=6"),
        ({"severities": ()}, "Invalid severities"),
        ({"source": "/nowhere"}, "A file of the benchmark is missing"),
        ({"source": 5}, 'expected "generated", "tfds" or a folder'),
        ({"examples": None}, "expected examples to corrupt"),
        ({"batch_size": 0}, "batch_size"),
        ({"num_examples": 0}, "num_examples"),
        ({"seed": -1}, "Invalid seed"),
        ({"frost_dir": "/nowhere"}, "No frost pictures"),
        ({"baseline_errors": {}}, "Invalid baseline_errors.*None for gaussian_noise"),
        ({"baseline_errors": ALEXNET_ERRORS, "severities": (1,)}, "Invalid baseline_errors"),
        ({"baseline_errors": {"fog": 0.0}, "corruptions": ["fog"]}, "not all 0"),
        ({"baseline_errors": {"fog": 1.5}, "corruptions": ["fog"]}, r"one error in \[0, 1\]"),
        ({"examples": (np.full((2, 32, 32, 3), 2.0), [0, 1])}, "outside"),
        ({"examples": (np.zeros((2, 32, 32, 3)), [0])}, "Invalid labels"),
    ],
)
def test_mistakes_are_noticed_before_any_work(changes, message):
    arguments = {"examples": random_set(), **changes}
    with pytest.raises((ValueError, TypeError), match=message):
        evaluate_corruptions(never_called, **arguments)


def test_labels_and_images_that_do_not_fit():
    images, labels = random_set()
    with pytest.raises(ValueError, match=r"Label outside the classes; expected 0..2; received 3"):
        evaluate_corruptions(linear, (images, labels + (labels == labels.max())), ["fog"])
    with pytest.raises(ValueError, match="Images cannot be corrupted"):
        evaluate_corruptions(never_called, (images[..., :1], labels), ["fog"])
    nothing = tf.data.Dataset.from_tensor_slices((images / 255, labels)).take(0).batch(5)
    with pytest.raises(ValueError, match="No examples; expected at least one"):
        evaluate_corruptions(linear, nothing, ["fog"])
    with pytest.raises(TypeError, match="expected a keras.Model or a callable"):
        evaluate_corruptions(None, (images, labels), ["fog"])


def test_a_progress_bar_on_request(capfd):
    evaluate_corruptions(linear, random_set(), ["fog"], (1,), show_progress=True)
    assert re.fullmatch("corruptions 100%, .* gone, fog 1\n", capfd.readouterr().err)
    evaluate_corruptions(linear, random_set(), ["fog"], (1,))
    assert capfd.readouterr().err == ""


def test_the_bar_moves_with_the_images(monkeypatch):
    """Three batches of each of three sets: their sizes must not be taken for the whole."""
    places = []

    def note(line, done, total, text):
        places.append((done, total))

    monkeypatch.setattr(corruption_benchmark.StatusLine, "count", note)
    names, severities = ["brightness", "contrast"], (1,)
    evaluate_corruptions(linear, random_set(), names, severities, batch_size=5, show_progress=True)
    assert places == [(done, 36) for done in (5, 10, 15, 20, 25, 30, 32, 34, 36)]


def test_the_cost_counts_every_set():
    from he_keras.data import ImageDataset

    images, labels = random_set()
    dataset = ImageDataset("random", "test", images, labels, 3)
    chosen = {"corruptions": ["brightness", "contrast"], "severities": (1, 5)}
    cost = corruption_benchmark.cost_of_corruptions(linear, dataset, **chosen)
    assert cost.passes == 12 * (1 + 2 * 2) and cost.seconds > 0
