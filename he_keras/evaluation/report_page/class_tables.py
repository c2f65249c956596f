"""Which classes are weak, and what the attacks turn them into."""

import numpy as np

from he_keras.evaluation.report_page import formatting
from he_keras.evaluation.report_page.markup import Html, join, tag
from he_keras.evaluation.report_page.section import Section
from he_keras.evaluation.report_page.source import ReportSource
from he_keras.evaluation.report_page.tables import (
    Column,
    accuracy_bar,
    legend,
    number,
    paragraphs,
    row,
    row_header,
    shade,
    table,
)

#: More classes than this do not fit a matrix that anyone can read.
MAX_MATRIX_CLASSES = 20
_LIST_LENGTH = 20

_CLASS_COLUMNS = (
    Column("Class", numeric=False),
    Column("Examples"),
    Column("Clean accuracy"),
    Column("Worst case"),
    Column("Lost, points"),
)


def class_tables(source: ReportSource) -> Section:
    """Accuracy by class, and the confusions that attacks caused."""
    body = [_accuracy_by_class(source), _confusion(source)]
    return Section("classes", "Classes", join(body))


def _accuracy_by_class(source: ReportSource) -> Html:
    labels = source.per_example["labels"]
    clean = source.per_example["clean"].astype(bool)
    robust = source.per_example["broken_by"] == -1
    measured = []
    for label in np.unique(labels):
        chosen = labels == label
        shares = float(clean[chosen].mean()), float(robust[chosen].mean())
        measured.append((int(label), int(chosen.sum()), *shares))
    caption = "Accuracy by class"
    if len(measured) > MAX_MATRIX_CLASSES:
        caption = f"The {_LIST_LENGTH} weakest of {formatting.count(len(measured))} classes"
        measured.sort(key=lambda each: each[3])
        measured = measured[:_LIST_LENGTH]
    rows = [_class_row(source, *each) for each in measured]
    return table("class-table", caption, _CLASS_COLUMNS, [rows], sortable=True)


def _class_row(source: ReportSource, label: int, size: int, clean: float, robust: float) -> Html:
    return row(
        row_header(source.class_name(label)),
        number(formatting.count(size), size),
        number(formatting.percent(clean), clean),
        number(
            join([accuracy_bar(robust), tag("span", formatting.percent(robust))]),
            robust,
            "with-bar",
        ),
        number(f"{100 * (clean - robust):.2f}", clean - robust),
    )


def _confusion(source: ReportSource) -> Html:
    counts = np.array(source.report.get("confusion") or [], dtype=np.int64)
    if counts.ndim != 2 or not counts.any():
        return paragraphs("No attack turned an example into another class.")
    reading = (
        "Counted over the examples that were classified correctly and then broken: which class "
        "the worst adversarial image of each was taken for."
    )
    shown = _matrix if len(counts) <= MAX_MATRIX_CLASSES else _list
    heading = tag("h3", "True class and adversarial class")
    return join([heading, tag("p", reading), shown(source, counts)])


def _matrix(source: ReportSource, counts: np.ndarray) -> Html:
    names = [source.class_name(number) for number in range(counts.shape[1])]
    columns = [
        Column("true ↓ adversarial →", numeric=False),
        *(Column(name) for name in names),
        Column("All"),
    ]
    largest = int(counts.max())
    rows = []
    for label, counted in enumerate(counts):
        cells = [number(str(k), kind=f"shade {shade(k / largest)}") for k in counted.tolist()]
        total = number(str(counted.sum()), kind="total")
        rows.append(row(row_header(source.class_name(label)), *cells, total))
    caption = "Rows: true class. Columns: class of the adversarial image"
    matrix = table("confusion-table", caption, columns, [rows], kind="heat")
    return join([matrix, legend("none", f"{largest} examples")])


def _list(source: ReportSource, counts: np.ndarray) -> Html:
    order = np.argsort(-counts, axis=None, kind="stable")[:_LIST_LENGTH]
    total = int(counts.sum())
    rows = []
    for flat in order:
        label, taken_for = (int(k) for k in np.unravel_index(flat, counts.shape))
        times = int(counts[label, taken_for])
        if times:
            rows.append(
                row(
                    row_header(source.class_name(label)),
                    row_header(source.class_name(taken_for)),
                    number(formatting.count(times), times),
                    number(formatting.percent(times / total), times / total),
                )
            )
    columns = (
        Column("True class", numeric=False),
        Column("Adversarial class", numeric=False),
        Column("Examples"),
        Column("Share of all broken"),
    )
    caption = (
        f"The {len(rows)} most frequent of {formatting.count(len(counts))} classes' confusions"
    )
    return table("confusion-table", caption, columns, [rows], sortable=True)
