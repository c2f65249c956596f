"""The HTML report: what stands on the page, for usual and for odd reports."""

import json
import re

import numpy as np
import pytest
from report_reader import cells, read_page
from report_samples import CHECKS, STAGES, write_sample

from he_keras.evaluation.report import write_html

VERDICTS = ("fail", "warn", "pass", "skipped")
HOSTILE = '<script>alert("x")</script> & </title></style> \'"'


def written(folder, **options):
    return read_page(write_html(write_sample(folder, **options)))


def section_names(page):
    return [section.get("id") for section in page.all("section")]


def report_of(folder):
    return json.loads((folder / "report.json").read_text())


def test_full_report_has_every_section(tmp_path):
    page = written(tmp_path)
    assert section_names(page) == [
        "result",
        "attacks",
        "cosine-head",
        "epsilon-curve",
        "checks",
        "classes",
        "gallery",
        "corruptions",
        "transfer",
        "provenance",
    ]
    links = [link.get("href") for link in page.one("nav").all("a")]
    assert links == [f"#{name}" for name in section_names(page)]
    assert page.one("h1").text == "PGD-AT+HE on CIFAR-10"
    assert "evaluated 2026-11-18 14:56 UTC" in page.one("header").text


def test_sections_that_were_not_run_are_left_out(tmp_path):
    page = written(tmp_path, optional=False)
    assert section_names(page) == ["result", "attacks", "checks", "classes", "provenance"]
    assert "Unchecked" in page.one(id="result").text
    assert "Protocol" not in page.one(id="result").text
    assert "class 3" in page.one(id="classes").text
    assert not (tmp_path / "gallery.npz").exists()


def test_entries_that_are_absent_count_as_not_run(tmp_path):
    write_sample(tmp_path, optional=False)
    report = report_of(tmp_path)
    needed = "schema_version mode num_examples clean_accuracy worst_case threat attacks".split()
    (tmp_path / "report.json").write_text(json.dumps({name: report[name] for name in needed}))
    page = read_page(write_html(tmp_path))
    assert section_names(page) == ["result", "attacks", "checks", "classes", "provenance"]
    assert "95% interval –" in page.one(id="result").text


def test_headline_says_what_the_report_says(tmp_path):
    page = written(tmp_path, num_examples=2000, protocol="paper settings of Table 2")
    report, result = report_of(tmp_path), page.one(id="result")
    for share in ("worst_case", "clean_accuracy"):
        assert f"{100 * report[share]:.2f}%" in result.text
    low, high = report["worst_case_interval"]
    assert f"95% interval {100 * low:.2f} to {100 * high:.2f}%" in result.text
    assert "L∞, ε = 8/255" in result.text and "n = 2,000" in result.text
    assert "pixels from 0 to 1" in result.text
    assert "Protocol: paper settings of Table 2" in result.text
    assert "1 check failed." in result.text
    assert result.one("a", href="#check-rescale-invariance")


@pytest.mark.parametrize(
    ("threat", "expected"),
    [
        ({"norm": "l2", "epsilon": 0.5, "bounds": [0, 1]}, "L2, ε = 0.5"),
        ({"norm": "linf", "epsilon": 0.031, "bounds": [0.0, 1.0]}, "L∞, ε = 0.031 "),
        ({"norm": "linf", "epsilon": 0.5 / 255, "bounds": [0, 1]}, "L∞, ε = 0.5/255"),
        ({"norm": "linf", "epsilon": 8, "bounds": [0, 255]}, "L∞, ε = 8 "),
        ({"norm": "l1", "epsilon": 12.0, "bounds": [-1, 1]}, "pixels from −1 to 1"),
    ],
)
def test_threat_models_are_written_as_people_quote_them(tmp_path, threat, expected):
    page = written(tmp_path, threat=threat, optional=False)
    assert expected in page.one("dl", class_="figures").text + " "


def test_attack_table_has_every_figure(tmp_path):
    page = written(tmp_path, num_examples=2000)
    report, rows = report_of(tmp_path), cells(page, "attack-table")
    header, fgsm = rows[0], rows[1]
    first = report["attacks"][0]
    shown = dict(zip(header, fgsm, strict=True))
    assert shown["Order"] == "1" and shown["Attack"] == "fgsm"
    assert shown["Robust accuracy"] == f"{100 * first['robust_accuracy']:.2f}%"
    low, high = first["interval"]
    assert shown["95% interval"] == f"{100 * low:.2f} to {100 * high:.2f}%"
    assert shown["Attacked"] == f"{first['num_attacked']:,}"
    assert shown["Broken"] == f"{first['num_broken']:,}"
    assert shown["Median distance"] == f"{first['median_distance']:.4g}"
    assert shown["Largest distance"] == f"{first['max_distance']:.4g}"
    assert (shown["Forward passes"], shown["Backward passes"], shown["Time"]) == ("2", "1", "4.2 s")
    assert rows[2][:2] == ["2", "pgd-20 scale 1"]
    assert rows[3] == [
        "Note: Cross-entropy at scale 1, as in the paper: see the panel on the head."
    ]


