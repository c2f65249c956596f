"""The gate: the paired test, its rules, what is refused, and the files for CI."""

import json
import pathlib
import re
import types
from xml.etree import ElementTree

import evaluation_program as program
import keras
import numpy as np
import pytest
from evaluation_program import when_written
from scipy import stats

import he_keras as he
from he_keras.evaluation import run_gate
from he_keras.evaluation.comparison import PairedCounts
from he_keras.evaluation.gate import read_baseline
from he_keras.evaluation.gate.ci_files import write_junit, write_sarif
from he_keras.evaluation.gate.verdicts import (
    MAX_LOSS,
    RULES,
    Verdict,
    examples_needed,
    of_loss,
    of_worst_case,
)
from he_keras.evaluation.statistics import mcnemar_interval

ATTACKS = ("fgsm", "pgd-2")


# The rules


def pair_of(lost, gained, total):
    rest = total - lost - gained
    return PairedCounts("A", "B", "worst case", rest, np.arange(lost), np.arange(gained), 0, 0.5)


@pytest.mark.fast_cases("50-0.02")
@pytest.mark.parametrize(("total", "limit"), [(50, 0.02), (100, 0.01), (100, 0.1)])
def test_a_model_that_loses_the_limit_seldom_passes(total, limit):
    """Every possible sample, weighted by its probability: at most 2.5 % pass."""
    pairs = [(lost, gained) for lost in range(total // 3) for gained in range(total // 3)]
    passing = np.array([pair for pair in pairs if mcnemar_interval(*pair, total)[1] <= limit])
    verdicts = {of_loss(pair_of(*pair, total), limit).outcome for pair in passing[::50].tolist()}
    assert verdicts == {"pass"}
    chances = []
    for more in (0.0, limit / 2, 0.03, 0.1, 0.2):
        lost, gained = limit + more / 2, more / 2
        rest = stats.binom.pmf(passing[:, 1], total - passing[:, 0], gained / (1 - lost))
        chances.append((stats.binom.pmf(passing[:, 0], total, lost) * rest).sum())
    assert 0.005 < max(chances) <= 0.025


def test_how_many_examples_would_do():
    needed = examples_needed(40, 30, 1000, 0.02)
    assert needed > 1000
    for total, shows in ((1.1 * needed, True), (0.9 * needed, False)):
        scaled = round(0.04 * total), round(0.03 * total), round(total)
        assert (mcnemar_interval(*scaled)[1] <= 0.02) is shows
    assert examples_needed(40, 20, 1000, 0.02) is None
    assert examples_needed(0, 0, 1000, 0.02) == 1000


@pytest.mark.parametrize(
    ("counts", "outcome", "words"),
    [
        ((0, 0, 1000), "pass", "loss +0.00 points, 95 % interval -0.37 to +0.37, n = 1000"),
        ((30, 2, 1000), "fail", "30 lost and 2 gained"),
        ((0, 0, 100), "undecided", "Too few images to decide. About 368 would do"),
        ((14, 3, 1000), "undecided", "No larger sample would show less"),
    ],
)
def test_the_outcome_of_a_loss(counts, outcome, words):
    verdict = of_loss(pair_of(*counts), 0.01)
    assert verdict.outcome == outcome
    assert words in verdict.message and "(McNemar)" in verdict.message


@pytest.mark.parametrize(("limit", "outcome"), [(0.45, "pass"), (0.4501, "fail")])
def test_the_worst_case_itself_is_compared(limit, outcome):
    report = types.SimpleNamespace(
        worst_case=0.45, worst_case_interval=(0.4, 0.5), num_examples=400
    )
    verdict = of_worst_case(report, limit)
    assert verdict.outcome == outcome
    assert "95 % interval 40.00% to 50.00%, n = 400" in verdict.message
    assert "contains the limit" in verdict.message
    assert "contains the limit" not in of_worst_case(report, 0.3).message


# The whole


def weaker_model():
    """Knows a class less well, so that fewer examples hold."""
    weaker = keras.models.clone_model(program.model())
    kernel, bias = program.model().get_weights()
    weaker.set_weights([kernel, bias + np.array([8.0, 0.0, 0.0])])
    return weaker


@pytest.fixture(scope="module")
def baseline(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "evaluation"
    he.evaluate_robustness(
        program.model(),
        program.examples(),
        program.THREAT,
        ATTACKS,
        folder,
        program.BATCH_SIZE,
        checks=False,
        step_size=0.02,
    )
    return folder


def gate(folder, model=None, examples=None, threat=program.THREAT, **options):
    examples = examples or program.examples()
    return run_gate(model or program.model(), examples, threat, folder, **options)


def test_an_equal_model_passes_and_a_weaker_one_does_not(baseline, tmp_path):
    worst = json.loads((baseline / "report.json").read_text())["worst_case"]
    limits = {"min_worst_case": worst, "baseline": baseline.parent, "max_loss": 0.1}
    same = gate(tmp_path / "same", **limits)
    assert same.passed and same.summary().endswith("Gate: passed.")
    assert same.report.worst_case == worst
    # The settings of the baseline's attacks, not their defaults.
    assert [row.settings["step_size"] for row in same.report.rows][1] == 0.02
    weaker = gate(tmp_path / "weaker", weaker_model(), **limits)
    assert not weaker.passed and weaker.report.worst_case < worst
    assert [each.outcome for each in weaker.verdicts] == ["fail", "fail"]
    assert weaker.summary().endswith("NOT passed, because of min_worst_case, max_loss.")
    lost = weaker.verdicts[1].numbers
    assert (lost["lost"] - lost["gained"]) / 50 == pytest.approx(worst - weaker.report.worst_case)


def test_a_second_call_attacks_nothing(tmp_path):
    first = gate(tmp_path, min_worst_case=0.1, attacks=["fgsm"])
    written = when_written(tmp_path / "adversarial")
    second = gate(tmp_path, min_worst_case=0.1, attacks=["fgsm"])
    assert second.verdicts == first.verdicts
    assert when_written(tmp_path / "adversarial") == written != {}


def test_without_a_baseline_fast_runs_and_nothing_else(tmp_path, monkeypatch):
    asked = {}

    def stop(model, examples, threat, attacks, folder, batch_size, **options):
        asked.update(options, attacks=attacks)
        raise KeyboardInterrupt

    monkeypatch.setitem(run_gate.__globals__, "evaluate_robustness", stop)
    with pytest.raises(KeyboardInterrupt):
        gate(tmp_path, min_worst_case=0.1)
    assert asked["attacks"] == ("fast",)
    assert (asked["checks"], asked["panel"], asked["mode"]) == (False, False, "survivors")


def changed(folder, target, **changes):
    """A copy of a report with other entries."""
    target.mkdir()
    content = json.loads((folder / "report.json").read_text()) | changes
    (target / "report.json").write_text(json.dumps(content))
    (target / "per_example.npz").write_bytes((folder / "per_example.npz").read_bytes())
    return target


def test_a_baseline_that_does_not_fit_is_refused_before_any_attack(baseline, tmp_path):
    images, labels = program.examples()
    limits = {"baseline": baseline, "max_loss": 0.1}
    cases = [
        ("other images", {**limits, "examples": (images * 0.5, labels)}),
        ("other images", {**limits, "examples": (images[:20], labels[:20])}),
        ("another threat model", {**limits, "threat": he.ThreatModel("linf", 0.05)}),
        ("Other attacks than the baseline's", {**limits, "attacks": ["fast"]}),
        ("Cannot read report.json", {**limits, "baseline": tmp_path / "none"}),
    ]
    settings = changed(baseline, tmp_path / "a", settings={})
    cases.append(("does not say which images", {**limits, "baseline": settings}))
    rows = json.loads((baseline / "report.json").read_text())["attacks"]
    rows[0]["name"] = "mine"
    unknown = changed(baseline, tmp_path / "b", attacks=rows)
    cases.append(("cannot be built again.*received mine", {**limits, "baseline": unknown}))
    (unknown / "per_example.npz").unlink()
    for message, options in cases[:-1]:
        with pytest.raises(ValueError, match=message) as error:
            gate(tmp_path / "gate", **options)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="expected per_example.npz"):
        gate(tmp_path / "gate", **cases[-1][1])
    with pytest.raises(ValueError, match="other than the baseline's"):
        gate(baseline, **limits)
    assert not (tmp_path / "gate").exists()


def test_an_attack_that_has_no_name_is_refused(baseline, tmp_path):
    rows = json.loads((baseline / "report.json").read_text())["attacks"]
    rows[0]["name"] = "mine"
    source = changed(baseline, tmp_path / "a", attacks=rows)
    with pytest.raises(ValueError, match="cannot be built again.*received mine"):
        read_baseline(source).attacks(None, 10)


def test_dear_attacks_must_be_asked_for(baseline, tmp_path):
    rows = json.loads((baseline / "report.json").read_text())["attacks"][:1]
    settings = he.attacks.get("autoattack", program.THREAT).get_config()
    rows[0] |= {"name": "autoattack", "settings": settings}
    dear = read_baseline(changed(baseline, tmp_path / "dear", attacks=rows))
    with pytest.raises(ValueError, match="cost more than fast.*allow them by their names"):
        dear.attacks(None, 10)
    assert dear.attacks(["AutoAttack"], 10)[0].most_passes(3) > 5000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "Nothing to test"),
        ({"max_loss": 0.1}, "expected both or neither; received max_loss=0.1 alone"),
        ({"min_worst_case": 0.1, "baseline": "a"}, "received a baseline alone"),
        ({"min_worst_case": 45}, "did you mean 0.45?"),
        ({"min_worst_case": -1}, "expected a share above 0"),
        ({"max_loss": 0.0, "baseline": "a"}, "no loss at all cannot be shown"),
    ],
)
def test_limits_that_make_no_test_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        gate(tmp_path, **options)


