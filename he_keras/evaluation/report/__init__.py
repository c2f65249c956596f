"""The report of an evaluation as one HTML page that needs no other file and no network.

`stored_report` reads an evaluation's files, `report_page` turns them into plain values, and the
templates in `templates/` turn those into HTML: a page's words and markup stand there only.
"""

from he_keras.evaluation.report.report_page import write_html

__all__ = ["write_html"]
