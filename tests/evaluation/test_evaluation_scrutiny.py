"""What a report adds to the attacks: survivors, checks, the panel of cosine heads, gallery."""

import json
import math
import re

import evaluation_program as program
import keras
import numpy as np
import pytest
import tensorflow as tf

import he_keras as he
from he_keras import losses
from he_keras.evaluation import Check, robustness
from he_keras.evaluation.run import attack_runs
from he_keras.evaluation.run.attack_runs import AttackRuns
from he_keras.evaluation.statistics import wilson_interval

SETTINGS = {"batch_size": program.BATCH_SIZE, "mode": "survivors"}


def evaluate(model=None, examples=None, attacks=None, folder=None, **options):
    return he.evaluate_robustness(
        model or program.model(),
        examples or program.examples(),
        program.THREAT,
        attacks or program.attacks(),
        folder,
        **{**SETTINGS, **options},
    )


@pytest.fixture(scope="module")
def both():
    return {mode: evaluate(mode=mode, checks=False) for mode in ("survivors", "individual")}


def test_survivors_are_what_the_attacks_before_left(both):
    first, second = both["survivors"].rows
    clean = both["survivors"].correct["clean"]
    assert first.num_attacked == clean.sum()
    assert 0 < first.num_broken < first.num_attacked
    assert second.num_attacked == first.num_attacked - first.num_broken
    left = first.num_attacked - first.num_broken - second.num_broken
    assert second.remaining == both["survivors"].worst_case == left / program.NUM_EXAMPLES
    assert [stage.num_attacked for stage in second.stages] == [
        second.num_attacked,
        second.num_attacked - second.stages[0].num_broken,
    ]


def test_individual_rows_stand_for_themselves(both):
    first, second = both["individual"].rows
    assert first.num_attacked == second.num_attacked == both["individual"].correct["clean"].sum()
    assert both["individual"].worst_case == both["survivors"].worst_case
    assert both["individual"].worst_case <= min(first.robust_accuracy, second.robust_accuracy)
    assert second.remaining == both["individual"].worst_case


def test_an_ensemble_alone_gives_its_own_result():
    ensemble = program.attacks()[1]
    report = evaluate(attacks=[ensemble], checks=False)
    result = ensemble(program.model(), *program.examples())
    np.testing.assert_array_equal(report.correct["both"], ~result.success)
    for stage, expected in zip(report.rows[0].stages, result.stages, strict=True):
        assert stage.num_broken == expected.broken or stage is report.rows[0].stages[0]


def test_intervals_are_wilsons(both):
    """The ends solve |p - share| = z * sqrt(p (1 - p) / n), Wilson's definition."""
    report = both["survivors"]
    for share, ends in (
        (report.clean_accuracy, report.clean_interval),
        (report.worst_case, report.worst_case_interval),
        (report.rows[0].robust_accuracy, report.rows[0].interval),
    ):
        for end in ends:
            deviation = 1.959964 * math.sqrt(end * (1 - end) / program.NUM_EXAMPLES)
            assert abs(share - end) == pytest.approx(deviation, rel=1e-4)


def test_ends_of_the_scale():
    assert wilson_interval(0, 10)[0] == 0.0
    assert wilson_interval(10, 10)[1] == pytest.approx(1.0)
    assert 0.25 < wilson_interval(0, 10)[1] < 0.3


# A random model


def test_successes_that_do_not_repeat_are_not_counted():
    """Every second pass says something else; the attack's luck must not be in the report."""
    calls = tf.Variable(0)

    def fickle(images):
        calls.assign_add(1)
        honest = program.model()(images)
        return tf.where(calls % 2 == 0, honest, tf.roll(honest, 1, axis=1))

    report = evaluate(fickle, attacks=[program.single_attacks()[0]], checks=False)
    warnings = report.rows[0].warnings
    assert report.rows[0].num_broken < report.rows[0].num_attacked
    assert any("were gone when the images were scored once more" in text for text in warnings)


# Checks and panel


@pytest.fixture(scope="module")
def cosine():
    """A cosine head whose classes are the centres, shifted so that cosines tell them apart."""
    network = keras.Sequential([keras.Input((2, 3, 1)), keras.layers.Flatten()])
    head = he.CosineHead(3, scale=15.0, margin=0.1)
    model = he.HEAdversarialModel(network, head, evaluation_attack=None)
    model(np.zeros((1, 2, 3, 1), "float32"))
    head.kernel.assign(np.eye(3).repeat(2, axis=1).T * 0.25 + 0.35)
    return model


