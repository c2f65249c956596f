"""The README is as short as it claims to be; test_documentation.py runs its code."""

from documentation import ROOT, blocks

README = "README.md"


def test_the_examples_have_ten_lines_and_the_page_a_screen_and_a_half():
    examples = [block.code for block in blocks(README) if block.language == "python"]
    lengths = [len([line for line in code.splitlines() if line.strip()]) for code in examples]
    assert len(lengths) == 2 and max(lengths) <= 10
    assert len((ROOT / README).read_text(encoding="utf-8").splitlines()) <= 110
