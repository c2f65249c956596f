"""Cosine heads: the paper's cross-entropy protocol beside attacks that it cannot fool."""

import math

from he_keras.evaluation.report_page import formatting
from he_keras.evaluation.report_page.markup import Html, join, tag
from he_keras.evaluation.report_page.section import Section
from he_keras.evaluation.report_page.source import ReportSource
from he_keras.evaluation.report_page.tables import (
    Column,
    accuracy_bar,
    cell,
    number,
    paragraphs,
    row,
    row_header,
    table,
)

_COLUMNS = (
    Column("Attack", numeric=False),
    Column("Robust accuracy"),
    Column("95% interval", sorts=False),
    Column("Above the lowest", hint="percentage points above the lowest row"),
    Column("What it is", numeric=False, sorts=False),
)


def he_panel(source: ReportSource) -> Section | None:
    """The panel that cosine heads must have; nothing for others."""
    panel = source.report.get("he_panel")
    rows = (panel or {}).get("rows") or []
    if not panel or not rows:
        return None
    size = formatting.count(panel.get("num_examples"))
    accuracies = [each.get("robust_accuracy") for each in rows]
    known = [accuracy for accuracy in accuracies if formatting.is_number(accuracy)]
    lowest = min(known) if known else math.nan
    shown = table(
        "he-panel-table",
        f"One cosine head, the same {size} examples, different losses",
        _COLUMNS,
        [[_row(each, lowest) for each in rows]],
        sortable=True,
    )
    body = join([_explanation(source.num_classes), shown])
    return Section("cosine-head", "Cosine head: which loss attacks it", body)


def _explanation(num_classes: int) -> Html:
    likeliest = math.exp(2.0) / (math.exp(2.0) + max(num_classes - 1, 1))
    limit = formatting.percent(likeliest, 1 if likeliest < 0.1 else 0)
    return paragraphs(
        join(
            [
                tag("strong", "Quote the lowest row, not the highest. "),
                "At scale 1 the logits are bare cosines between −1 and 1, so softmax cannot tell "
                f"the classes apart well: with {formatting.count(num_classes)} classes it gives no "
                f"class more than {limit}. The cross-entropy then pushes an image toward all the "
                "other classes at once instead of across the nearest boundary, and it misses "
                "adversarial images that are there.",
            ]
        ),
        "A high number in that row says that the attack was weak, not that the model is robust. "
        "Attacks on differences of logits (margin, DLR) give the same result at every scale, and "
        "AutoAttack contains some. The papers' protocol is here for comparison with their tables "
        "only.",
    )


def _row(each: dict, lowest: float) -> Html:
    accuracy, bounds = each.get("robust_accuracy"), each.get("interval")
    gap = None if accuracy is None else accuracy - lowest
    return row(
        row_header(each.get("name")),
        number(
            join([accuracy_bar(accuracy, bounds), tag("span", formatting.percent(accuracy))]),
            accuracy,
            "with-bar",
        ),
        number(formatting.interval(bounds)),
        number("lowest" if gap == 0 else formatting.points(gap), gap),
        cell(each.get("meaning") or "", kind="prose"),
    )