def test_stages_and_warnings_stand_in_the_group_of_their_attack(tmp_path):
    groups = written(tmp_path).one("table", id="attack-table").all("tbody")
    assert len(groups) == 4
    rows = groups[3].all("tr")
    assert [row.one("th").text for row in rows[:5]] == ["autoattack", *STAGES]
    assert all(row.get("class") == "stage" for row in rows[1:5])
    assert rows[5].text.startswith("Warning: Square broke")


def test_what_is_left_over_shows_only_where_it_is_something_else(tmp_path):
    survivors = cells(written(tmp_path / "a", mode="survivors"), "attack-table")[0]
    individual = written(tmp_path / "b", mode="individual")
    rows = cells(individual, "attack-table")
    assert "Left over" not in survivors and "Left over" in rows[0]
    report = report_of(tmp_path / "b")
    column = rows[0].index("Left over")
    assert rows[-2][column] == f"{100 * report['attacks'][-1]['stages'][-1]['remaining']:.2f}%"
    assert "each attack on every example" in individual.one(id="result").text


def test_sorting_values_are_the_exact_numbers(tmp_path):
    page = written(tmp_path)
    for group, attack in zip(
        page.one("table", id="attack-table").all("tbody"),
        report_of(tmp_path)["attacks"],
        strict=True,
    ):
        values = [float(cell.get("data-value")) for cell in group.all("tr")[0].all("td")[1:2]]
        assert values == [attack["robust_accuracy"]]


def test_panel_measures_every_row_against_the_lowest(tmp_path):
    page = written(tmp_path)
    rows = cells(page, "he-panel-table")
    assert [row[3] for row in rows[1:]] == ["+9.20", "+4.20", "+3.80", "+1.30", "lowest"]
    # exp(2) / (exp(2) + 9)
    assert "no class more than 45%" in page.one(id="cosine-head").text


def test_curve_has_its_points_at_the_right_places(tmp_path):
    points = [{"epsilon": k / 10, "accuracy": 1 - k / 4} for k in (0, 4, 2)]
    curve = {"attack": "pgd-20", "num_examples": 10, "points": points}
    threat = {"norm": "l2", "epsilon": 0.1, "bounds": [0, 1]}
    page = written(tmp_path, epsilon_curve=curve, threat=threat)
    dots = [(float(dot.get("cx")), float(dot.get("cy"))) for dot in page.all("circle")]
    assert [x - dots[0][0] for x, _ in dots] == pytest.approx([0, 242, 484])
    assert [y - dots[0][1] for _, y in dots] == pytest.approx([0, 114, 228])
    line = page.one("polyline").get("points")
    assert line == " ".join(f"{x},{y}" for x, y in dots)
    assert "100.00% at epsilon 0 and 0.00% at epsilon 0.4" in page.one("desc").text
    assert cells(page, "curve-table")[1:] == [["0", "100.00%"], ["0.2", "50.00%"], ["0.4", "0.00%"]]


@pytest.mark.parametrize("points", [[], [{"epsilon": 0.0, "accuracy": 1.0}]])
def test_curve_of_no_or_one_point(tmp_path, points):
    curve = {"attack": "pgd-20", "num_examples": 10, "points": points}
    page = written(tmp_path, epsilon_curve=curve)
    assert len(page.all("circle")) == len(points)


def test_failed_checks_come_first_and_verdicts_are_words(tmp_path):
    items = written(tmp_path).one(id="checks").all("li")
    verdicts = [item.all("span", class_="verdict")[0].text for item in items]
    assert verdicts == ["✕ fail", "! warn", "✓ pass", "✓ pass", "✓ pass", "– skipped"]
    by_name = {check[0]: check for check in CHECKS}
    for item in items:
        name = item.one("h3").text
        _, when, _, figure, message = by_name[name]
        assert item.get("id") == f"check-{name}"
        assert f"docs/reference/checks.md#{name}" in item.text
        assert f"{when} the attacks" in item.text
        assert figure in item.text and message in item.text


