"""The first thing a reader sees: accuracies, threat model, and what speaks against the numbers."""

from he_keras.evaluation.report_page import formatting
from he_keras.evaluation.report_page.markup import Html, join, tag, text
from he_keras.evaluation.report_page.section import Section
from he_keras.evaluation.report_page.source import ReportSource

_ALLOWED_CHANGE = {
    "linf": "change every pixel value by at most {epsilon}",
    "l2": "change the image by at most {epsilon} in Euclidean (L2) length",
    "l1": "change the image by at most {epsilon} in all (L1 length)",
}


def headline(source: ReportSource) -> Section:
    """Clean and worst-case accuracy with what they mean."""
    report = source.report
    body = join(
        [
            tag("p", _sentence(report), class_="lede"),
            _protocol(report),
            _verdicts(report.get("checks") or []),
            tag("dl", *_figures(report), class_="figures"),
        ]
    )
    return Section("result", "Result", body)


def _sentence(report: dict) -> Html:
    threat = report["threat"]
    allowed = _ALLOWED_CHANGE.get(
        threat.get("norm"), "change the image by at most {epsilon} in its norm"
    )
    allowed = allowed.format(epsilon=formatting.epsilon_text(threat))
    size = report["num_examples"]
    images = "the one image" if size == 1 else f"{formatting.count(size)} images"
    robust = formatting.percent(report["worst_case"])
    return join(
        [
            f"Of {images}, the model classifies ",
            formatting.percent(report["clean_accuracy"]),
            " correctly as they are. ",
            tag("strong", f"It still classifies {robust} correctly under every attack tried"),
            f", when the attacker may {allowed}.",
        ]
    )


def _protocol(report: dict) -> Html | None:
    protocol = report.get("protocol")
    if not protocol:
        return None
    return tag("p", tag("strong", "Protocol: "), protocol, class_="callout protocol")


def _figures(report: dict) -> list[Html]:
    threat = report["threat"]
    norm = formatting.norm_name(threat.get("norm"))
    low, high = (formatting.significant(bound) for bound in threat.get("bounds") or (None, None))
    mode = {
        "survivors": "each attack on what the earlier ones left",
        "individual": "each attack on every example",
    }.get(report["mode"], report["mode"])
    return [
        _figure(
            "Worst case over all attacks",
            formatting.percent(report["worst_case"]),
            f"95% interval {formatting.interval(report.get('worst_case_interval'))}",
            "leading",
        ),
        _figure(
            "Clean accuracy",
            formatting.percent(report["clean_accuracy"]),
            f"95% interval {formatting.interval(report.get('clean_interval'))}",
        ),
        _figure(
            "Threat model",
            f"{norm}, ε = {formatting.epsilon_text(threat).split(' (')[0]}",
            f"ε = {formatting.significant(threat.get('epsilon'), 6)}, pixels from {low} to {high}",
        ),
        _figure("Examples", f"n = {formatting.count(report['num_examples'])}", mode),
    ]


def _figure(name: str, value, remark: str, kind: str = "") -> Html:
    return tag(
        "div",
        tag("dt", name),
        tag("dd", value, class_="value"),
        tag("dd", remark, class_="remark"),
        class_=f"figure {kind}".strip(),
    )


def _verdicts(checks: list[dict]) -> Html:
    """What the checks say about the numbers, before anyone quotes them."""
    failed = [check for check in checks if check.get("verdict") == "fail"]
    warned = [check for check in checks if check.get("verdict") == "warn"]
    if not checks:
        message = "No checks ran. Nothing here says whether the attacks worked as they should."
        return tag("p", tag("strong", "Unchecked. "), message, class_="callout warn")
    if failed:
        start = tag("strong", f"{_checks(len(failed))} failed. ")
        advice = "Do not quote the worst case before you have read "
        more = f"; {_checks(len(warned))} warned." if warned else "."
        return tag("p", start, advice, _links(failed), more, class_="callout fail")
    if warned:
        start = tag("strong", f"{_checks(len(warned))} warned: ")
        return tag("p", start, _links(warned), ".", class_="callout warn")
    passed = sum(check.get("verdict") == "pass" for check in checks)
    if not passed:
        start = tag("strong", "Every check was skipped. ")
        return tag("p", start, _link("Why"), ".", class_="callout warn")
    start = tag("strong", f"No check failed or warned: {passed} of {len(checks)} passed. ")
    return tag("p", start, _link("What was checked"), ".", class_="callout pass")


def _checks(number: int) -> str:
    return "1 check" if number == 1 else f"{number} checks"


def _link(words: str) -> Html:
    return tag("a", words, href="#checks")


def _links(checks: list[dict]) -> Html:
    links = (
        tag("a", check.get("name"), href=f"#check-{check.get('name')}", class_="check-link")
        for check in checks
    )
    return join(map(text, links), ", ")
