"""Comparisons of runs: the paired counts, the test, what is refused, and the page."""

import json
import math

import numpy as np
import pytest
from report_reader import cells, read_page
from report_samples import ATTACKS, write_sample

from he_keras.evaluation import compare, write_comparison_html
from he_keras.evaluation.statistics import mcnemar_p_value

SAME_DATA = "sha256:" + "1" * 64


@pytest.fixture(name="runs")
def two_runs(tmp_path):
    weak = write_sample(tmp_path / "a", num_examples=800, title="PGD-AT", optional=False)
    strong = write_sample(
        tmp_path / "b", num_examples=800, seed=1, strength=0.3, title="HE", optional=False
    )
    for folder in (weak, strong):
        edit(folder, settings={"data": SAME_DATA})
    return weak, strong


def report_of(folder):
    return json.loads((folder / "report.json").read_text())


def edit(folder, **changes):
    (folder / "report.json").write_text(json.dumps(report_of(folder) | changes))


@pytest.mark.parametrize(
    ("only_first", "only_second"), [(0, 0), (1, 0), (3, 3), (3, 4), (10, 25), (40, 12), (700, 810)]
)
def test_p_value_is_that_of_the_binomial_test(only_first, only_second):
    # Both tails, each summed term by term, and at most 1.
    size = only_first + only_second
    middle = abs(only_first - only_second) / 2
    expected = sum(
        math.comb(size, k) / 2**size for k in range(size + 1) if abs(k - size / 2) >= middle
    )
    assert mcnemar_p_value(only_first, only_second) == pytest.approx(expected, rel=1e-12)


def test_p_value_known_from_tables():
    assert mcnemar_p_value(0, 5) == 2 / 32
    assert mcnemar_p_value(1, 5) == 2 * 7 / 64
    assert mcnemar_p_value(5, 1) == mcnemar_p_value(1, 5)
    assert 0 <= mcnemar_p_value(0, 20_000) < 1e-300


def test_counts_and_positions_of_every_criterion(runs):
    first, second = (dict(np.load(folder / "per_example.npz")) for folder in runs)
    pairs = {pair.criterion: pair for pair in compare(runs).pairs}
    assert list(pairs) == ["clean", "worst case", *ATTACKS]
    for criterion, pair in pairs.items():
        if criterion == "worst case":
            a, b = (arrays["broken_by"] == -1 for arrays in (first, second))
        else:
            a, b = first[criterion], second[criterion]
        assert pair.both_hold == np.sum(a & b) and pair.both_broken == np.sum(~(a | b))
        assert pair.only_first.tolist() == [k for k in range(800) if a[k] and not b[k]]
        assert pair.only_second.tolist() == [k for k in range(800) if b[k] and not a[k]]
        assert pair.difference == pytest.approx(a.mean() - b.mean())
        assert pair.p_value == mcnemar_p_value(len(pair.only_first), len(pair.only_second))
    assert compare(runs).notes == ()


def test_every_two_of_three_runs_are_compared(runs, tmp_path):
    third = write_sample(tmp_path / "c", num_examples=800, seed=2, optional=False)
    pairs = compare([*runs, third]).pairs
    letters = list(dict.fromkeys((pair.first, pair.second) for pair in pairs))
    assert letters == [("A", "B"), ("A", "C"), ("B", "C")]