def test_only_checks_that_give_reason_to_doubt_are_open(tmp_path):
    section = written(tmp_path).one(id="checks")
    folded = section.all("details")
    assert [each.one("summary").text for each in folded] == [
        "✓ passed: 3 checks",
        "– skipped: 1 check",
    ]
    assert not any("open" in each.attributes for each in folded)
    hidden = [item.one("h3").text for each in folded for item in each.all("li")]
    names = {verdict: [each[0] for each in CHECKS if each[2] == verdict] for verdict in VERDICTS}
    assert hidden == [*names["pass"], *names["skipped"]]
    shown = [each.one("h3").text for each in section.all("li")]
    assert shown == [*names["fail"], *names["warn"], *hidden]


@pytest.mark.parametrize(
    ("verdicts", "words", "style"),
    [
        (["pass", "skipped"], "1 of 2 passed", "pass"),
        (["pass", "warn"], "1 check warned: b", "warn"),
        (["fail", "fail"], "2 checks failed.", "fail"),
        (["skipped", "skipped"], "Every check was skipped", "warn"),
    ],
)
def test_headline_sums_up_the_checks(tmp_path, verdicts, words, style):
    checks = [
        {"name": name, "when": "before", "verdict": verdict, "figure": "1", "message": "m"}
        for name, verdict in zip("ab", verdicts, strict=True)
    ]
    callout = written(tmp_path, checks=checks).one(id="result").one("p", class_="callout")
    assert words in callout.text
    assert style in callout.get("class").split()


def test_class_table_counts_the_examples_of_each_class(tmp_path):
    page = written(tmp_path)
    stored = np.load(tmp_path / "per_example.npz")
    for number, row in enumerate(cells(page, "class-table")[1:]):
        chosen = stored["labels"] == number
        clean = stored["clean"][chosen].mean()
        robust = (stored["broken_by"][chosen] == -1).mean()
        assert row[1:] == [
            str(chosen.sum()),
            f"{100 * clean:.2f}%",
            f"{100 * robust:.2f}%",
            f"{100 * (clean - robust):.2f}",
        ]


def test_confusion_is_a_matrix_with_shades_and_sums(tmp_path):
    confusion = np.zeros((10, 10), int)
    confusion[3, 5], confusion[3, 2], confusion[9, 0] = 10, 4, 1
    page = written(tmp_path, confusion=confusion.tolist())
    rows = cells(page, "confusion-table")
    assert rows[0][1:4] == ["airplane", "car", "bird"]
    assert rows[4] == ["cat", "0", "0", "4", "0", "0", "10", "0", "0", "0", "0", "14"]
    shades = [cell.get("class").split()[-1] for cell in page.one(id="confusion-table").all("td")]
    row = shades[3 * 11 : 3 * 11 + 10]
    assert row[5] == "shade-5" and row[2] == "shade-2" and row[0] == "shade-0"


def test_a_thousand_classes_become_a_list(tmp_path):
    confusion = np.zeros((1000, 1000), int)
    confusion[12, 700], confusion[999, 0] = 7, 3
    names = [f"kind {number}" for number in range(1000)]
    page = written(
        tmp_path, num_classes=1000, class_names=names, confusion=confusion.tolist(), gallery=[]
    )
    rows = cells(page, "confusion-table")
    assert rows[1:] == [
        ["kind 12", "kind 700", "7", "70.00%"],
        ["kind 999", "kind 0", "3", "30.00%"],
    ]
    assert len(cells(page, "class-table")) == 21
    weakest = [float(row[3][:-1]) for row in cells(page, "class-table")[1:]]
    assert weakest == sorted(weakest)
    assert (tmp_path / "report.html").stat().st_size < 200_000


def test_corruptions_and_transfer_show_their_numbers(tmp_path):
    page = written(tmp_path)
    report = report_of(tmp_path)
    rows = cells(page, "corruption-table")
    shares = report["corruptions"]["accuracy"]["motion_blur"]
    mean = sum(shares) / 5
    assert rows[3] == [
        "motion blur",
        *(f"{100 * each:.1f}%" for each in shares),
        f"{100 * mean:.1f}%",
    ]
    assert "Mean accuracy under corruption: 65.50%" in page.one(id="corruptions").text
    rows = cells(page, "transfer-table")
    assert rows[0][1:] == ["PGD-AT", "PGD-AT+HE", "TRADES"]
    assert rows[2] == ["PGD-AT+HE", "62.0%", "54.0% (same model)", "64.0%"]
    table = page.one(id="transfer-table")
    classes = [cell.get("class").split() for cell in table.all("td")]
    assert "shade-5" in classes[0] and "shade-0" in classes[2] and "diagonal" in classes[4]


