"""Writes the report of an evaluation as one HTML page that needs no other file."""

import pathlib

from he_keras.atomic_files import replacing
from he_keras.evaluation.report_page import formatting
from he_keras.evaluation.report_page.attack_table import attack_table
from he_keras.evaluation.report_page.charts import epsilon_curve
from he_keras.evaluation.report_page.check_list import check_list
from he_keras.evaluation.report_page.class_tables import class_tables
from he_keras.evaluation.report_page.gallery import gallery
from he_keras.evaluation.report_page.he_panel import he_panel
from he_keras.evaluation.report_page.headline import headline
from he_keras.evaluation.report_page.heat_maps import corruptions, transfer
from he_keras.evaluation.report_page.page import page
from he_keras.evaluation.report_page.provenance import provenance
from he_keras.evaluation.report_page.source import ReportSource, read_report

_SECTIONS = (
    headline,
    attack_table,
    he_panel,
    epsilon_curve,
    check_list,
    class_tables,
    gallery,
    corruptions,
    transfer,
    provenance,
)


def write_html(folder) -> pathlib.Path:
    """Writes `report.html` beside the `report.json` of an evaluation.

    The page reads `report.json`, `per_example.npz` and, if the report has a gallery, `gallery.npz`;
    docs/report.md describes them. It opens offline: style, script and pictures are inside.

    Args:
        folder: the evaluation's `output_dir`.

    Returns:
        The path of the page.

    Example:
        >>> from he_keras.evaluation import report
        >>> report.write_html("no/such/folder")
        Traceback (most recent call last):
        ValueError: No report; expected a folder that an evaluation wrote, ...
    """
    source = read_report(folder)
    path = source.folder / "report.html"
    content = _render(source)
    with replacing(path) as temporary:
        temporary.write_text(content, encoding="utf-8")
    return path


def _render(source: ReportSource) -> str:
    report = source.report
    built = (build(source) for build in _SECTIONS)
    remarks = [
        formatting.moment(report.get("created")),
        (report.get("environment") or {}).get("commit"),
    ]
    labels = ("evaluated", "commit")
    return page(
        "Robustness report",
        str(report.get("title") or "Untitled evaluation"),
        [f"{name} {value}" for name, value in zip(labels, remarks, strict=True) if value],
        [section for section in built if section is not None],
    )