# The files

FAILED = Verdict(RULES[0], "fail", "0.3 < 0.5 & \x1b[1mbold\x00", {"worst_case": 0.3})
VERDICTS = (
    FAILED,
    Verdict(MAX_LOSS, "undecided", "too few", {}),
    Verdict(RULES[2], "pass", "", {}),
)


def test_junit_keeps_the_strict_schema(tmp_path):
    path = write_junit(tmp_path, VERDICTS, {"model": "a\x07<b>"}, 1.5, "table")
    root = ElementTree.parse(path).getroot()
    (suite,) = root
    assert (root.tag, suite.tag) == ("testsuites", "testsuite")
    expected = {"package", "id", "name", "tests", "failures", "errors", "skipped", "time"}
    assert set(suite.attrib) == expected | {"timestamp", "hostname"}
    assert [suite.get(name) for name in ("tests", "failures", "errors")] == ["3", "2", "0"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", suite.get("timestamp"))
    order = ["properties", *["testcase"] * 3, "system-out", "system-err"]
    assert [each.tag for each in suite] == order
    assert suite.find("properties/property").attrib == {"name": "model", "value": "a?<b>"}
    cases = suite.findall("testcase")
    assert [case.get("name") for case in cases] == ["min_worst_case", "max_loss", "checks"]
    assert all(set(case.attrib) == {"name", "classname", "time"} for case in cases)
    assert [[each.get("type") for each in case] for case in cases] == [["fail"], ["undecided"], []]
    assert cases[0][0].get("message") == "0.3 < 0.5 & ?[1mbold?"
    assert RULES[0].text in cases[0][0].text


def test_sarif_has_what_readers_require(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write_sarif(tmp_path, VERDICTS, {"n": "5"}, ["fast: random"], "my models/a.keras")
    content = json.loads(path.read_text())
    assert content["version"] == "2.1.0" and content["$schema"].endswith("sarif-2.1.0.json")
    (run,) = content["runs"]
    driver = run["tool"]["driver"]
    assert driver["name"] and all(rule["shortDescription"]["text"] for rule in driver["rules"])
    found = [(result["ruleId"], result["level"]) for result in run["results"]]
    assert found == [
        ("min_worst_case", "error"),
        ("max_loss", "warning"),
        ("attack_warning", "warning"),
    ]
    for result in run["results"]:
        assert driver["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["message"]["text"] and result["partialFingerprints"]
        (location,) = result["locations"]
        place = location["physicalLocation"]
        assert place["artifactLocation"] == {
            "uri": "my%20models/a.keras",
            "uriBaseId": "%SRCROOT%",
        }
        assert place["region"]["startLine"] == 1
    assert run["invocations"] == [{"executionSuccessful": True, "exitCode": 1}]


def test_sarif_of_a_passed_gate_has_no_result(tmp_path):
    elsewhere = pathlib.Path("/elsewhere/a.keras")
    path = write_sarif(tmp_path, VERDICTS[2:], {}, [], str(elsewhere))
    (run,) = json.loads(path.read_text())["runs"]
    assert run["results"] == [] and run["invocations"][0]["exitCode"] == 0
    path = write_sarif(tmp_path, VERDICTS[:1], {}, [], str(elsewhere))
    (run,) = json.loads(path.read_text())["runs"]
    place = run["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]
    assert place == {"uri": "file:///elsewhere/a.keras"}
