"""The README's example runs as it is printed, and is as short as it claims to be."""

import pathlib
import re

README = pathlib.Path(__file__).resolve().parents[2] / "README.md"


def python_blocks():
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_example_is_at_most_twelve_lines():
    (block,) = python_blocks()
    lines = [line for line in block.splitlines() if line.strip()]
    assert len(lines) <= 12


def test_example_runs_and_reports(capsys):
    (block,) = python_blocks()
    names = {}
    exec(compile(block, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "cw-linf-20" in printed
    assert "n = 360" in printed
    assert names["model"].history.history.keys() >= {"val_robust_accuracy", "val_accuracy", "loss"}


def test_files_that_the_readme_names_exist():
    root = README.parent
    targets = re.findall(r"\]\(([^)#]+)\)", README.read_text())
    local = [target for target in targets if not target.startswith("http")]
    assert local
    assert [target for target in local if not (root / target).exists()] == []
