"""Comparisons over seeds: which runs form a group, what pairs, and Student's t."""

import itertools
import json
import math

import numpy as np
import pytest
from report_reader import cells, read_page
from report_samples import write_sample

from he_keras.evaluation import compare, write_comparison_html
from he_keras.evaluation.statistics import MeanDifference, mcnemar_interval, mcnemar_p_value

# Of Student's distribution with two degrees of freedom.
QUANTILE = 4.302652729911275


def training(seed, head="he", **changes):
    return {"name": head, "seed": seed, "head": {"kind": head, "scale": 15.0}, **changes}


def run(folder, seed, head="he", model=None, **changes):
    """A run of a configuration, in which a linear head is the weaker one."""
    return write_sample(
        folder / f"{head}-{seed}",
        num_examples=300,
        seed=seed + (100 if head == "he" else 0),
        strength=0.35 if head == "he" else 0.5,
        title=f"{head}-{seed}",
        optional=False,
        training=training(seed, head, **changes),
        settings={"model": {"class": "HEAdversarialModel", "config": model or head}},
    )


@pytest.fixture(name="six", scope="module")
def six_runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("six")
    return [run(folder, seed, head) for seed in range(3) for head in ("he", "linear")]


@pytest.fixture(name="both", scope="module")
def compared_six(six):
    return compare(six)


def worst_cases(folders):
    return [(np.load(folder / "per_example.npz")["broken_by"] == -1).mean() for folder in folders]


def test_runs_that_differ_in_their_seed_form_a_group(six, both):
    assert [group.label for group in both.groups] == ["he (A, C, E)", "linear (B, D, F)"]
    assert [group.seeds for group in both.groups] == [[0, 1, 2]] * 2
    shares = worst_cases(six[::2])
    he = both.groups[0]
    assert he.mean("worst case") == pytest.approx(sum(shares) / 3)
    squares = sum((share - sum(shares) / 3) ** 2 for share in shares)
    assert he.standard_deviation("worst case") == pytest.approx(math.sqrt(squares / 2))
    assert "autoattack" in he.criteria


def test_groups_are_paired_by_their_seeds(six, both):
    (paired,) = both.paired_groups
    assert paired.settings == ("head.kind: he -> linear",)
    assert paired.seeds == (0, 1, 2)
    gaps = np.subtract(worst_cases(six[::2]), worst_cases(six[1::2]))
    found = paired.differences["worst case"]
    error = gaps.std(ddof=1) / math.sqrt(3)
    assert found.mean == pytest.approx(gaps.mean())
    assert found.standard_deviation == pytest.approx(gaps.std(ddof=1))
    ends = gaps.mean() - QUANTILE * error, gaps.mean() + QUANTILE * error
    assert found.interval == pytest.approx(ends)
    # With two degrees of freedom the tail has a closed form.
    t = abs(gaps.mean()) / error
    assert found.p_value == pytest.approx(1 - t / math.sqrt(2 + t * t))


def test_the_order_of_the_folders_changes_only_the_sign(six, both):
    shuffled = [six[1], *six[2:], six[0]]
    (paired,) = compare(shuffled).paired_groups
    assert paired.first.name == "linear"
    for name, found in both.paired_groups[0].differences.items():
        assert paired.differences[name].mean == pytest.approx(-found.mean)
        assert paired.differences[name].p_value == pytest.approx(found.p_value)


def test_examples_are_paired_at_equal_seeds(both):
    pairs = {(pair.first, pair.second) for pair in both.main_pairs}
    assert pairs == {("A", "B"), ("C", "D"), ("E", "F")}
    assert len({(pair.first, pair.second) for pair in both.pairs}) == 15


def test_one_group_alone_is_compared_by_example(six):
    comparison = compare(six[::2])
    assert len(comparison.groups) == 1 and comparison.paired_groups == ()
    assert comparison.main_pairs == list(comparison.pairs)


def test_groups_without_common_seeds_are_not_paired(tmp_path, six):
    other = [run(tmp_path, seed, "linear") for seed in (7, 8)]
    comparison = compare([six[0], six[2], *other])
    (paired,) = comparison.paired_groups
    assert paired.seeds == () and paired.differences == {}
    assert "common seeds: 0, too few to pair" in comparison.table()
    across = {pair.first + pair.second for pair in comparison.main_pairs}
    assert across == {"AC", "AD", "BC", "BD"}


def test_one_seed_of_each_is_compared_by_example_only(six):
    comparison = compare(six[:2])
    assert comparison.groups == () and comparison.notes[0].startswith("Not every report says")
    assert "Paired by example" in comparison.table()
    assert "seed only" not in comparison.table()


@pytest.mark.parametrize(
    "changes", [{"head": {"kind": "he", "scale": 7.0}}, {"model": "another network"}]
)
def test_other_settings_or_another_network_are_another_configuration(tmp_path, six, changes):
    other = run(tmp_path, 1, **changes)
    assert compare([six[0], other]).groups == ()


