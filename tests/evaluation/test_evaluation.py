"""`evaluate_robustness`: what it counts, in which order, and what it leaves on disk."""

import dataclasses
import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import he_keras as he
from he_keras.evaluation import Check
from he_keras.evaluation.report.robustness_report import RESERVED
from he_keras.evaluation.robustness import resolve_attacks

pytestmark = pytest.mark.usefixtures("op_by_op")

THREAT = he.ThreatModel("linf", 0.08)
NUM_EXAMPLES = 23


@pytest.fixture(scope="module")
def model():
    keras.utils.set_random_seed(2)
    layers = [keras.Input((6,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(8)]
    model = he.HEAdversarialModel(
        keras.Sequential(layers), he.CosineHead(3, scale=20.0, margin=0.1), evaluation_attack=None
    )
    model.compile(optimizer=keras.optimizers.Adam(0.01))
    images, labels = make_examples(256, seed=5)
    model.fit(images, labels, batch_size=32, epochs=20, verbose=0)
    return model


def make_examples(count=NUM_EXAMPLES, seed=0):
    random = np.random.RandomState(seed)
    labels = random.randint(0, 3, count)
    centres = np.eye(3).repeat(2, axis=1) * 0.25 + 0.35
    images = np.clip(centres[labels] + 0.12 * random.randn(count, 6), 0, 1)
    return images.astype("float32"), labels


@pytest.fixture(scope="module")
def examples():
    return make_examples()


ATTACKS = ("fgsm", "pgd-3", "cw-linf-3")


def evaluate(*arguments, **options):
    """Without the checks, and each attack by itself."""
    settings = {"checks": False, "mode": "individual", **options}
    return he.evaluate_robustness(*arguments, **settings)


@pytest.fixture(scope="module")
def written(model, examples, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "deep" / "evaluation"
    return folder, evaluate(model, examples, THREAT, ATTACKS, folder, batch_size=10)


@pytest.fixture(scope="module")
def report(written):
    return written[1]


def test_the_model_is_worth_attacking(report):
    assert 0.5 < report.clean_accuracy <= 1.0
    assert 0.0 < report.worst_case < report.clean_accuracy


def test_clean_flags_are_the_models_predictions(model, examples, report):
    images, labels = examples
    expected = model.predict(images, verbose=0).argmax(axis=1) == labels
    np.testing.assert_array_equal(report.correct["clean"], expected)
    assert report.clean_accuracy == expected.mean()


@pytest.mark.parametrize("name", ATTACKS)
def test_flags_are_those_of_the_attack_itself(model, examples, report, name):
    # The attack sees all examples at once here, in batches of 10 there: 23 is no multiple of 10.
    result = he.attacks.get(name, THREAT, batch_size=100)(model, *examples)
    np.testing.assert_array_equal(report.correct[name], ~result.success)
    (row,) = (row for row in report.rows if row.name == name)
    assert row.robust_accuracy == result.robust_accuracy
    # What is wrong from the start is not attacked.
    clean = report.correct["clean"]
    assert row.num_attacked == clean.sum()
    assert row.num_broken == result.success[clean].sum()
    assert row.forward_passes == result.forward_passes[clean].sum() / NUM_EXAMPLES
    assert row.backward_passes == result.backward_passes[clean].sum() / NUM_EXAMPLES
    assert row.seconds >= 0


def test_worst_case_is_the_conjunction(report):
    survivors = np.logical_and.reduce([report.correct[name] for name in ("clean", *ATTACKS)])
    assert report.worst_case == survivors.mean()
    assert report.num_examples == NUM_EXAMPLES == len(survivors)
    assert report.worst_case <= min(row.robust_accuracy for row in report.rows)
    assert [row.name for row in report.rows] == list(ATTACKS)


def test_order_of_attacks_changes_nothing_but_the_order(model, examples, report):
    again = evaluate(model, examples, THREAT, ATTACKS[::-1], batch_size=7)
    assert [row.name for row in again.rows] == list(ATTACKS[::-1])
    assert again.worst_case == report.worst_case
    for name in ("clean", *ATTACKS):
        np.testing.assert_array_equal(again.correct[name], report.correct[name])


def test_mistakes_on_clean_images_count(examples):
    # Right on the first ten images only, whatever is done to them.
    images, labels = examples
    table = tf.one_hot(np.where(np.arange(NUM_EXAMPLES) < 10, labels, (labels + 1) % 3), 3)

    def logits(batch):
        distance = tf.reduce_sum(tf.abs(batch[:, tf.newaxis] - images[tf.newaxis]), axis=2)
        nearest = tf.one_hot(tf.argmin(distance, axis=1), NUM_EXAMPLES)
        return nearest @ table * 5.0 + 0.0 * tf.reduce_sum(batch, axis=1, keepdims=True)

    tiny = he.ThreatModel("linf", 1e-4)
    report = evaluate(logits, examples, tiny, ["fgsm"])
    assert report.clean_accuracy == report.worst_case == 10 / NUM_EXAMPLES
    assert report.rows[0].robust_accuracy == 10 / NUM_EXAMPLES


def test_nan_logits_are_mistakes(examples):
    def logits(images):
        return images[:, :3] * tf.constant([1.0, np.nan, 1.0])

    report = evaluate(logits, examples, THREAT, ["fgsm"])
    assert report.clean_accuracy == report.worst_case == 0.0


# Kinds of examples


def as_dataset(images, labels):
    return tf.data.Dataset.from_tensor_slices((images, labels)).batch(9)


def test_every_kind_of_examples_gives_the_same(model, examples, report):
    for given in (as_dataset(*examples), tuple(map(list, examples))):
        again = evaluate(model, given, THREAT, ["pgd-3"])
        assert again.num_examples == NUM_EXAMPLES
        np.testing.assert_array_equal(again.correct["clean"], report.correct["clean"])
        np.testing.assert_array_equal(again.correct["pgd-3"], report.correct["pgd-3"])


def test_a_shuffled_data_set_is_refused(model, examples):
    shuffled = as_dataset(*examples).unbatch().shuffle(NUM_EXAMPLES, seed=1).batch(9)
    with pytest.raises(ValueError, match="another order each time.*without shuffling"):
        evaluate(model, shuffled, THREAT, ["fgsm"])


def test_data_sets_in_memory_are_scaled_to_the_bounds():
    dataset = he.data.synthetic((4, 4, 1), num_classes=3, num_examples=10)
    seen = []

    def logits(images):
        seen.append(float(tf.reduce_max(images)) if tf.executing_eagerly() else 0.0)
        return tf.reshape(images, [-1, 16])[:, :3]

    report = evaluate(logits, dataset, THREAT, ["fgsm"])
    assert report.num_examples == 10
    assert 0.2 < max(seen) <= 1.0


class FakeSource:
    """A source of a streaming data set: images of two sizes, encoded."""

    num_examples = 5

    def read(self, positions, shuffle_seed=None, epoch=0, first_example=0):
        random = np.random.RandomState(0)
        encoded = [
            tf.io.encode_png(random.randint(0, 256, (70 + 3 * i, 80, 3)).astype(np.uint8)).numpy()
            for i in range(self.num_examples)
        ]
        numbers = np.arange(self.num_examples) % 3
        both = tf.data.Dataset.from_tensor_slices((encoded, numbers))
        return both.skip(tf.cast(first_example, tf.int64))


def test_streamed_data_sets_are_evaluated_batch_by_batch():
    dataset = he.data.StreamingDataset("fake", "test", FakeSource(), 3, image_shape=(32, 32, 3))

    def logits(images):
        return tf.reduce_mean(images, axis=(1, 2)) * 10.0

    report = evaluate(logits, dataset, THREAT, ["fgsm"], batch_size=2)
    assert report.num_examples == 5
    images, labels = next(iter(he.data.eval_pipeline(dataset, 5)))
    expected = evaluate(logits, (images, labels), THREAT, ["fgsm"])
    for name in ("clean", "fgsm"):
        np.testing.assert_array_equal(report.correct[name], expected.correct[name])


# Attacks, by name or not


def test_attack_objects_keep_their_settings(model, examples):
    attack = he.attacks.PGD(THREAT, num_steps=2, step_size=0.01, name="mine", batch_size=5)
    report = evaluate(model, examples, THREAT, [attack, "fgsm"], step_size=0.02)
    mine, fgsm = report.rows
    assert mine.settings == attack.get_config()
    np.testing.assert_array_equal(report.correct["mine"], ~attack(model, *examples).success)
    # FGSM's step is epsilon, whatever the steps of the others.
    assert fgsm.settings["step_size"] == THREAT.epsilon


def test_options_go_to_attacks_by_name():
    first, second = resolve_attacks(
        ["pgd-2", "mim-4"], THREAT, step_size="2/255", batch_size=3, seed=11
    )
    assert first.step_size == second.step_size == 2 / 255
    assert (first.batch_size, second.seed) == (3, 11)
    assert (first.num_steps, second.num_steps) == (2, 4)


@pytest.mark.parametrize(
    ("attacks", "options", "added"),
    [
        (["pgd-2"], {"logit_scale": "unit"}, True),
        (["pgd-2"], {"logit_scale": 1.0}, True),
        (["pgd-2"], {}, False),
        (["pgd-2", "cw-linf-2"], {"logit_scale": "unit"}, False),
        ([he.attacks.PGD(THREAT, 2, loss="dlr", name="dlr")], {"logit_scale": "unit"}, False),
    ],
)
def test_no_scale_1_cross_entropy_result_stands_alone(model, examples, attacks, options, added):
    report = evaluate(model, examples, THREAT, attacks, **options)
    names = [row.name for row in report.rows]
    assert names[len(attacks) :] == (["cw-linf-20"] if added else [])
    for row in report.rows[: len(attacks)]:
        if row.name.startswith("pgd"):
            assert row.settings["logit_scale"] == options.get("logit_scale", "model")
            shown = f"pgd-2 [scale {options['logit_scale']}]" if options else "pgd-2 "
            assert shown in report.table()


# Mistakes, before any attack


@pytest.mark.parametrize(
    ("attacks", "options", "error", "message"),
    [
        (["fgsm", "fgsm"], {}, ValueError, r"different names.*\['fgsm', 'fgsm'\]"),
        ([he.attacks.PGD(THREAT, 1, name="clean")], {}, ValueError, "nor 'clean'"),
        ([], {}, ValueError, "No attacks"),
        ("fgsm", {}, TypeError, "expected a sequence of names.*'fgsm'"),
        (["fgms"], {}, ValueError, "Unknown attack"),
        (["pgd-3"], {"step_size": -1}, ValueError, "-1"),
        (["pgd-3"], {"batch_size": 0}, ValueError, "batch_size=0"),
    ],
)
def test_wrong_attacks(examples, attacks, options, error, message):
    def never(images):
        raise AssertionError("the model was called")

    with pytest.raises(error, match=message):
        evaluate(never, examples, THREAT, attacks, **options)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda images, labels: (images * 255, labels), "255|bounds"),
        (lambda images, labels: (images * np.nan, labels), "NaN"),
        (lambda images, labels: (images, labels - 1), "-1"),
        (lambda images, labels: (images, labels[:5]), "5"),
        (lambda images, labels: (images[:0], labels[:0]), "0"),
        (lambda images, labels: (images, labels + 1), r"outside the classes; expected 0\.\.2"),
    ],
    ids=["range", "nan", "negative labels", "fewer labels", "empty", "labels"],
)
@pytest.mark.parametrize("kind", ["arrays", "dataset"])
def test_wrong_examples(model, examples, spoil, message, kind):
    given = spoil(*examples)
    if kind == "dataset":
        if len(given[0]) != len(given[1]):
            given = (given[0], np.zeros((NUM_EXAMPLES, 2), int))
            message = "shape"
        given = as_dataset(*given)
    with pytest.raises(ValueError, match=message):
        evaluate(model, given, THREAT, ["fgsm"])


