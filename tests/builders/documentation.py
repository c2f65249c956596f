"""The pages of the documentation as blocks of code, and how they are run.

What stands before a block in a comment of the page:
    <!-- not run: REASON -->    the block needs data, hours or a machine that tests do not have
    <!-- run -->                the commands of a bash block run too, not only their flags are read
and anywhere on a page:
    <!-- slow: SECONDS -->      its run is a slow test
A `text` block right behind a block that runs is what it prints; `...` stands for anything.
"""

import contextlib
import doctest
import io
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
_BLOCK = re.compile(
    r"(?:^[ ]*<!-- (?P<mark>[^\n]*?) -->\n)?^(?P<indent>[ ]*)```(?P<language>\w*)\n"
    r"(?P<code>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)


class Block(NamedTuple):
    """A fenced block: its language, the comment before it, its code, its line and its output."""

    language: str
    mark: str
    code: str
    line: int
    expected: str | None = None


def pages():
    """Every page, by its path from the root."""
    found = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.ipynb")]
    return sorted(str(path.relative_to(ROOT)) for path in found)


def blocks(page):
    """The blocks of a page, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    if page.endswith(".ipynb"):
        cells = json.loads(text)["cells"]
        sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        return [Block("python", "", source, number) for number, source in enumerate(sources)]
    found, end = [], 0
    for match in _BLOCK.finditer(text):
        code = re.sub(f"^{match['indent']}", "", match["code"], flags=re.MULTILINE)
        line = text.count("\n", 0, match.start("code")) + 1
        follows = not text[end : match.start()].strip()
        if match["language"] == "text" and found and follows:
            found[-1] = found[-1]._replace(expected=code)
        found.append(Block(match["language"], match["mark"] or "", code, line))
        end = match.end()
    return found


def is_slow(page):
    return "<!-- slow: " in (ROOT / page).read_text(encoding="utf-8")


def runs(block):
    """Whether a block runs when its page does."""
    if block.mark.startswith("not run: "):
        return False
    return block.language == "python" or (block.language == "bash" and block.mark == "run")


def run_page(page):
    """Runs the blocks of a page in order, in one namespace and in an empty folder."""
    names = {"__name__": "__main__"}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        sys.path.insert(0, folder)
        for block in filter(runs, blocks(page)):
            printed = io.StringIO()
            if block.language == "bash":
                printed.write(_run_commands(block))
            else:
                with contextlib.redirect_stdout(printed):
                    exec(compile("\n" * block.line + block.code, page, "exec"), names)
            _compare(page, block, printed.getvalue())


def _run_commands(block):
    lines = block.code.replace("\\\n", " ").splitlines()
    commands = [line for line in lines if line.startswith("he-keras ")]
    printed = ""
    for command in commands:
        arguments = command.partition(" #")[0].split()[1:]
        answer = subprocess.run(
            [sys.executable, "-m", "he_keras_cli", *arguments], capture_output=True, text=True
        )
        if answer.returncode:
            raise AssertionError(f"{command}\n{answer.stdout[-2000:]}\n{answer.stderr[-2000:]}")
        printed += answer.stdout
    return printed


def _compare(page, block, printed):
    if block.expected is None:
        return
    how = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    if not doctest.OutputChecker().check_output(block.expected, printed, how):
        raise AssertionError(
            f"{page}:{block.line} printed\n{printed}\nand the page says\n{block.expected}"
        )


class Command(NamedTuple):
    """A command that a page shows: the program, its arguments, where it stands."""

    program: str
    arguments: tuple
    place: str


def commands(page):
    """Every command of he-keras on a page, in blocks and in the text."""
    if page.endswith(".ipynb"):
        return []
    text = (ROOT / page).read_text(encoding="utf-8")
    shown = [(block.code, block.line) for block in blocks(page) if block.language != "python"]
    prose = _BLOCK.sub("", text)
    shown += [(match[1], 0) for match in re.finditer(r"`((?:he-keras|python tools/)[^`]*)`", prose)]
    found = []
    for code, line in shown:
        for each in re.split(r"\n|;|&&? |\| ", code.replace("\\\n", " ")):
            start = re.search(r"(?:^|\s)(?:he-keras|python tools/(\w+)\.py)(?=\s|$)(.*)", each)
            if not start:
                continue
            words = _words(start[2])
            program = start[1] or (words.pop(0) if words else "")
            found.append(Command(program, tuple(words), f"{page}:{line}"))
    return found


def _words(text):
    """The words of a command, without a comment behind it."""
    text = re.split(r"\s#|\s{2,}\(|\s\(", text)[0]
    return [word.strip("\"'") for word in re.findall(r"(?:\"[^\"]*\"|'[^']*'|[^\s\"']+)+", text)]
