"""The report of an evaluation: as an object, as files, and as one HTML page that needs no network.

`robustness_report` is the object and its files. `report_page` turns them into plain values, and the
templates in `templates/` turn those into HTML: a page's words and markup stand there only.
"""

from he_keras.evaluation.report.report_page import add_to_report, write_html
from he_keras.evaluation.report.robustness_report import check_belongs

__all__ = ["add_to_report", "check_belongs", "write_html"]