def test_unwritable_folder_is_noticed_before_the_work(examples, tmp_path):
    def never(images):
        raise AssertionError("the model was called")

    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="Cannot write the report; expected a writable folder"):
        evaluate(never, examples, THREAT, ["fgsm"], tmp_path / "file" / "eval")


# What is left behind


def test_folder_holds_complete_files(written):
    assert sorted(each.name for each in written[0].iterdir() if each.name[0] != ".") == [
        "adversarial",
        "gallery.npz",
        "per_example.npz",
        "report.html",
        "report.json",
    ]


def test_report_json(written):
    folder, report = written
    content = json.loads((folder / "report.json").read_text())
    assert content["num_examples"] == NUM_EXAMPLES
    assert content["clean_accuracy"] == report.clean_accuracy
    assert content["worst_case"] == report.worst_case
    assert content["threat"] == {"norm": "linf", "epsilon": 0.08, "bounds": [0.0, 1.0]}
    assert [row["name"] for row in content["attacks"]] == list(ATTACKS)
    assert content["attacks"][1]["settings"]["num_steps"] == 3
    assert content["attacks"][1]["settings"]["seed"] == 0
    assert content["environment"]["keras"] == keras.__version__
    assert set(content["environment"]) >= {"he_keras", "tensorflow", "python", "commit"}


