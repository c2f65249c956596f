"""docs/how-to/gate.md: its figures and the names of its files hold."""

import pathlib
import re

from he_keras.evaluation.gate import ci_files
from he_keras.evaluation.gate.verdicts import examples_needed

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "how-to" / "gate.md").read_text(encoding="utf-8")


def test_the_figures_hold():
    (found,) = re.findall(r"(\d+) images for a limit of ([\d.]+), and (\d+) for ([\d.]+)\.\n", PAGE)
    for needed, limit in (found[:2], found[2:]):
        assert examples_needed(0, 0, 100, float(limit)) == int(needed)
    assert f"gate/{ci_files.SARIF}" in PAGE and f"gate/{ci_files.JUNIT}" in PAGE