REFUSED = {
    "size": ({"num_examples": 801}, {}, "different numbers of examples; expected.*800.*801"),
    "epsilon": (
        {},
        {"threat": {"norm": "linf", "epsilon": 4 / 255, "bounds": [0, 1]}},
        "different threat models",
    ),
    "norm": (
        {},
        {"threat": {"norm": "l2", "epsilon": 8 / 255, "bounds": [0, 1]}},
        "different threat models",
    ),
    "bounds": (
        {},
        {"threat": {"norm": "linf", "epsilon": 8 / 255, "bounds": [0, 255]}},
        "different threat models",
    ),
    "version": ({}, {"schema_version": 3}, "Unknown version"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_runs_that_do_not_belong_together_are_refused(tmp_path, case):
    options, changes, message = REFUSED[case]
    first = write_sample(tmp_path / "a", num_examples=800, optional=False)
    second = write_sample(
        tmp_path / "b", **{"num_examples": 800, "optional": False, **options, **changes}
    )
    with pytest.raises(ValueError, match=message):
        write_comparison_html([first, second], tmp_path / "out.html")
    assert not list(tmp_path.glob("*out*"))


def test_other_labels_are_refused(runs, tmp_path):
    arrays = dict(np.load(runs[1] / "per_example.npz"))
    before = int(arrays["labels"][7])
    arrays["labels"][[7, 9]] = 1 - arrays["labels"][[7, 9]]
    np.savez(runs[1] / "per_example.npz", **arrays)
    message = f"labels at 2 positions; expected label {before} at position 7"
    with pytest.raises(ValueError, match=message):
        compare(runs)


def test_other_images_behind_equal_labels_are_refused(runs):
    edit(runs[1], settings={"data": "sha256:" + "2" * 64})
    message = r"different images with equal labels; expected data sha256:1+.* received data sha"
    with pytest.raises(ValueError, match=message):
        compare(runs)


@pytest.mark.parametrize("settings", [{}, {"data": "3" * 64}])
def test_images_that_are_not_recorded_are_taken_on_trust(runs, settings):
    """As in reports of an earlier version, whose digests depended on the size of the batches."""
    edit(runs[1], settings=settings)
    assert compare(runs).notes[-1].startswith("Not every report says which images")


def test_bounds_as_whole_numbers_are_the_same_bounds(runs):
    edit(runs[1], threat={"norm": "linf", "epsilon": 8 / 255, "bounds": [0.0, 1.0]})
    assert compare(runs).pairs


def test_a_run_folder_stands_for_its_evaluation(runs, tmp_path):
    for folder, name in zip(runs, ("one", "other"), strict=True):
        (tmp_path / name).mkdir()
        folder.rename(tmp_path / name / "evaluation")
    comparison = compare([tmp_path / "one", tmp_path / "other" / "evaluation"])
    assert [run.source.folder.parent.name for run in comparison.runs] == ["one", "other"]


def test_folders_must_be_two_different_ones(runs, tmp_path):
    for folders in ([], [runs[0]], [runs[0], runs[0] / ".." / "a"]):
        with pytest.raises(ValueError, match="two or more different folders"):
            compare(folders)
    with pytest.raises(TypeError, match="sequence of folders"):
        compare(str(runs[0]))
    with pytest.raises(ValueError, match="Cannot read report.json") as told:
        compare([runs[0], tmp_path / "nothing"])
    assert str(told.value).endswith("nothing/report.json: No such file or directory")
    with pytest.raises(ValueError, match=r"ends in \.html"):
        write_comparison_html(runs, tmp_path / "out.json")


def test_attacks_are_not_compared_where_they_measured_something_else(runs):
    edit(runs[1], mode="individual")
    comparison = compare(runs)
    assert [pair.criterion for pair in comparison.pairs] == ["clean", "worst case"]
    assert "single attacks are not compared" in comparison.notes[0]


@pytest.mark.parametrize(
    ("mode", "compared"),
    [("survivors", ["fgsm"]), ("individual", ["fgsm", "cw-linf-20", "autoattack"])],
)
def test_attacks_are_compared_after_the_same_attacks_only(tmp_path, mode, compared):
    options = {"num_examples": 100, "mode": mode, "optional": False}
    first = write_sample(tmp_path / "a", **options)
    second = write_sample(tmp_path / "b", seed=1, **options)
    attacks = report_of(second)["attacks"]
    edit(second, attacks=[attacks[0], *attacks[2:]])
    comparison = compare([first, second])
    assert [pair.criterion for pair in comparison.pairs] == ["clean", "worst case", *compared]
    assert "did not use the same attacks" in comparison.notes[0]


def test_other_settings_of_an_attack_are_said(runs):
    attacks = report_of(runs[1])["attacks"]
    attacks[1]["settings"] |= {"logit_scale": "model", "batch_size": 7}
    edit(runs[1], attacks=attacks)
    (note,) = compare(runs).notes
    assert note == ("A and B: pgd-20 ran with different settings (logit_scale 'unit' and 'model').")


def test_page_shows_accuracies_and_pairs(runs, tmp_path):
    page = read_page(write_comparison_html(runs, tmp_path / "out" / "page.html"))
    comparison = compare(runs)
    rows = cells(page, "accuracy-table")
    assert rows[0][1:] == ["A: PGD-AT", "B: HE"]
    assert [row[0] for row in rows[1:]] == ["clean", "worst case", *ATTACKS]
    report = report_of(runs[0])
    low, high = report["worst_case_interval"]
    assert rows[2][1] == (f"{100 * report['worst_case']:.2f}% {100 * low:.2f} to {100 * high:.2f}%")
    pair = comparison.pairs[1]
    shown = cells(page, "pair-A-B")[2]
    counts = pair.both_hold, len(pair.only_first), len(pair.only_second), pair.both_broken
    assert shown[:5] == ["worst case", *map(str, counts)]
    assert shown[5] == f"{100 * pair.difference:+.2f}".replace("-", "−")
    assert "B holds" in page.one(id="runs").text and "p < 0.0001" in page.one(id="runs").text


def test_a_difference_that_can_be_chance_is_called_so(tmp_path):
    folders = [
        write_sample(tmp_path / str(seed), num_examples=50, seed=seed, optional=False)
        for seed in (0, 1)
    ]
    pair = compare(folders).pairs[1]
    assert pair.p_value > 0.05, "the sample no longer shows what this test is about"
    page = read_page(write_comparison_html(folders, tmp_path / "out.html"))
    assert "which can be chance" in page.one(id="runs").text


def test_the_first_hundred_positions_are_listed_and_the_file_has_all(runs, tmp_path):
    path = write_comparison_html(runs, tmp_path / "page.html")
    pair = compare(runs).pairs[1]
    assert len(pair.only_second) > 100
    section = read_page(path).one(id="A-B")
    opened = [each for each in section.all("details") if "open" in each.attributes]
    (worst,) = opened
    lists = worst.all("p", class_="positions")
    assert "Held by B, broken in A" in lists[1].text
    listed = lists[1].text.rpartition(": ")[2].split(", ")
    assert [int(position) for position in listed] == pair.only_second[:100].tolist()
    assert "page.json" in worst.text
    data = json.loads((tmp_path / "page.json").read_text())
    assert data["schema_version"] == 1
    assert data["pairs"][1]["only_second_positions"] == pair.only_second.tolist()
    assert data["pairs"][1]["p_value"] == pair.p_value
    assert [run["title"] for run in data["runs"]] == ["PGD-AT", "HE"]


def test_an_attack_that_one_run_lacks_shows_as_not_run(tmp_path):
    first = write_sample(tmp_path / "a", num_examples=100, optional=False)
    second = write_sample(tmp_path / "b", num_examples=100, optional=False, title="<b>&")
    edit(second, attacks=report_of(second)["attacks"][:2])
    page = read_page(write_comparison_html([first, second], tmp_path / "out.html"))
    rows = cells(page, "accuracy-table")
    assert rows[0][2] == "B: <b>&"
    assert rows[-1][0] == "autoattack" and rows[-1][2] == "not run"
