"""The checks: what could make the numbers wrong, and what was measured about it."""

from he_keras.evaluation.report_page.markup import Html, join, tag
from he_keras.evaluation.report_page.section import Section
from he_keras.evaluation.report_page.source import ReportSource
from he_keras.evaluation.report_page.tables import paragraphs

# Bad news first. Sign and word tell the verdicts apart without colour.
_VERDICTS = {"fail": "✕ fail", "warn": "! warn", "pass": "✓ pass", "skipped": "– skipped"}
_WHEN = {"before": "before the attacks", "after": "after the attacks"}
_EXPLAINED_IN = "docs/evaluation.md"


def check_list(source: ReportSource) -> Section:
    """Every check with its verdict, its figure and what to do."""
    checks = source.report.get("checks") or []
    if not checks:
        return Section("checks", "Checks", paragraphs("No checks ran."))
    order = list(_VERDICTS)
    ranked = sorted(checks, key=lambda check: _rank(check.get("verdict"), order))
    items = [_item(check) for check in ranked]
    intro = paragraphs(
        join([_tally(checks), f". {_EXPLAINED_IN} has a section under each check's name."])
    )
    return Section("checks", "Checks", join([intro, tag("ul", *items, class_="checks")]))


def _rank(verdict, order: list[str]) -> int:
    """A verdict that this page does not know is worth a look: it comes first."""
    return order.index(verdict) if verdict in order else -1


def _tally(checks: list[dict]) -> str:
    counts: dict[str, int] = {}
    for check in checks:
        verdict = str(check.get("verdict"))
        counts[verdict] = counts.get(verdict, 0) + 1
    words = {"fail": "failed", "warn": "warned", "pass": "passed", "skipped": "skipped"}
    known = [f"{counts.pop(name)} {word}" for name, word in words.items() if name in counts]
    return ", ".join([*known, *(f"{number} {name}" for name, number in counts.items())])


def _item(check: dict) -> Html:
    name, verdict = str(check.get("name")), str(check.get("verdict"))
    when = _WHEN.get(str(check.get("when")), check.get("when"))
    style = verdict if verdict in _VERDICTS else "warn"
    reference = f"{_EXPLAINED_IN}#{name}"
    return tag(
        "li",
        tag("span", _VERDICTS.get(verdict, verdict), class_=f"verdict {style}"),
        tag(
            "div",
            tag("h3", name),
            tag("p", check.get("message") or ""),
            tag("p", when, " · ", tag("code", reference), class_="remark"),
        ),
        tag("p", check.get("figure") or "", class_="measured"),
        id=f"check-{name}",
        class_=f"check {style}",
    )
