"""Analyses that compare ways of training: the accuracies, what belongs together, the pictures."""

import types

import numpy as np
import pytest
from analysis_subjects import drawn, he_model, linear_model, run_settings, subject, texts

from he_keras import analysis
from he_keras.analysis import compared_runs
from he_keras.analysis.compared_runs import head_label
from he_keras.evaluation.statistics import wilson_interval

COMPARISONS = ("attack-steps", "head-ablation", "scale-margin-grid")
IMAGES, LABELS = [[0.9, 0.1], [0.55, 0.5], [0.2, 0.3]], [0, 0, 0]


def run(name, clean=0.9, **settings):
    """A subject that `fake_accuracies` scores by its name."""
    mine = subject(linear_model(np.eye(2)), IMAGES, LABELS, name=name)
    mine.settings.update(run_settings(**settings), clean=clean)
    return mine


@pytest.fixture
def fake_accuracies(monkeypatch):
    """Accuracies that follow from the clean one; returns the calls' other arguments."""
    calls = []

    def measure(each, num_steps, seed):
        calls.append((num_steps, seed))
        clean = each.settings["clean"]
        return {
            "clean": clean,
            "paper": clean - 0.2,
            "pgd": clean - 0.3,
            "margin": clean - 0.4,
            "worst": clean - 0.4,
        }

    monkeypatch.setattr(compared_runs, "measure_accuracies", measure)
    return calls


# Accuracies


@pytest.mark.slow
def test_accuracies_of_a_linear_model():
    # Logits 3x and 3y: the l_inf distance to the boundary is half of the pixels' difference.
    mine = subject(linear_model(3.0 * np.eye(2)), IMAGES, LABELS)
    found = compared_runs.measure_accuracies(mine, 20, 0)
    assert found["clean"] == pytest.approx(2 / 3)
    for column in ("paper", "pgd", "margin", "worst"):
        assert found[column] == pytest.approx(1 / 3), column


@pytest.mark.slow
def test_the_three_attacks_see_three_scales():
    # At such a scale the softmax is exact in float32: cross-entropy has no gradient, at scale 1 and
    # on the margin there is one.
    large = he_model(np.eye(2), scale=1e6, margin=0.0)
    found = compared_runs.measure_accuracies(
        subject(large, [[0.9, 0.1], [0.6, 0.45]], [0, 0]), 20, 0
    )
    assert found["pgd"] == found["clean"] == 1.0
    assert found["paper"] == found["margin"] == found["worst"] == 0.5


def test_what_each_column_is(monkeypatch):
    seen = []

    def evaluate(model, examples, threat, attacks, **options):
        seen.extend(attacks)
        assert options == {"mode": "individual", "checks": False}
        rows = [types.SimpleNamespace(robust_accuracy=share) for share in (0.5, 0.4, 0.3)]
        return types.SimpleNamespace(clean_accuracy=0.9, worst_case=0.2, rows=rows)

    monkeypatch.setattr(compared_runs, "evaluate_robustness", evaluate)
    mine = subject(linear_model(3.0 * np.eye(2)), IMAGES, LABELS)
    found = compared_runs.measure_accuracies(mine, 2, 5)
    assert found == {"clean": 0.9, "paper": 0.5, "pgd": 0.4, "margin": 0.3, "worst": 0.2}
    paper, pgd, margin = seen
    assert (paper.keep, paper.stop_when_broken, paper.logit_scale) == ("last", False, "unit")
    assert (pgd.logit_scale, margin.logit_scale) == ("model", "model")
    assert [each.loss for each in seen] == ["ce", "ce", "cw"]
    assert {(each.num_steps, each.seed) for each in seen} == {(2, 5)}
    assert {round(each.step_size, 9) for each in seen} == {round(0.1 * 0.003 / 0.031, 9)}


def test_intervals_are_wilsons_in_percent():
    low, high = wilson_interval(30, 40)
    found = compared_runs.interval_lengths([0.75, 0.0], 40)
    np.testing.assert_allclose(found[:, 0], [75 - 100 * low, 100 * high - 75])
    assert found.shape == (2, 2) and found[0, 1] == 0


# What the runs were trained with


@pytest.mark.parametrize(
    ("settings", "label"),
    [
        ({"kind": "linear"}, "linear"),
        ({"kind": "m_he"}, "m-HE"),
        ({}, "FN+WN+AM"),
        ({"margin": 0.0}, "FN+WN"),
        ({"weight_norm": False, "margin": 0.0}, "FN"),
        ({"feature_norm": False, "margin": 0.0}, "WN"),
        ({"feature_norm": False, "weight_norm": False, "margin": 0.0}, "no norm"),
        ({"weight_norm": False}, "FN+AM"),
    ],
)
def test_labels_of_heads(settings, label):
    assert head_label(run("a", **settings)) == label


@pytest.mark.parametrize("name", COMPARISONS)
def test_runs_must_differ_and_have_settings(name, fake_accuracies):
    built = analysis.get(name)
    with pytest.raises(ValueError, match=r"Nothing to compare; .*received \['a', 'b'\], all with"):
        built.measure([run("a"), run("b")])
    without = subject(linear_model(np.eye(2)), IMAGES, LABELS, name="plain")
    with pytest.raises(ValueError, match=r"expected run folders .* received plain with .*=None"):
        built.measure([run("a"), without])
    with pytest.raises(ValueError, match="at least 2 models"):
        built.run([run("a")], "nowhere")
    with pytest.raises(ValueError, match="num_steps=0"):
        analysis.get(name, num_steps=0)
    assert fake_accuracies == []


