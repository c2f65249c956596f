"""docs/how-to/gate.md: its figures and the names of its files hold."""

import pathlib
import re

from he_keras.evaluation.gate import ci_files
from he_keras.evaluation.gate.paired_loss import PairedLoss

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "how-to" / "gate.md").read_text(encoding="utf-8")


def test_the_figures_hold():
    for limit, needed in re.findall(r"(\d+) images for a limit of ([\d.]+)", PAGE):
        assert PairedLoss(0, 0, 100).examples_needed(float(needed)) == int(limit)
    assert "and 765 for 0.005" in PAGE
    assert PairedLoss(0, 0, 100).examples_needed(0.005) == 765
    assert f"gate/{ci_files.SARIF}" in PAGE and f"gate/{ci_files.JUNIT}" in PAGE
