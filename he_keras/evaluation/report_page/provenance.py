"""Where the numbers come from: command, versions, machine and every setting."""

import json

from he_keras.evaluation.report_page.markup import Html, join, tag
from he_keras.evaluation.report_page.section import Section
from he_keras.evaluation.report_page.source import ReportSource
from he_keras.evaluation.report_page.tables import (
    Column,
    cell,
    paragraphs,
    row,
    row_header,
    scroll_box,
    table,
)


def provenance(source: ReportSource) -> Section:
    """Everything that is needed to run this evaluation again."""
    report = source.report
    parts = [
        paragraphs(
            "What it takes to run this evaluation again. report.json holds all of this for "
            "programs, per_example.npz the verdict on every example."
        ),
        _command(report.get("command")),
        _folded("environment", "Environment", _environment(report.get("environment") or {})),
        _folded(
            "settings", "Settings of the evaluation", _json("settings", report.get("settings"))
        ),
    ]
    for number, attack in enumerate(report["attacks"], 1):
        anchor = f"attack-settings-{number}"
        shown = {"settings": attack.get("settings") or {}}
        stages = attack.get("stages") or []
        if stages:
            shown["stages"] = {stage.get("name"): stage.get("settings") or {} for stage in stages}
        parts.append(_folded(anchor, f"Settings of {attack.get('name')}", _json(anchor, shown)))
    return Section("provenance", "Environment and settings", join(parts))


def _command(command) -> Html | None:
    if not command:
        return None
    words = tag("span", "Command", id="command-label", class_="remark")
    shown = tag("pre", tag("code", command))
    return join([tag("p", words), scroll_box(shown, "command-label")])


def _folded(anchor: str, title: str, content: Html) -> Html:
    return tag("details", tag("summary", title, id=f"{anchor}-label"), content)


def _environment(values: dict) -> Html:
    rows = [
        row(row_header(name.replace("_", " ")), cell(_plain(value)))
        for name, value in values.items()
    ]
    columns = (Column("Name", numeric=False), Column("Value", numeric=False))
    return table("environment-table", "Versions and machine", columns, [rows])


def _plain(value) -> str:
    if value is None:
        return "–"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _json(anchor: str, values) -> Html:
    shown = json.dumps(values or {}, indent=2, ensure_ascii=False)
    return scroll_box(tag("pre", tag("code", shown)), f"{anchor}-label")