@pytest.fixture(scope="module")
def scrutinized(cosine, tmp_path_factory):
    folder = tmp_path_factory.mktemp("scrutinized")
    with pytest.MonkeyPatch.context() as patch:
        few = [attack for attack in program.single_attacks()]
        names = ["pgd-20, scale 1", "pgd-20", "adaptive-pgd-20", "margin-pgd-20", "autoattack"]
        cheap = [
            he.attacks.PGD(program.THREAT, 2, name=name, batch_size=program.BATCH_SIZE)
            for name in names
        ]
        patch.setattr(attack_runs, "panel_attacks", lambda threat, batch_size: cheap)
        return evaluate(cosine, attacks=few, folder=folder), folder


@pytest.mark.slow
def test_checks_before_and_after_are_in_the_report(scrutinized):
    report, folder = scrutinized
    names = {check.name for check in report.checks}
    assert {"logits", "deterministic", "black-box", "worst-case-holds"} <= names
    assert {check.when for check in report.checks} == {"before", "after"}
    content = json.loads((folder / "report.json").read_text())
    assert [each["name"] for each in content["checks"]] == [each.name for each in report.checks]
    assert len(content["epsilon_curve"]["points"]) >= 3


@pytest.mark.slow
def test_cosine_heads_have_the_panel_and_others_have_not(scrutinized, both):
    report, folder = scrutinized
    assert len(report.he_panel["rows"]) == 5
    assert report.he_panel["num_examples"] == program.NUM_EXAMPLES
    assert "Cosine head, scale and loss side by side" in report.table()
    assert (folder / "adversarial" / "he-panel" / "block-00000").is_dir()
    assert both["survivors"].he_panel is None


@pytest.mark.slow
def test_the_panel_takes_over_what_was_run_on_every_example(cosine, monkeypatch):
    first, second, _ = program.single_attacks()
    monkeypatch.setattr(attack_runs, "panel_attacks", lambda threat, batch_size: [first, second])
    monkeypatch.setattr(attack_runs, "MEANINGS", ("one", "two"))
    monkeypatch.setattr(robustness, "sanity_checks", lambda *_, **__: ())
    monkeypatch.setattr(robustness, "epsilon_curve", lambda *_, **__: None)
    report = evaluate(cosine, attacks=[first], mode="individual")
    accuracies = [row["robust_accuracy"] for row in report.he_panel["rows"]]
    both = evaluate(cosine, attacks=[first, second], mode="individual", checks=False)
    assert accuracies == [row.robust_accuracy for row in both.rows]
    in_turn = evaluate(cosine, attacks=[second, first], mode="survivors")
    assert [row["robust_accuracy"] for row in in_turn.he_panel["rows"]] == accuracies


def without_work(monkeypatch, attacks):
    """Checks and panel that cost nothing; the panel runs `attacks`."""
    monkeypatch.setattr(attack_runs, "panel_attacks", lambda threat, batch_size: attacks)
    monkeypatch.setattr(attack_runs, "MEANINGS", ["some"] * len(attacks))
    found = (Check("some", "after", "pass", "", ""),)
    monkeypatch.setattr(robustness, "preflight", lambda *_, **__: ())
    monkeypatch.setattr(robustness, "sanity_checks", lambda *_, **__: found)
    monkeypatch.setattr(robustness, "epsilon_curve", lambda *_, **__: None)


@pytest.mark.parametrize("checks", [True, False])
@pytest.mark.parametrize("panel", [True, False, None])
def test_panel_and_checks_are_chosen_apart(cosine, monkeypatch, checks, panel):
    attack = program.single_attacks()[0]
    without_work(monkeypatch, [attack])
    report = evaluate(cosine, attacks=[attack], checks=checks, panel=panel, mode="individual")
    assert bool(report.checks) == checks
    assert (report.he_panel is not None) == (checks if panel is None else panel)


def test_a_panel_without_a_cosine_head_is_refused_before_any_attack(monkeypatch):
    monkeypatch.setattr(robustness, "classify", lambda *_: pytest.fail("worked"))
    with pytest.raises(ValueError, match="expected a model with a CosineHead"):
        evaluate(checks=False, panel=True)


def test_the_console_says_beforehand_what_checks_and_panel_cost(cosine, monkeypatch, capsys):
    attack = program.single_attacks()[0]
    without_work(monkeypatch, [attack])
    counted = {"checks": 0, "panel": 0}
    for switch in counted:
        monkeypatch.setattr(AttackRuns, "attack_all", lambda *_: pytest.fail("too late"))
        options = {"checks": False, "panel": False, switch: True, "show_progress": True}
        with pytest.raises(pytest.fail.Exception, match="too late"):
            evaluate(cosine, attacks=[attack], **options)
        out = capsys.readouterr().out
        found = re.fullmatch(
            rf"Passes, at most: ([\d,]+) for the attacks asked for; ([\d,]+) for the {switch} "
            rf"\((\d+)% of all; --no{switch} leaves them out\)\n",
            out,
        )
        asked, beside, share = (int(each.replace(",", "")) for each in found.groups())
        assert share == round(100 * beside / (asked + beside))
        counted[switch] = beside
    right = cosine.predict(program.examples()[0], verbose=0).argmax(axis=1) == program.examples()[1]
    # Two steps forward and backward, and one pass that scores the result.
    assert asked == right.sum() * 5
    assert counted["panel"] == asked and counted["checks"] > 100 * asked