def test_per_example_file_needs_no_pickle(written, examples):
    folder, report = written
    with np.load(folder / "per_example.npz", allow_pickle=False) as archive:
        assert set(archive.files) == {*RESERVED, *ATTACKS}
        np.testing.assert_array_equal(archive["labels"], examples[1])
        for name in ("clean", *ATTACKS):
            assert archive[name].dtype == bool
            np.testing.assert_array_equal(archive[name], report.correct[name])


def test_table(report):
    heading, *lines = report.table().splitlines()
    assert heading == f"Accuracy; {THREAT.text()}"
    columns = ["attack", "accuracy", "broken", "time", "forward", "backward"]
    assert lines.pop(0).split() == columns
    assert lines.pop(0).split() == "of all examples seconds passes per example".split()
    assert lines[0].split() == ["(clean)", f"{report.clean_accuracy:.2%}"]
    for line, row in zip(lines[1:4], report.rows, strict=True):
        assert line.split() == [
            row.name,
            f"{row.robust_accuracy:.2%}",
            f"{row.num_broken}",
            f"{row.seconds:.1f}",
            f"{row.forward_passes:.1f}",
            f"{row.backward_passes:.1f}",
        ]
    assert lines[4].split()[:6] == [
        *("(worst", "case)", f"{report.worst_case:.2%}", "n", "=", "23,"),
    ]
    assert lines[5] == "No checks ran."


