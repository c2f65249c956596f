"""Every example of docs/architecture.md runs, and every folder that the page names exists."""

import pathlib
import re

import pytest
from forked_programs import Program, run_script

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
SECTIONS = re.findall(r"^## (Add .*?)$(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
WHAT_IT_PRINTS = {
    "Add an attack": r"0\.\d+|1\.0|0\.0",
    "Add an objective": "",
    "Add a network": r"\(None, 8\)",
    "Add a data set": "15 5",
    "Add a check": "pass",
    "Add an analysis": r"\{'mine': 5\.0\}",
}


def test_there_is_an_example_of_everything():
    assert [title for title, _ in SECTIONS] == list(WHAT_IT_PRINTS)


@pytest.mark.parametrize(("title", "text"), SECTIONS, ids=[title for title, _ in SECTIONS])
def test_the_example_runs(title, text, tmp_path):
    """In a process of its own, as it registers names."""
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "example.py").write_text(block)
    example = Program(run_script, tmp_path / "example.py")
    out, err = example.communicate()
    assert example.returncode == 0, err
    assert re.fullmatch(WHAT_IT_PRINTS[title], out.strip())


def test_every_file_and_folder_that_the_page_names_is_there():
    named = set(re.findall(r"`((?:[a-z_]+/)+[a-z_]*(?:\.py)?|[a-z_]+\.py)`", PAGE))
    assert len(named) > 20
    roots = (ROOT, ROOT / "he_keras")
    assert [each for each in named if not any((root / each).exists() for root in roots)] == []
