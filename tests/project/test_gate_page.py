"""docs/how-to/gate.md: its commands have flags that exist, its example runs, its figures hold."""

import pathlib
import re

import pytest
from programs import loaded

from he_keras.evaluation.gate import ci_files
from he_keras.evaluation.gate.paired_loss import PairedLoss

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "how-to" / "gate.md").read_text(encoding="utf-8")
JOINED = re.sub(r"\n\s+--", " --", PAGE)
COMMANDS = re.findall(r"^\s*he-keras (\w+) (--.*)$", JOINED, re.MULTILINE)


def test_the_commands_have_flags_that_exist():
    assert [program for program, _ in COMMANDS] == ["gate", "evaluate", "gate"]
    for program, arguments in COMMANDS:
        with loaded(program):
            from absl import flags

            names = [each.removeprefix("--").partition("=")[0] for each in arguments.split()]
            assert [name for name in names if name not in flags.FLAGS] == []


def test_the_figures_hold():
    for limit, needed in re.findall(r"(\d+) images for a limit of ([\d.]+)", PAGE):
        assert PairedLoss(0, 0, 100).examples_needed(float(needed)) == int(limit)
    assert "and 765 for 0.005" in PAGE
    assert PairedLoss(0, 0, 100).examples_needed(0.005) == 765
    assert f"gate/{ci_files.SARIF}" in PAGE and f"gate/{ci_files.JUNIT}" in PAGE


@pytest.mark.slow
def test_the_example_runs(capsys):
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(block, "gate.md", "exec"), {})
    assert "NOT passed, because of min_worst_case." in capsys.readouterr().out