def test_an_objective_without_steps_is_named(fake_accuracies):
    fast = run("fast", kind="linear")
    fast.settings["objective"] = {"name": "fast_at"}
    with pytest.raises(ValueError, match="has objective.num_steps; received fast .*fast_at"):
        analysis.get("attack-steps").measure([run("a"), fast])


def test_a_linear_head_has_no_scale(fake_accuracies):
    with pytest.raises(ValueError, match="linear head has no scale.*received b"):
        analysis.get("scale-margin-grid").measure([run("a"), run("b", kind="linear")])


# Numbers and pictures


def points(axes, number):
    """The points of the number-th curve with error bars."""
    return axes.containers[number].lines[0].get_xydata().astype(float)


def test_attack_steps(fake_accuracies):
    built = analysis.get("attack-steps", num_steps=7, seed=3)
    runs = [
        run("c", 0.8, num_steps=3),
        run("a", 0.5, num_steps=1),
        run("b", 0.7, num_steps=1),
        run("d", 0.6, num_steps=1, kind="linear"),
    ]
    numbers = built.measure(runs)
    assert set(fake_accuracies) == {(7, 3)}
    assert list(numbers["curves"]) == ["linear", "FN+WN+AM"]
    first, second = numbers["curves"]["FN+WN+AM"]
    assert (first["training_steps"], first["num_runs"], second["training_steps"]) == (1, 2, 3)
    assert first["clean"] == pytest.approx(0.6) and first["margin"] == pytest.approx(0.2)
    assert second["paper"] == pytest.approx(0.6) and numbers["num_examples"] == 3
    assert [each["name"] for each in numbers["runs"]] == ["c", "a", "b", "d"]

    figure = drawn(built, numbers)
    paper, margin = figure.axes
    np.testing.assert_allclose(points(paper, 1), [[1, 40], [3, 60]])
    np.testing.assert_allclose(points(margin, 1), [[1, 20], [3, 40]])
    assert list(paper.get_xticks()) == [1, 3]
    assert {"PGD-7, scale 1 (the paper's)", "PGD-7 on the margin", "linear"} <= set(texts(figure))
    assert built.table(numbers).splitlines()[-1].split() == (
        ["FN+WN+AM", "3", "80.0%", "60.0%", "50.0%", "40.0%"]
    )


def test_head_ablation(fake_accuracies):
    built = analysis.get("head-ablation")
    runs = [
        run("all", 0.8),
        run("fn1", 0.6, weight_norm=False, margin=0.0),
        run("fn2", 0.7, weight_norm=False, margin=0.0),
        run("linear", 0.5, kind="linear"),
    ]
    numbers = built.measure(runs)
    assert list(numbers["heads"]) == ["linear", "FN", "FN+WN+AM"]
    assert numbers["heads"]["FN"]["num_runs"] == 2
    assert numbers["heads"]["FN"]["clean"] == pytest.approx(0.65)

    figure = drawn(built, numbers)
    heights = [[bar.get_height() for bar in group] for group in figure.axes[0].containers[1::2]]
    np.testing.assert_allclose(heights[0], [50, 65, 80])
    np.testing.assert_allclose(heights[3], [10, 25, 40])
    shown = [text.get_text() for text in figure.axes[0].get_xticklabels()]
    assert shown == ["linear", "FN", "FN+WN+AM"]
    assert built.table(numbers).splitlines()[2].split()[:2] == ["FN", "65.0%"]


def test_scale_margin_grid(fake_accuracies):
    built = analysis.get("scale-margin-grid")
    runs = [run(f"s{scale}", 0.5 + scale / 100, scale=scale, margin=0.2) for scale in (20, 1, 10)]
    runs += [run("m0", 0.7, scale=10, margin=0.0), run("again", 0.8, scale=10, margin=0.2)]
    numbers = built.measure(runs)
    pairs = [(cell["scale"], cell["head_margin"], cell["num_runs"]) for cell in numbers["cells"]]
    assert pairs == [(1, 0.2, 1), (10, 0.0, 1), (10, 0.2, 2), (20, 0.2, 1)]
    assert numbers["cells"][2]["clean"] == pytest.approx(0.7)

    figure = drawn(built, numbers)
    over_scale, over_margin = figure.axes
    np.testing.assert_allclose(points(over_scale, 0), [[1, 51], [10, 70], [20, 70]])
    np.testing.assert_allclose(points(over_margin, 3), [[0, 30], [0.2, 30]])
    titles = (over_scale.get_title(), over_scale.get_xlabel(), over_margin.get_title())
    assert titles == ("margin m = 0.2", "scale s", "scale s = 10")
    assert built.table(numbers).splitlines()[1].split()[:3] == ["1", "0.2", "51.0%"]


def test_a_grid_of_one_row_has_one_panel(fake_accuracies):
    built = analysis.get("scale-margin-grid")
    numbers = built.measure([run("a", margin=0.1), run("b", margin=0.3)])
    assert [axes.get_xlabel() for axes in drawn(built, numbers).axes] == ["margin m"]
    numbers = built.measure([run("a", scale=5.0, margin=0.1), run("b", scale=9.0, margin=0.3)])
    assert [axes.get_xlabel() for axes in drawn(built, numbers).axes] == ["scale s"]
