"""docs/architecture.md has an example of every part, and every folder that it names exists."""

import re

from documentation import ROOT, blocks, runs

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
WHAT_CAN_BE_ADDED = [
    "an attack",
    "an objective",
    "a network",
    "a data set",
    "a check",
    "an analysis",
]


def test_there_is_an_example_of_everything():
    titles = re.findall(r"^## Add (.*)$", PAGE, re.MULTILINE)
    assert titles == WHAT_CAN_BE_ADDED
    assert len([block for block in blocks("docs/architecture.md") if runs(block)]) == len(titles)


def test_every_file_and_folder_that_the_page_names_is_there():
    named = set(re.findall(r"`((?:[a-z_]+/)+[a-z_]*(?:\.py)?|[a-z_]+\.py)`", PAGE))
    assert len(named) > 20
    roots = (ROOT, ROOT / "he_keras")
    assert [each for each in named if not any((root / each).exists() for root in roots)] == []
