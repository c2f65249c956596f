"""The verdicts as JUnit XML, which every CI server shows, and as SARIF 2.1.0 for code scanning.

The XML keeps the strict schema of the Ant task JUnit. The suite has all attributes. Its elements
are `properties`, `testcase`, `system-out` and `system-err`, in this order.
"""

import datetime
import pathlib
import platform
import re
from collections.abc import Sequence
from xml.etree import ElementTree

from he_keras.evaluation.gate.verdicts import FAIL, PASS, RULES, Verdict
from he_keras.files import replacing, write_json
from he_keras.version import __version__

JUNIT, SARIF = "gate.junit.xml", "gate.sarif"
_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_ATTACK_WARNING = "attack_warning"
_WARNING_RULE = {
    "id": _ATTACK_WARNING,
    "name": "AttackWarning",
    "shortDescription": {"text": "An attack doubts its own result"},
    "fullDescription": {"text": "The accuracy may be too high; the gate does not decide by it."},
    "defaultConfiguration": {"level": "warning"},
}


def write_junit(
    folder: pathlib.Path,
    verdicts: Sequence[Verdict],
    facts: dict[str, str],
    seconds: float,
    text: str,
) -> pathlib.Path:
    """Writes the verdicts as a suite of tests, and returns the path.

    Args:
        folder: where to write.
        verdicts: one test each.
        facts: what the figures can be traced by, as properties of the suite.
        seconds: what the attacks took.
        text: the table of the evaluation.
    """
    failed = sum(verdict.outcome != PASS for verdict in verdicts)
    now = datetime.datetime.now(datetime.timezone.utc).replace(tzinfo=None)
    attributes = {
        "package": "he_keras",
        "id": "0",
        "name": "he-keras gate",
        "tests": str(len(verdicts)),
        "failures": str(failed),
        "errors": "0",
        "skipped": "0",
        "time": f"{seconds:.3f}",
        "timestamp": now.isoformat(timespec="seconds"),
        "hostname": platform.node() or "localhost",
    }
    root = ElementTree.Element("testsuites")
    suite = ElementTree.SubElement(root, "testsuite", attributes)
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in facts.items():
        ElementTree.SubElement(properties, "property", name=name, value=_clean(value))
    for verdict in verdicts:
        # The attacks are run once for all rules: their time is the suite's.
        case = {"classname": "he_keras.gate", "name": verdict.rule.name, "time": "0"}
        test = ElementTree.SubElement(suite, "testcase", case)
        if verdict.outcome != PASS:
            about = {"type": verdict.outcome, "message": _clean(verdict.message)}
            failure = ElementTree.SubElement(test, "failure", about)
            failure.text = _clean(f"{verdict.line()}\nRule: {verdict.rule.text}")
    lines = [verdict.line() for verdict in verdicts]
    ElementTree.SubElement(suite, "system-out").text = _clean("\n".join([text, *lines]))
    ElementTree.SubElement(suite, "system-err")
    ElementTree.indent(root)
    with replacing(folder / JUNIT) as temporary:
        ElementTree.ElementTree(root).write(temporary, encoding="utf-8", xml_declaration=True)
    return folder / JUNIT


def _clean(text) -> str:
    """A text without the characters that no XML file can hold."""
    return _NOT_IN_XML.sub("?", str(text))


def write_sarif(
    folder: pathlib.Path,
    verdicts: Sequence[Verdict],
    facts: dict[str, str],
    warnings: Sequence[str],
    subject: str,
) -> pathlib.Path:
    """Writes what did not pass as results, and returns the path.

    A result that is gone closes the alert of code scanning, so what passed is no result.

    Args:
        folder: where to write.
        verdicts: what the rules found.
        facts: what the figures can be traced by, as properties of the run.
        warnings: what the attacks said against their own results.
        subject: the file of the model, which the results point to.
    """
    location = {
        "physicalLocation": {
            "artifactLocation": _artifact(subject),
            "region": {"startLine": 1},
        }
    }
    results = [
        _result(verdict.rule.name, verdict.outcome == FAIL, verdict.message, location)
        | {"properties": verdict.numbers}
        for verdict in verdicts
        if verdict.outcome != PASS
    ]
    results += [_result(_ATTACK_WARNING, False, text, location) for text in warnings]
    order = [*(rule.name for rule in RULES), _ATTACK_WARNING]
    for result in results:
        result["ruleIndex"] = order.index(result["ruleId"])
    run = {
        "tool": {"driver": _driver()},
        "invocations": [{"executionSuccessful": True, "exitCode": int(not _all_pass(verdicts))}],
        "results": results,
        "properties": facts,
    }
    schema = "https://json.schemastore.org/sarif-2.1.0.json"
    write_json(folder / SARIF, {"$schema": schema, "version": "2.1.0", "runs": [run]})
    return folder / SARIF


def _all_pass(verdicts: Sequence[Verdict]) -> bool:
    return all(verdict.outcome == PASS for verdict in verdicts)


def _driver() -> dict:
    rules = [
        {
            "id": rule.name,
            "name": "".join(word.capitalize() for word in rule.name.split("_")),
            "shortDescription": {"text": rule.title},
            "fullDescription": {"text": rule.text},
            "help": {"text": rule.text},
            "defaultConfiguration": {"level": "error"},
        }
        for rule in RULES
    ]
    return {
        "name": "he-keras gate",
        "version": __version__,
        "semanticVersion": __version__,
        "rules": [*rules, _WARNING_RULE],
    }


def _result(rule: str, is_error: bool, message: str, location: dict) -> dict:
    """A result; an alert of the same rule and file stays the same alert."""
    return {
        "ruleId": rule,
        "level": "error" if is_error else "warning",
        "kind": "fail",
        "message": {"text": message},
        "locations": [location],
        "partialFingerprints": {"rule/v1": rule},
    }


def _artifact(subject: str) -> dict:
    """The model's file, from the folder that the gate runs in where possible."""
    path = pathlib.Path(subject).absolute()
    try:
        relative = path.relative_to(pathlib.Path.cwd())
    except ValueError:
        return {"uri": path.as_uri()}
    return {"uri": _quoted(relative), "uriBaseId": "%SRCROOT%"}


def _quoted(path: pathlib.Path) -> str:
    import urllib.parse

    return urllib.parse.quote(path.as_posix())