def test_corruptions_are_headed_by_the_severities_that_ran(tmp_path):
    written(tmp_path)
    report = report_of(tmp_path)
    part = {"severities": [3, 5], "is_complete": False, "accuracy": {"fog": [0.7, 0.4]}}
    report["corruptions"] |= part
    (tmp_path / "report.json").write_text(json.dumps(report))
    page = read_page(write_html(tmp_path))
    shown = cells(page, "corruption-table")
    assert shown == [
        ["Corruption", "Severity 3", "Severity 5", "Mean"],
        ["fog", "70.0%", "40.0%", "55.0%"],
    ]
    assert "not the mCA of 15 corruptions" in page.one(id="corruptions").text
    report["corruptions"]["accuracy"]["snow"] = [0.7]
    (tmp_path / "report.json").write_text(json.dumps(report))
    with pytest.raises(ValueError, match=r"severities \[3, 5\]; received 1 for snow"):
        write_html(tmp_path)


def test_settings_command_and_environment_are_complete(tmp_path):
    section = written(tmp_path).one(id="provenance")
    assert "python tools/evaluate.py --run=runs/he" in section.text
    assert ["commit", "8697900c0ffee"] in cells(section, "environment-table")
    assert '"split": "test"' in section.text
    summaries = [summary.text for summary in section.all("summary")]
    assert summaries[2:] == [
        f"Settings of {name}" for name in ("fgsm", "pgd-20", "cw-linf-20", "autoattack")
    ]
    assert all(stage in section.all("details")[-1].text for stage in STAGES)


def test_text_from_data_never_becomes_markup(tmp_path):
    write_sample(tmp_path, class_names=[f"{HOSTILE}{k}" for k in range(10)], title=HOSTILE)
    report = report_of(tmp_path)

    def poison(value):
        if isinstance(value, dict):
            return {
                f"{key}{HOSTILE}" if key == "frost" else key: poison(v) for key, v in value.items()
            }
        if isinstance(value, list):
            return [poison(each) for each in value]
        kept = ("linf", "survivors", "hardest", "easiest", "fail", "warn", "pass", "skipped")
        return value + HOSTILE if isinstance(value, str) and value not in kept else value

    (tmp_path / "report.json").write_text(json.dumps(poison(report)))
    page = read_page(write_html(tmp_path))
    assert len(page.all("script")) == len(page.all("style")) == 1
    assert len(page.all("title")) == 2, "the page's and the curve's"
    assert page.one("h1").text == HOSTILE + HOSTILE
    assert len(page.all("tbody")) > 5
    assert f"cat{HOSTILE}" not in (tmp_path / "report.html").read_text()


def test_the_policy_allows_our_script_and_nothing_else(tmp_path):
    import base64
    import hashlib

    source = write_html(write_sample(tmp_path)).read_text()
    script = re.search(r"<script>(.*?)</script>", source, re.S).group(1)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = read_page(tmp_path / "report.html").all("meta", http_equiv="Content-Security-Policy")
    assert f"script-src 'sha256-{digest}'" in policy[0].get("content")
    assert len(script.splitlines()) < 150


@pytest.mark.parametrize("strength", [0.0, 5.0])
def test_one_example_and_attacks_that_break_none_or_all(tmp_path, strength):
    page = written(tmp_path, num_examples=1, strength=strength, seed=1)
    assert "the one image" in page.one(id="result").text
    broken = report_of(tmp_path)["attacks"][0]["num_broken"]
    assert broken == (1 if strength else 0)
    row = cells(page, "attack-table")[1]
    assert (row[6] == "–") == (not broken)


def test_null_figures_show_as_dashes(tmp_path):
    write_sample(tmp_path)
    report = report_of(tmp_path)
    kept = ("name", "settings", "stages")
    report["attacks"] = [
        {name: value if name in kept else None for name, value in attack.items()}
        for attack in report["attacks"]
    ]
    for row in report["he_panel"]["rows"]:
        row.update(robust_accuracy=None, interval=None)
    report["corruptions"]["accuracy"]["frost"] = [None] * 5
    report["transfer"]["robust_accuracy"][0] = [None, float("nan"), 0.5]
    for example in report["gallery"]:
        example.update(margin=None, distance=None)
    report["clean_interval"] = report["worst_case_interval"] = None
    (tmp_path / "report.json").write_text(json.dumps(report))
    page = read_page(write_html(tmp_path))
    assert cells(page, "attack-table")[1][2:] == ["–"] * 9
    assert cells(page, "he-panel-table")[1][1:4] == ["–"] * 3
    assert cells(page, "corruption-table")[4] == ["frost", *["–"] * 6]
    assert cells(page, "transfer-table")[1] == ["PGD-AT", "– (same model)", "–", "50.0%"]
    assert "nan" not in page.one("main").text.lower()