def test_short_forms(report):
    """A report with many attacks and checks takes five lines, and names what fired."""
    verdicts = ["pass"] * 20 + ["skipped", "warn", "fail", "warn"]
    checks = [Check(f"check-{k}", "after", each, "", "") for k, each in enumerate(verdicts)]
    long = dataclasses.replace(report, rows=report.rows * 40, checks=tuple(checks))
    for text in (repr(long), str(long)):
        lines = text.splitlines()
        assert len(lines) == 5 and max(map(len, lines)) < 120
        assert THREAT.text() in lines[0] and f"worst case {report.worst_case:.2%}" in lines[1]
    told = "24 checks: 20 pass, 1 skipped, 1 fail: check-22; 2 warn: check-21, check-23"
    assert lines[3].strip() == told
    assert told in long.table().splitlines()
    page = long._repr_html_()
    assert f"<caption>Accuracy; {THREAT.text()}" in page and told in page
    assert f"<td>fgsm</td><td>{report.rows[0].robust_accuracy:.2%}</td>" in page


def test_progress_shows_the_running_robust_accuracy(model, examples, capsys):
    report = evaluate(model, examples, THREAT, ["fgsm"], batch_size=10, show_progress=True)
    out, err = capsys.readouterr()
    accuracy = report.worst_case
    assert err.splitlines()[-1].startswith("attacks 100%")
    assert err.splitlines()[-1].endswith(f"robust {accuracy:.2%}")
    assert not {"\r", "\x1b"} & set(out + err)
