"""Heat maps: accuracy under common corruptions, and transfer of attacks between models."""

from he_keras.evaluation.report_page import formatting
from he_keras.evaluation.report_page.markup import Html, join, tag
from he_keras.evaluation.report_page.section import Section
from he_keras.evaluation.report_page.source import ReportSource
from he_keras.evaluation.report_page.tables import (
    Column,
    legend,
    number,
    paragraphs,
    row,
    row_header,
    shade,
    table,
)

_SEVERITIES = 5


class _Scale:
    """Shades of accuracies: none for the highest of a map, the strongest for the lowest."""

    def __init__(self, shares) -> None:
        known: list[float] = [share for share in shares if formatting.is_number(share)]
        self.low, self.high = (min(known), max(known)) if known else (0.0, 1.0)

    def shade(self, share) -> str:
        """The class of a cell."""
        if not formatting.is_number(share) or self.high == self.low:
            return shade(0.0)
        return shade((self.high - share) / (self.high - self.low))

    def legend(self) -> Html:
        """The two ends of the scale."""
        ends = (formatting.percent(end, 1) for end in (self.high, self.low))
        return legend(*ends)


def corruptions(source: ReportSource) -> Section | None:
    """Accuracy for each corruption and severity, where that was measured."""
    measured = source.report.get("corruptions")
    accuracies = (measured or {}).get("accuracy") or {}
    if not measured or not accuracies:
        return None
    mean = formatting.percent(measured.get("mean_corruption_accuracy"))
    intro = paragraphs(
        join(
            [
                tag("strong", f"Mean accuracy under corruption: {mean}. "),
                f"Corruptions are not adversarial; they say how the model fares on "
                f"{formatting.count(measured.get('num_images'))} images that got worse by "
                f"accident. Source: {measured.get('source')}.",
            ]
        )
    )
    columns = (
        Column("Corruption", numeric=False),
        *(Column(f"Severity {level}") for level in range(1, _SEVERITIES + 1)),
        Column("Mean"),
    )
    scale = _Scale([share for shares in accuracies.values() for share in shares])
    rows = [_corruption_row(name, shares, scale) for name, shares in accuracies.items()]
    caption = "Accuracy by corruption and severity"
    shown = table("corruption-table", caption, columns, [rows], sortable=True, kind="heat")
    body = join([intro, shown, scale.legend()])
    return Section("corruptions", "Common corruptions", body)


def _corruption_row(name: str, shares: list, scale: _Scale) -> Html:
    known = [share for share in shares if formatting.is_number(share)]
    mean = sum(known) / len(known) if known else None
    return row(
        row_header(name.replace("_", " ")),
        *(_accuracy_cell(share, scale) for share in shares),
        number(formatting.percent(mean, 1), mean, "total"),
    )


def _accuracy_cell(share, scale: _Scale, kind: str = "", remark: str | None = None) -> Html:
    hidden = tag("span", remark, class_="hidden") if remark else None
    content = join([formatting.percent(share, 1), hidden])
    return number(content, share, f"shade {scale.shade(share)} {kind}".strip())


def transfer(source: ReportSource) -> Section | None:
    """How many images survive what was crafted for another model, where that was measured."""
    measured = source.report.get("transfer")
    names = (measured or {}).get("names") or []
    if not measured or not names:
        return None
    intro = paragraphs(
        f"Rows: the model that {measured.get('attack')} was run against. Columns: the model that "
        f"then had to classify the images ({formatting.count(measured.get('num_examples'))} "
        "examples). The diagonal is the attack on the model itself. A cell of a column below its "
        "diagonal value means that the model's own gradients hide its weakness."
    )
    columns = (Column("crafted for ↓ tested on →", numeric=False), *map(Column, names))
    matrix = measured.get("robust_accuracy") or []
    scale = _Scale([share for shares in matrix for share in shares])
    rows = [
        row(row_header(name), *_transfer_cells(position, shares, scale))
        for position, (name, shares) in enumerate(zip(names, matrix, strict=False))
    ]
    caption = "Accuracy of each model on images crafted for each"
    shown = table("transfer-table", caption, columns, [rows], kind="heat")
    body = join([intro, shown, scale.legend()])
    return Section("transfer", "Transfer between models", body)


def _transfer_cells(position: int, shares: list, scale: _Scale) -> list[Html]:
    return [
        _accuracy_cell(share, scale, "diagonal", " (same model)")
        if target == position
        else _accuracy_cell(share, scale)
        for target, share in enumerate(shares)
    ]