def test_the_panels_attacks_differ_in_scale_and_loss():
    attacks = attack_runs.panel_attacks(program.THREAT, 10)
    assert [attack.logit_scale for attack in attacks] == ["unit", *4 * ["model"]]
    assert [getattr(attack, "loss", None) for attack in attacks] == ["ce", "ce", "ce", "cw", None]
    assert [getattr(attack, "margin", None) for attack in attacks] == [0, 0, "model", 0, None]
    assert attacks[-1].name == "autoattack"


def expecting_bytes(model):
    return lambda images: model(images / 255.0) + tf.constant([0.0, 1.0, 0.0])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda model, x, y: (model, x, (y + 1) % 3), "label-order"),
        (lambda model, x, y: (expecting_bytes(model), x, y), "clean-accuracy.*pixels in 0..255"),
        (lambda model, x, y: (lambda images: tf.nn.softmax(model(images)), x, y), "probabilities"),
        (lambda model, x, y: (model, x / 255, y), "input-range"),
    ],
    ids=["label order", "range of the model", "probabilities", "range of the images"],
)
def test_no_silly_number_for_what_does_not_fit(spoil, message, tmp_path):
    images, labels = program.examples()
    model, images, labels = spoil(program.model(), images, labels)
    with pytest.raises(ValueError, match=message):
        evaluate(model, (images, labels), folder=tmp_path)
    assert not list(tmp_path.glob("adversarial/block-*"))
    assert not (tmp_path / "report.json").exists()


# What the page shows


def test_gallery_shows_what_broke_and_what_held(tmp_path):
    report = evaluate(folder=tmp_path, checks=False)
    content = json.loads((tmp_path / "report.json").read_text())
    with np.load(tmp_path / "gallery.npz") as archive:
        clean, adversarial = archive["clean"], archive["adversarial"]
    images, labels = program.examples()
    logits = program.model()(adversarial).numpy()
    for number, entry in enumerate(content["gallery"]):
        position = entry["position"]
        np.testing.assert_array_equal(clean[number], images[position])
        assert entry["label"] == labels[position]
        predicted = logits[number].argmax()
        if entry["kind"] == "hardest":
            assert predicted == entry["adversarial_prediction"] != labels[position]
            assert entry["broken_by"] in [row.name for row in report.rows]
            assert entry["margin"] < 0
        else:
            assert predicted == labels[position]
            assert entry["broken_by"] is None
        size = np.abs(adversarial[number] - clean[number]).max()
        assert size == pytest.approx(entry["distance"], abs=1e-6)
        assert size <= program.THREAT.epsilon + 1e-6
    kinds = [entry["kind"] for entry in content["gallery"]]
    assert {"hardest", "easiest"} == set(kinds)


def test_confusion_counts_the_broken_examples(tmp_path):
    report = evaluate(folder=tmp_path, checks=False)
    with np.load(tmp_path / "per_example.npz") as archive:
        columns = dict(archive)
    broken = columns["broken_by"] >= 0
    expected = np.zeros((3, 3), int)
    for label, other in zip(
        columns["labels"][broken], columns["adversarial_prediction"][broken], strict=True
    ):
        expected[label, other] += 1
    np.testing.assert_array_equal(report.confusion, expected)
    assert np.trace(expected) == 0 < expected.sum()
    assert (columns["broken_by"] == -1).mean() == report.worst_case


@pytest.mark.fast_cases("deepfool")
@pytest.mark.parametrize("name", ["pgd-2", "deepfool"])
def test_margin_and_distance_of_every_example_are_those_of_one_image(name, tmp_path):
    images, labels = program.examples()
    attack = he.attacks.get(name, program.THREAT)
    report = evaluate(attacks=[attack], folder=tmp_path, checks=False)
    with np.load(tmp_path / "per_example.npz") as archive:
        columns = dict(archive)
    result = attack(program.model(), images, labels, example_ids=np.arange(len(images)))
    lengths = np.abs(result.x_adv - images).max(axis=(1, 2, 3))
    clean = losses.margin(program.model()(images), tf.constant(labels)).numpy()
    holds_no_better = ~result.success & (result.margin >= clean)
    expected = np.where((columns["broken_by"] == -2) | holds_no_better, 0.0, lengths)
    held = columns["broken_by"] == -1
    assert 0 < report.worst_case < 1 and held.sum() > 6 and lengths[held].max() > 0.05
    np.testing.assert_allclose(columns["distance"], expected, atol=1e-6)
    np.testing.assert_allclose(
        columns["margin"], np.where(expected > 0, result.margin, clean), atol=1e-4
    )
