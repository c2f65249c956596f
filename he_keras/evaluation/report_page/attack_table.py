"""The table of attacks: one group of rows for each, with its stages, warnings and note."""

from he_keras.evaluation.report_page import formatting
from he_keras.evaluation.report_page.markup import Html, join, tag
from he_keras.evaluation.report_page.section import Section
from he_keras.evaluation.report_page.source import ReportSource
from he_keras.evaluation.report_page.tables import (
    Column,
    accuracy_bar,
    cell,
    glossary,
    number,
    paragraphs,
    row,
    row_header,
    table,
)

_LEFT_OVER = Column("Left over", hint="worst case after this attack and all before it")
_COLUMNS = (
    Column("Order", hint="in which the attacks ran"),
    Column("Attack", numeric=False),
    Column("Robust accuracy", hint="share of all examples that are still classified correctly"),
    Column("95% interval", sorts=False),
    _LEFT_OVER,
    Column("Attacked", hint="examples that the attack was run on"),
    Column("Broken", hint="attacked examples that it broke"),
    Column("Median distance", hint="of the broken examples, in the norm of the threat model"),
    Column("Largest distance", hint="of the broken examples, in the norm of the threat model"),
    Column("Forward", hint="passes through the network, mean over all examples"),
    Column("Backward", hint="gradient passes, mean over all examples"),
    Column("Time"),
)


def attack_table(source: ReportSource) -> Section:
    """What each attack did."""
    attacks = source.report["attacks"]
    cumulative = all(map(_is_cumulative, attacks))
    columns = [column for column in _COLUMNS if not (cumulative and column is _LEFT_OVER)]
    groups = [_group(position, attack, columns) for position, attack in enumerate(attacks, 1)]
    shown = table(
        "attack-table",
        "Accuracy under each attack; stages of an ensemble stand below it",
        columns,
        groups,
        sortable=True,
        kind="attacks",
    )
    reading = (
        "Every number is a share of all examples: an example that is misclassified without any "
        "attack counts as broken. The worst case is taken example by example, so it can be lower "
        "than every row. Distances are those of the broken examples."
    )
    if source.report["mode"] == "survivors":
        reading += " Each attack ran only on the examples that those before it had not broken."
    return Section("attacks", "Attacks", join([paragraphs(reading), shown, glossary(columns)]))


def _is_cumulative(attack: dict) -> bool:
    """Whether the accuracy under an attack counts what earlier ones broke, and says it all."""
    stages = attack.get("stages") or []
    return all(each.get("remaining") == each.get("robust_accuracy") for each in [attack, *stages])


def _group(position: int, attack: dict, columns: list[Column]) -> list[Html]:
    shows_left_over = _LEFT_OVER in columns
    rows = [_row(str(position), position, attack, shows_left_over)]
    stages = attack.get("stages") or []
    rows += [
        _row(f"{position}.{k}", None, stage, shows_left_over, "stage")
        for k, stage in enumerate(stages, 1)
    ]
    for each, prefix in [(attack, ""), *((stage, f"{stage.get('name')}: ") for stage in stages)]:
        remarks = [("Warning", words, "warn") for words in each.get("warnings") or []]
        if each.get("note"):
            remarks.append(("Note", each["note"], "note"))
        rows += [
            _remark(kind, f"{prefix}{words}", style, len(columns)) for kind, words, style in remarks
        ]
    return rows


def _row(
    label: str, position: int | None, attack: dict, shows_left_over: bool, kind: str = ""
) -> Html:
    accuracy, bounds = attack.get("robust_accuracy"), attack.get("interval")
    measured = (
        (attack.get("num_attacked"), formatting.count),
        (attack.get("num_broken"), formatting.count),
        (attack.get("median_distance"), formatting.significant),
        (attack.get("max_distance"), formatting.significant),
        (attack.get("forward_passes"), formatting.passes),
        (attack.get("backward_passes"), formatting.passes),
        (attack.get("seconds"), formatting.duration),
    )
    remaining = attack.get("remaining")
    return row(
        number(label, position),
        row_header(_name(attack), "attack-name"),
        number(
            join([accuracy_bar(accuracy, bounds), tag("span", formatting.percent(accuracy))]),
            accuracy,
            "with-bar",
        ),
        number(formatting.interval(bounds)),
        number(formatting.percent(remaining), remaining) if shows_left_over else None,
        *(number(shown(value), value) for value, shown in measured),
        kind=kind,
    )


def _name(attack: dict) -> Html:
    """The attack's name, with the scale of the logits where that is not the model's own."""
    scale = (attack.get("settings") or {}).get("logit_scale", "model")
    name = tag("span", attack.get("name"))
    if scale in (None, "model"):
        return name
    words = "scale 1" if scale in ("unit", 1, 1.0) else f"scale {scale}"
    return join([name, " ", tag("span", words, class_="tag")])


def _remark(kind: str, words: str, style: str, width: int) -> Html:
    content = join([tag("strong", f"{kind}: "), words])
    inner = tag("div", content, class_=f"remark-text {style}")
    return row(cell(inner, colspan=width), kind="remark-row")