def test_what_does_not_change_a_model_may_differ(tmp_path, six):
    names = {"name": "he, second seed", "evaluation": {"attacks": ["pgd-5"]}}
    other = run(tmp_path, 1, data={"data_dir": "elsewhere"}, **names)
    assert [group.seeds for group in compare([six[0], other]).groups] == [[0, 1]]


def test_the_same_seed_twice_is_no_group(tmp_path, six):
    again = run(tmp_path, 0)
    comparison = compare([six[0], again, six[1], six[3]])
    assert [group.name for group in comparison.groups] == ["linear"]
    assert comparison.notes[-1].startswith("A and B: configuration and seed are the same")


def test_a_run_of_unknown_training_is_named(tmp_path, six):
    unknown = write_sample(tmp_path / "x", num_examples=300, optional=False)
    comparison = compare([six[0], six[2], unknown])
    assert comparison.notes[-1].startswith("C: no report says how the model was trained")
    assert {pair.first + pair.second for pair in comparison.main_pairs} == {"AC", "BC"}


def test_equal_differences_have_no_interval():
    assert MeanDifference.of([0.3 - 0.1, 0.4 - 0.2])[2:] == (None, None)


def test_interval_of_examples_covers_the_difference():
    """The chance of every outcome of 20 examples, summed where the interval has the truth."""
    size = 20
    outcomes = [pair for pair in itertools.product(range(size + 1), repeat=2) if sum(pair) <= size]
    intervals = {pair: mcnemar_interval(*pair, size) for pair in outcomes}
    for a, b in ((0.02, 0.02), (0.1, 0.0), (0.3, 0.1), (0.05, 0.45), (0.5, 0.5)):
        covered = 0.0
        for (first, second), (low, high) in intervals.items():
            ways = math.comb(size, first) * math.comb(size - first, second)
            chance = ways * a**first * b**second * max(1 - a - b, 0.0) ** (size - first - second)
            covered += chance * (low - 1e-12 <= a - b <= high + 1e-12)
        assert covered >= 0.95, (a, b)
    for (first, second), (low, high) in intervals.items():
        assert (low > 0 or high < 0) == (mcnemar_p_value(first, second) < 0.05)
        assert low <= (first - second) / size <= high


def test_console_tells_threat_means_and_pairs(both):
    lines = both.table().splitlines()
    assert (
        lines[0] == "Accuracy; linf, epsilon 8/255 (0.03137), pixels 0 to 1; the same 300 examples"
    )
    assert lines[2].split()[:3] == ["A", "he-0", "0"]
    he = both.groups[0]
    spread = f"{100 * he.mean('clean'):.2f} +- {100 * he.standard_deviation('clean'):.2f} %"
    (row,) = (line for line in lines if line.startswith("he (A, C, E)"))
    assert row.split()[4] == "3" and spread in row
    (named,) = (line for line in lines if "minus linear (B, D, F)" in line)
    assert named.endswith("they differ in head.kind: he -> linear")
    found = both.paired_groups[0].differences["worst case"]
    (row,) = (line for line in lines if line.startswith("    worst case"))
    assert f"{100 * found.mean:+.2f} points, 95 % interval" in row
    assert row.endswith("n = 3 seeds")
    pairs = [line for line in lines if " disagree" in line]
    assert [line[:11] for line in pairs] == ["  A minus B", "  C minus D", "  E minus F"]


def test_short_forms_are_short(six, both):
    for each in (both, both.runs[0], both.pairs[0], both.groups[0], both.runs[0].source):
        lines = repr(each).splitlines()
        assert len(lines) <= 5 and max(map(len, lines)) < 400
    shown = both._repr_html_()
    assert "<td>linear-2</td>" in shown and "Paired by seed" in shown


def test_page_and_file_have_the_seeds(both, tmp_path):
    page = read_page(write_comparison_html(both, tmp_path / "page.html"))
    assert page.one("h1").text == "he and linear"
    rows = cells(page, "group-table")
    assert rows[0][1:] == ["he (A, C, E), n = 3", "linear (B, D, F), n = 3"]
    he = both.groups[0]
    mean, deviation = he.mean("worst case"), he.standard_deviation("worst case")
    assert rows[2][:2] == ["worst case", f"{100 * mean:.2f}% ± {100 * deviation:.2f}"]
    found = both.paired_groups[0].differences["worst case"]
    shown = cells(page, "seeds-1")[2]
    assert shown[1] == f"{100 * found.mean:+.2f}".replace("-", "−")
    assert "mean over 3 seeds" in page.one(id="runs").text
    assert "head.kind: he -> linear" in page.one(id="seeds").text
    sections = [section.get("id") for section in page.all("section")]
    assert sections == ["runs", "seeds", "accuracies", "A-B", "C-D", "E-F"]
    data = json.loads((tmp_path / "page.json").read_text())
    assert data["threat"]["norm"] == "linf"
    assert data["groups"][1]["runs"] == ["B", "D", "F"]
    assert data["groups"][0]["accuracy"]["worst case"]["mean"] == mean
    stored = data["paired_groups"][0]["differences"]["worst case"]
    assert stored["interval"] == list(found.interval) and stored["p_value"] == found.p_value
    assert data["runs"][5]["seed"] == 2 and len(data["pairs"]) == 15 * 6
